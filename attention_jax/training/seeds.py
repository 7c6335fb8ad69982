"""Runs that differ only in their seeds, trained side by side: every step updates all that have not stopped.

Each run has a folder with the same files as a run that is trained alone. The states of all runs are checkpointed
together in the folder above, so that all of them are resumed from the same step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from attention_jax.training.ahead import CompileAhead
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.clock import COMPILATION, SAVING, TrainingClock
from attention_jax.training.hooks import (
  BestEvaluation,
  CheckpointSaver,
  Evaluator,
  InterruptHandler,
  InterruptReason,
  MetricsLogger,
  Writer,
  is_due,
)
from attention_jax.training.incidents import BatchRecorder
from attention_jax.training.loop import Training, finished_reason, make_evaluator, make_guard, no_batches, train_loop
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh, process_share
from attention_jax.training.side_by_side import prepare_side_by_side
from attention_jax.training.state import TrainState
from attention_jax.training.writers import JsonLines, Progress, TensorBoard


class SeedResults(NamedTuple):
  """Result of `fit_seeds`.

  Attributes:
    step: the last step.
    reasons: why each run stopped.
    compilations: number of batch shapes of the updates that this call of `fit_seeds` made.
  """

  step: int
  reasons: list[str]
  compilations: int


class SeedRuns:
  """Checkpoints, writers and evaluations of each run. As a hook, it evaluates and saves the live runs.

  Args:
    folders: the folder of each run.
    seeds: the seed of each run.
    training: options of training, the same for all runs.
    best: the best evaluation of each run so far.
    stopped: why runs have stopped, by the index of the run.
    start: the step that the runs start from.
    awaits_evaluation: whether the evaluation of that step is made again.
    select_run: (states, i) -> the state of run i.
    make_run_evaluator: builds the evaluation hook of a run from `checkpoints`, `writers` and `best`; None for no
      evaluation.
    activity: describes what takes time beside updates, for the progress line.
    clock: paused while states are copied, and until their checkpoints are on disk.
    shared: whether all processes use the same folders, see checkpoint.Checkpoints.
    stack: the exit stack that closes the checkpoints and writers.

  Attributes:
    stopped: why runs have stopped so far, by the index of the run.
    is_interrupted: whether a signal has stopped the last evaluation, which has to be made again for all live runs.
    file_writers: the writers of each run; none in other processes than the first.
  """

  def __init__(
    self,
    folders: Sequence[Path],
    seeds: Sequence[int],
    training: Training,
    best: Sequence[BestEvaluation],
    stopped: Mapping[int, str],
    start: int,
    awaits_evaluation: bool,
    select_run: Callable[[TrainState, int], TrainState],
    make_run_evaluator: Callable[..., Evaluator] | None,
    activity: Callable[[], str],
    clock: TrainingClock,
    shared: bool,
    stack: contextlib.ExitStack,
  ):
    def enter(closable):
      return stack.enter_context(contextlib.closing(closable))

    self.stopped = dict(stopped)
    self.is_interrupted = False
    self._training = training
    self._initial_best = list(best)
    self._select_run = select_run
    self._clock = clock
    self._checkpoints = [
      enter(Checkpoints(path, training.keep, training.checkpoint_every, shared=shared)) for path in folders
    ]
    self.file_writers = [[] for _ in folders]
    self._progress: Writer = _discard
    if jax.process_index() == 0:
      self.file_writers = [
        [enter(JsonLines(path, start, awaits_evaluation)), enter(TensorBoard(path, start))] for path in folders
      ]
      self._progress = enter(Progress(start, training.steps, activity))
    self._evaluators = []
    if make_run_evaluator:
      for checkpoints, writers, seed, run_best in zip(self._checkpoints, self.file_writers, seeds, best, strict=True):
        writers = [*writers, self._progress_writer(seed)]
        self._evaluators.append(make_run_evaluator(checkpoints=checkpoints, writers=writers, best=run_best))

  @property
  def best(self) -> list[BestEvaluation]:
    """The best evaluation of each run."""
    return [evaluator.best for evaluator in self._evaluators] or self._initial_best

  @property
  def live(self) -> np.ndarray:
    """Whether each run is still training, [seeds] bool."""
    return np.array([i not in self.stopped for i in range(len(self._checkpoints))])

  def write(self, step: int, record: Mapping[str, Any]) -> None:
    """Writes one line of progress with the means over the live runs, and the record of each live run to its files.

    Args:
      step: number of the update.
      record: metrics by name; a list holds one number per run, any other value holds for all runs together.
    """
    live = self.live
    self._progress(step, _map_lists(lambda values: float(np.mean(values, where=live)), record))
    for i in np.flatnonzero(live):
      run_record = _map_lists(lambda values, i=i: values[i], record)
      for write in self.file_writers[i]:
        write(step, run_record)

  def __call__(self, step: int, states: TrainState, metrics: Mapping[str, jax.Array], last: bool) -> str | None:
    is_evaluated = is_due(step, self._training.evaluate_every if self._evaluators else 0, last)
    is_saved = is_due(step, self._training.checkpoint_every, last)
    interrupt = None
    if is_evaluated or is_saved:
      best, stopped = self.best, dict(self.stopped)
      for i in np.flatnonzero(self.live):
        state = self._select_run(states, i)
        reason = self._evaluators[i](step, state, metrics, last) if self._evaluators else None
        if isinstance(reason, InterruptReason):
          self._forget_evaluations(best, stopped)
          interrupt = reason
          break
        if reason:
          self.stopped[int(i)] = reason
        if reason or is_saved:
          with self._clock.paused(SAVING):
            self._checkpoints[i].save(state, {'best': self.best[i]._asdict()})
      with self._clock.paused(SAVING):
        # The checkpoint of all runs refers to the checkpoints of each run, which must be on disk before it.
        for checkpoints in self._checkpoints:
          checkpoints.wait()
    return interrupt or (None if self.live.any() else 'every run has stopped')

  def host_values(self) -> dict[str, Any]:
    """Returns the values that are stored beside the states of all runs."""
    return {
      'best': [best._asdict() for best in self.best],
      'stopped': self.stopped,
      'awaits_evaluation': self.is_interrupted,
    }

  def _forget_evaluations(self, best: Sequence[BestEvaluation], stopped: Mapping[int, str]) -> None:
    """Restores the results of earlier evaluations, as all runs are evaluated again."""
    self.is_interrupted = True
    self.stopped = dict(stopped)
    for evaluator, run_best in zip(self._evaluators, best, strict=True):
      evaluator.best = run_best

  def _progress_writer(self, seed: int) -> Writer:
    """Returns a writer of the evaluations of one run to the progress line."""
    return lambda step, record: self._progress(step, {'seed': seed, **record})


def fit_seeds(
  folder: str | Path,
  folders: Sequence[Path],
  training: Training,
  *,
  loss: Loss,
  init_params: Callable[[int], Any],
  stream: Callable[[int, int], Iterable],
  first_of_each_shape: Callable[[int, int], Iterable] = no_batches,
  evaluate: Callable[[TrainState], Mapping[str, Any]] | None = None,
  compile_evaluation: Callable[[TrainState, Callable[[], bool]], None] | None = None,
  direction: str = 'min',
  mesh: Mesh | None = None,
  after_save: Callable[[], None] | None = None,
  shared: bool = True,
) -> SeedResults:
  """Trains one run for each seed training.seed, training.seed + 1, ..., side by side; otherwise as `loop.fit`.

  A run that has stopped early stays as it is, even if training.patience is raised later.

  Args:
    folder: the folder of the checkpoints of all runs together.
    folders: the folder of each run; see folder.prepare_folder.
    training: options of training, the same for all runs.
    loss: the loss to minimise.
    init_params: seed -> initial parameters; called for values only if there is no checkpoint.
    stream: (start, stop) -> batches with a leading axis of runs; see batching.StackedBatches.
    first_of_each_shape: as for `loop.fit`: batches of one run, without that axis.
    evaluate, compile_evaluation: as for `loop.fit`, of one run at a time.
    direction: as for `loop.fit`.
    mesh: the mesh of the devices; by default all.
    after_save: called when a checkpoint of all runs is on disk, see hooks.CheckpointSaver.
    shared: whether all processes use the same folders, see checkpoint.Checkpoints.

  Returns:
    The last step, why each run stopped, and the number of batch shapes.

  Raises:
    UserError: as `loop.fit`; if a loss or gradient is not finite, the message names the seed.
  """
  seeds = [training.seed + i for i in range(len(folders))]
  mesh = mesh or make_mesh(seeds=len(seeds))
  side_by_side = prepare_side_by_side(training, loss, init_params, mesh, seeds)
  with contextlib.ExitStack() as stack:
    checkpoints = Checkpoints(folder, training.keep, training.checkpoint_every, shared=shared)
    stack.enter_context(contextlib.closing(checkpoints))
    best = [BestEvaluation()] * len(seeds)
    stopped = {}
    start = 0
    if restored := checkpoints.resume(side_by_side.state_shapes):
      stacked, host = restored
      states = side_by_side.unstack(stacked)
      best = [BestEvaluation(**fields) for fields in host['best']]
      stopped = {int(i): reason for i, reason in host['stopped'].items()}  # JSON has string keys
      start = int(side_by_side.select(states, 0).step)
    awaits_evaluation = bool(restored and host.get('awaits_evaluation'))
    clock = TrainingClock()
    is_finished = len(stopped) == len(seeds) or start >= training.steps
    if is_finished and not awaits_evaluation:
      reasons = [stopped.get(i, finished_reason(training.steps)) for i in range(len(seeds))]
      return SeedResults(start, reasons, 0)

    ahead = CompileAhead(
      side_by_side.compile_for,
      first_of_each_shape(start, training.steps),
      functools.partial(compile_evaluation, side_by_side.run_shapes()) if compile_evaluation else None,
      None if restored else side_by_side.init_states,
    )
    stack.enter_context(ahead)
    interrupts = stack.enter_context(InterruptHandler())
    make_run_evaluator = None
    if evaluate:
      evaluate = ahead.wrap_evaluation(evaluate)
      make_run_evaluator = functools.partial(
        make_evaluator, training, evaluate, direction, clock=clock, signals=interrupts
      )
    runs = SeedRuns(
      folders,
      seeds,
      training,
      best,
      stopped,
      start,
      awaits_evaluation,
      side_by_side.select,
      make_run_evaluator,
      ahead.describe,
      clock,
      shared,
      stack,
    )
    recorder = BatchRecorder(folder, stream, process_share(mesh)[0], rows_axis=1)
    guard = make_guard(training, evaluate, checkpoints, recorder, runs.file_writers, seeds)
    hooks = [  # in the order of loop.fit
      guard,
      MetricsLogger(training.log_every, [runs.write], clock, side_by_side.compilations),
      runs,
      interrupts,
      guard.check_rest,
      CheckpointSaver(
        training.checkpoint_every, checkpoints, clock, runs.host_values, side_by_side.stack, after_save=after_save
      ),
    ]

    def step_live_runs(states, batch):
      with clock.paused(COMPILATION):
        ahead.prepare(jax.tree.map(lambda x: x[0], batch))
      return side_by_side(states, batch, runs.live)

    if not restored:
      with clock.paused(COMPILATION):
        states = ahead.first_state()
    reason = finished_reason(start) if start >= training.steps else None
    if awaits_evaluation:
      # Due, even if it followed the last step and `steps` was raised.
      followed_last = not is_due(start, training.evaluate_every)
      reason = runs(start, states, {}, followed_last or start >= training.steps) or reason
    if not reason:
      states, reason = train_loop(step_live_runs, states, clock.timed_stream(stream), hooks, start, training.steps)
    if jax.process_index() == 0:
      print(clock.describe())
    reason = interrupts.after_training() or reason
    stopped = {} if isinstance(reason, InterruptReason) else runs.stopped
    reasons = [stopped.get(i, reason) for i in range(len(seeds))]
    return SeedResults(int(side_by_side.select(states, 0).step), reasons, side_by_side.compilations())


def _discard(step: int, record: Mapping[str, Any]) -> None:
  """Progress writer of all processes except the first: writes nothing."""


def _map_lists(fn: Callable[[list], Any], record: Mapping[str, Any]) -> dict[str, Any]:
  """Applies `fn` to the values of a record that are lists; the others stay as they are."""
  return {name: fn(value) if isinstance(value, list) else value for name, value in record.items()}
