"""`fit`: trains a model, with checkpoints, exact resume, records of metrics, evaluation and early stopping."""

import contextlib
import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from attention_jax.errors import UserError
from attention_jax.training.clock import COMPILATION, EVALUATION, SAVING, TrainingClock
from attention_jax.training.compile_pool import CompilePool
from attention_jax.training.config import Training
from attention_jax.training.interrupts import Interrupted, StopSignals
from attention_jax.training.loss import Loss
from attention_jax.training.peers import fail_together
from attention_jax.training.run import BestEvaluation, Evaluate, InterruptReason, TrainedRun
from attention_jax.training.seeds import make_updates
from attention_jax.training.state import TrainState, count_parameters
from attention_jax.training.writers import DEFAULT_TRACKERS, Progress, RunInfo, Writer, make_trackers


class FitResult(NamedTuple):
  """Result of `fit`.

  Attributes:
    state: the state after the last update.
    reason: why training stopped; an InterruptReason if a signal has stopped it.
    best: the best evaluation.
    compilations: number of batch shapes of the updates that this call of `fit` made.
  """

  state: TrainState
  reason: str
  best: BestEvaluation
  compilations: int


def fit(
  folder: epath.PathLike,
  training: Training,
  *,
  loss: Loss,
  init_params: Callable[[int], Any],
  stream: Callable[[int, int], Iterable],
  writers: Sequence[Writer] | None = None,
  **options: Any,
) -> FitResult:
  """Trains a model in a run folder, from its latest checkpoint if there is one.

  The same call on the same folder resumes a run that was killed at any moment, exactly: batches and random numbers are
  functions of the step. The folder may be new. `training.folder.prepare_folder`, not `fit`, stores the config.

  Args:
    folder: the run folder.
    training: options of training. The loss implements `label_smoothing`, `objective` and `auxiliary`.
    loss: the loss to minimise.
    init_params: seed -> initial parameters; called for values only if there is no checkpoint.
    stream: (start, stop) -> the batches of steps `start` to `stop` - 1, a pure function of the step.
    writers: writers of metrics beside the files in `metrics/`, which are always written; by default DEFAULT_TRACKERS.
    **options: further arguments of `fit_seeds`.

  Raises:
    UserError: as `fit_seeds`.
  """

  def stream_of_one(start: int, stop: int) -> Iterable:
    return ((batch,) for batch in stream(start, stop))

  (result,) = fit_seeds(
    [folder],
    [training.seed],
    training,
    loss=loss,
    init_params=init_params,
    stream=stream_of_one,
    writers=None if writers is None else [writers],
    **options,
  )
  return result


def fit_seeds(
  folders: Sequence[epath.PathLike],
  seeds: Sequence[int],
  training: Training,
  *,
  loss: Loss,
  init_params: Callable[[int], Any],
  stream: Callable[[int, int], Iterable],
  first_of_each_shape: Callable[[int, int], Iterable] = lambda start, stop: (),
  evaluate: Evaluate | None = None,
  direction: str = 'min',
  mesh: Mesh | None = None,
  epoch: int = 0,
  before_save: Callable[[], None] = lambda: None,
  log: Callable[[str], None] = print,
  writers: Sequence[Sequence[Writer]] | None = None,
) -> list[FitResult]:
  """Trains runs that differ in their seeds alone, side by side; otherwise as `fit`.

  Args:
    folders: the folder of each run.
    seeds: the seed of each run.
    training: options of training, the same for all runs but for `seed`, which is not used.
    loss: the loss to minimise.
    init_params: seed -> initial parameters.
    stream: (start, stop) -> for each step, a sequence with the batch of each run; these have the same shapes.
    first_of_each_shape: (start, stop) -> the first batch of each shape among those of one run, in their order. The
      later shapes are compiled ahead of their use.
    evaluate: (state, watch) -> metrics by name, among them `training.select`; `training.state.evaluation_params`
      returns the parameters to evaluate. It calls watch(done, total) between batches, where a signal stops it; it is
      then called again when the run is resumed.
    direction: 'min' if a lower value of `training.select` is better, 'max' if a higher one is.
    mesh: the mesh of the devices; by default all.
    epoch: updates of an epoch, for the log; 0 for none.
    before_save: called before a checkpoint is written; a UserError that it raises in any process ends the run.
    log: called with lines about the time that training is going to take and has taken, and about updates that are not
      finite; in the first process.
    writers: those of each run, as for `fit`.

  Returns:
    The result of each run.

  Raises:
    UserError: for an invalid option of training, if `stream` ends early, if a checkpoint cannot be read or written, and
      if a loss or a gradient is not finite (with on_nonfinite='skip': in over run.MAX_SKIPPED updates in a row).
  """
  update = make_updates(training, loss, init_params, mesh, seeds)
  if writers is None:
    writers = [make_trackers(DEFAULT_TRACKERS, RunInfo(epath.Path(folder))) for folder in folders]
  log = log if jax.process_index() == 0 else lambda line: None
  with contextlib.ExitStack() as stack:
    names = [f'seed {seed}' for seed in seeds] if len(seeds) > 1 else ['']
    runs = [
      stack.enter_context(contextlib.closing(TrainedRun(folder, training, name, direction, log)))
      for folder, name in zip(folders, names, strict=True)
    ]
    states = [run.restore(update.shapes) for run in runs]
    if all(run.is_finished for run in runs):
      return [FitResult(state, run.reason, run.best, 0) for run, state in zip(runs, states, strict=True)]
    clock = TrainingClock()
    start = min(run.start for run in runs if not run.is_finished)
    pool = stack.enter_context(CompilePool(update.compile_for, first_of_each_shape(start, training.steps)))
    progress = None
    if jax.process_index() == 0:
      progress = stack.enter_context(contextlib.closing(Progress(start, training.steps, pool.describe)))
    for run, writers_of_run in zip(runs, writers, strict=True):
      run.open_writers(progress, writers_of_run)
    signals = stack.enter_context(StopSignals())
    with clock.paused(COMPILATION):
      states = update.load(states)
    loop = _Loop(training, update, runs, evaluate, signals, pool, clock, progress, before_save, epoch, log)
    states, interrupt = loop.run(states, clock.timed_stream(stream), start)
    with clock.paused(SAVING):
      stack.close()
    for description in dict.fromkeys(run.store_goodput(clock) for run in runs):
      log(description)
    interrupt = interrupt or signals.last_reason()
    reasons = [InterruptReason(f'stopped by {interrupt}') if interrupt else run.reason for run in runs]
    compilations = update.compilations()
    return [
      FitResult(update.select(states, i), reason, run.best, compilations)
      for i, (run, reason) in enumerate(zip(runs, reasons, strict=True))
    ]


class _Loop:
  """The training loop; arguments: see `fit_seeds`."""

  def __init__(self, training, update, runs, evaluate, signals, pool, clock, progress, before_save, epoch, log):
    self.training = training
    self.update = update
    self.runs: Sequence[TrainedRun] = runs
    self.evaluate = evaluate
    self.signals = signals
    self.pool = pool
    self.clock = clock
    self.progress = progress
    self.before_save = before_save
    self.epoch = epoch
    self.log = log
    self.first: tuple[int, float] | None = None  # an update when nothing was compiled, and the seconds of training then
    self.is_described = False
    self.unchecked: list[tuple] = []  # (update, live runs, losses, gradient norms) since the last check
    self.tokens: list = []  # of each update since the last record

  def run(self, states: Any, stream: Callable[[int, int], Iterable], start: int) -> tuple[Any, str]:
    """Makes the updates after `start`; returns the last states, and the name of the signal that stopped training."""
    training = self.training
    interrupt = self.evaluate_runs(start, states, [run.awaits_evaluation for run in self.runs])
    if interrupt or all(run.reason for run in self.runs):
      return states, interrupt
    for step, batches in enumerate(stream(start, training.steps), start + 1):
      live = [run.is_live(step) for run in self.runs]
      with self.clock.paused(COMPILATION):
        self.pool.wait(batches[0])
      states, metrics = self.update(states, batches, live)
      self.unchecked.append((step, live, metrics['loss'], metrics['grad_norm']))
      self.tokens.append(metrics['tokens'])
      self.describe(step, states)

      is_last = step == training.steps
      logs, evaluates, saves = (
        is_last or is_due(step, every)
        for every in (training.log_every, training.evaluate_every if self.evaluate else 0, training.checkpoint_every)
      )
      if logs or evaluates or saves:
        self.check()
      if logs:
        self.record(step, live, metrics)
      # An evaluation precedes the checkpoint that stores its result. A signal stops training after both, so that an
      # interrupted run neither logs nor evaluates where an uninterrupted one does not.
      interrupt = self.evaluate_runs(step, states, live) if evaluates else ''
      interrupt = interrupt or self.signals.reason()
      is_end = is_last or bool(interrupt) or all(run.reason for run in self.runs)
      if is_end:
        self.check()  # the updates before an end are not repeated
      saved = (is_live and bool(saves or is_end or run.reason) for run, is_live in zip(self.runs, live, strict=True))
      self.save(step, states, list(saved))
      if is_end:
        for run in self.runs:
          run.decide_to_stop(max(step, run.start))
        return states, interrupt
    raise UserError(
      f'stream({start}, {training.steps}) has yielded fewer than {training.steps - start} batches; '
      'expected one per update'
    )

  def describe(self, step: int, states: Any) -> None:
    """Logs once the size of the model and the time to the last update, from two updates beside no compilation."""
    if self.is_described or self.pool.describe():
      return
    if self.first is None:  # loads the program
      jax.block_until_ready(states)
      self.first = step, self.clock.seconds()
      return
    first, start = self.first
    if step < first + 2:
      return
    jax.block_until_ready(states)
    self.is_described = True
    seconds = (self.clock.seconds() - start) / 2
    size = f'{count_parameters(self.update.shapes.params):,} parameters'
    size += f', {self.epoch:,} updates an epoch' if self.epoch else ''
    left = datetime.timedelta(seconds=round(seconds * (self.training.steps - step)))
    end = f'{left} to step {self.training.steps:,} without evaluations'
    self.log(f'{size}, {seconds:.2g} s an update (measured on two), {end}')

  def check(self) -> None:
    """Checks the losses of all updates since the last check, which waits for the device."""
    for step, live, losses, norms in jax.device_get(self.unchecked):
      for i in np.flatnonzero(live):
        self.runs[i].check(step, float(losses[i]), float(norms[i]))
    self.unchecked.clear()

  def record(self, step: int, live: Sequence[bool], metrics: Any) -> None:
    """Writes the metrics of an update: of each run to its files, and their means to the line of progress."""
    metrics, tokens = jax.device_get((dict(metrics), self.tokens))
    seconds = self.clock.lap()
    common = {
      'train/tokens_per_second': float(np.sum(tokens)) / seconds,  # of all runs
      'train/steps_per_second': len(tokens) / seconds,
      'train/compilations': self.update.compilations(),
    }
    self.tokens.clear()
    values = {f'train/{name}': np.asarray(value) for name, value in metrics.items() if name != 'tokens'}
    for i in np.flatnonzero(live):
      self.runs[i].write(step, {name: value[i].item() for name, value in values.items()} | common)
    if self.progress and any(live):
      self.progress(step, {name: float(np.mean(value, where=live)) for name, value in values.items()} | common)

  def evaluate_runs(self, step: int, states: Any, selected: Sequence[bool]) -> str:
    """Evaluates the selected runs; returns the name of the signal that has stopped an evaluation, or ''."""
    runs = [i for i in np.flatnonzero(selected) if self.evaluate]
    if not runs:
      return ''
    jax.block_until_ready(states)  # updates that are still running do not count as evaluation
    with self.clock.paused(EVALUATION):
      for i in runs:
        self.runs[i].awaits_evaluation = True
      try:
        for i in runs:
          self.runs[i].evaluate(
            max(step, self.runs[i].start), self.update.select(states, i), self.evaluate, self.signals
          )
      except Interrupted as signal:
        return str(signal)
    return ''

  def save(self, step: int, states: Any, selected: Sequence[bool]) -> None:
    """Starts to write the latest states of the selected runs."""
    if any(selected):
      jax.block_until_ready(states)
      with fail_together():
        self.before_save()
    with self.clock.paused(SAVING):
      for i in np.flatnonzero(selected):
        self.runs[i].save(step, self.update.select(states, i))
      for run in self.runs:
        run.report_save_error()
    if any(selected):
      for run in self.runs:
        run.store_goodput(self.clock)


def is_due(step: int, every: int) -> bool:
  """Returns whether something that is done every so many updates follows update number `step`; 0 means never."""
  return every > 0 and step % every == 0
