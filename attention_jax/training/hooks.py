"""Hooks: everything periodic around the training loop.

The loop calls each hook after each update with (step, state, metrics, last). A hook may return the reason why training
should stop; the hooks after it then get last=True. Only hooks that are due synchronise with the device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.errors import UserError, choose
from attention_jax.training.checkpoint import BEST, Checkpoints
from attention_jax.training.clock import EVALUATION, SAVING, TrainingClock
from attention_jax.training.incidents import BatchRecorder, SpikeDetector
from attention_jax.training.interrupts import Interrupted, StopSignals, stoppable
from attention_jax.training.peers import gather
from attention_jax.training.state import TrainState
from attention_jax.training.writers import EVALUATION_PREFIX

MAX_SKIPPED = 100  # updates in a row that are skipped before training stops: the parameters no longer change
MAX_STORED = 5  # batches that are stored of consecutive updates that are not finite

Hook = Callable[[int, TrainState, Mapping[str, jax.Array], bool], str | None]
Writer = Callable[[int, Mapping[str, Any]], None]


def is_due(step: int, every: int, last: bool = False) -> bool:
  """Returns whether a periodic action is due after update number `step`.

  Args:
    step: number of updates made so far.
    every: updates between two actions; 0 means that only the last update is followed by one.
    last: whether this was the last update.
  """
  return last or (every > 0 and step % every == 0)


class FiniteGuard:
  """Hook that finds updates whose loss or gradient is not finite, and losses far above the earlier ones.

  It fetches the values of all updates since its last check whenever one of the other hooks is due. For an update that
  is not finite, it stores the batch and raises UserError. If the training step has skipped the update, it logs a line
  instead of raising: for at most MAX_SKIPPED updates in a row, of which it stores the first MAX_STORED batches.
  Spikes of the loss are written with their rows. `check_rest` is a second hook, after those that may stop training: it
  checks the updates that are left.

  Args:
    intervals: the intervals of the other hooks, see `is_due`.
    checkpoints: the checkpoints of the run; the error names the last one.
    seeds: the seeds of runs side by side, whose losses are arrays [seeds]; empty for one run. An error of one run stops
      all runs.
    recorder: stores batches and names their rows; None for neither.
    file_writers: of each run, the writers that are called with a record of each spike.
    skips: whether the training step skips updates that are not finite, see step.make_update.
    log: called with a line for each incident that does not stop the run.
  """

  def __init__(
    self,
    intervals: Sequence[int],
    checkpoints: Checkpoints,
    seeds: Sequence[int] = (),
    *,
    recorder: BatchRecorder | None = None,
    file_writers: Sequence[Sequence[Writer]] = ((),),
    skips: bool = False,
    log: Callable[[str], None] = print,
  ):
    self._intervals = intervals
    self._checkpoints = checkpoints
    self._seeds = seeds
    self._recorder = recorder
    self._file_writers = file_writers
    self._skips = skips
    self._log = log
    self._skipped_in_a_row = 0
    self._spike_detectors = [SpikeDetector() for _ in self._seeds or (None,)]
    self._unchecked: list[tuple[int, jax.Array, jax.Array]] = []  # (step, loss, gradient norm)

  def __call__(self, step, state, metrics, last):
    self._unchecked.append((step, metrics['loss'], metrics['grad_norm']))
    if any(is_due(step, every, last) for every in self._intervals):
      self._check()

  def check_rest(self, step, state, metrics, last):
    if last:
      self._check()

  def _check(self) -> None:
    for update, loss, gradient_norm in jax.device_get(self._unchecked):
      loss = np.asarray(loss)  # runs side by side may have a list of losses
      problem = self._problem('loss', loss) or self._problem('gradient norm', np.asarray(gradient_norm))
      if problem:
        self._handle(update, problem)
      else:
        self._skipped_in_a_row = 0
        for run in np.ndindex(loss.shape):  # () for one run
          self._write_spike(update, run, float(loss[run]))
    self._unchecked.clear()

  def _problem(self, name: str, value: np.ndarray) -> str:
    """Describes the first of the values, [] or [seeds], that is not finite; '' if all are finite."""
    for run in map(tuple, np.argwhere(~np.isfinite(value))):  # () for one run
      return f'{name}{self._of_seed(run)} is {value[run]}'
    return ''

  def _of_seed(self, run: tuple[int, ...]) -> str:
    return f' of seed {self._seeds[run[0]]}' if run else ''

  def _handle(self, update: int, problem: str) -> None:
    """Stores the batch of an update and logs it or raises UserError, with the limits that FiniteGuard describes."""
    self._skipped_in_a_row += 1
    stored = self._recorder.store(update) if self._recorder and self._skipped_in_a_row <= MAX_STORED else None
    batch = f'; its batch is {stored}, which the program replay examines' if stored else ''
    if self._skips and self._skipped_in_a_row <= MAX_SKIPPED:
      self._log(f'{problem} at step {update}: update skipped{batch}')
      return
    skipping = '' if self._skips else ', or skip such updates by on_nonfinite=skip'
    raise UserError(
      f'{problem} at step {update}; {self._checkpoints.describe()}; '
      f'try a lower learning rate, a longer warm-up or clipping{skipping}{batch}'
    )

  def _write_spike(self, update: int, run: tuple[int, ...], loss: float) -> None:
    index = run[0] if run else 0
    mean = self._spike_detectors[index](loss)
    if mean is not None and self._file_writers[index]:
      rows = self._recorder.rows(update, run) if self._recorder else []
      for write in self._file_writers[index]:
        write(update, {'train/spike': loss, 'train/spike_mean': mean, 'train/spike_rows': rows})


class MetricsLogger:
  """Hook that passes the metrics of an update to the writers, with rates over the interval and the compilation count.

  The metrics of runs side by side are lists with one number per run. Their tokens per second are summed; one step
  updates every run that has not stopped.

  Args:
    every: updates between two records, see `is_due`.
    writers: called with each record.
    clock: measures the interval.
    compilations: returns the number of batch shapes of the updates made so far.
  """

  def __init__(self, every: int, writers: Sequence[Writer], clock: TrainingClock, compilations: Callable[[], int]):
    self._every = every
    self._writers = writers
    self._clock = clock
    self._compilations = compilations
    self._tokens: list[jax.Array] = []  # of each update of the interval

  def __call__(self, step, state, metrics, last):
    self._tokens.append(metrics['tokens'])
    if not is_due(step, self._every, last):
      return
    metrics, tokens = jax.device_get((dict(metrics), self._tokens))
    seconds = self._clock.lap()
    record = {f'train/{name}': np.asarray(value).tolist() for name, value in metrics.items() if name != 'tokens'}
    record['train/tokens_per_second'] = float(np.sum(tokens)) / seconds
    record['train/steps_per_second'] = len(tokens) / seconds
    record['train/compilations'] = self._compilations()
    self._tokens.clear()
    for write in self._writers:
      write(step, record)


class BestEvaluation(NamedTuple):
  """The best evaluation so far. Stored with each checkpoint, so that early stopping resumes where it was.

  Attributes:
    value: the best value of the selected metric; None before the first one that is not NaN.
    step: the step of that evaluation.
    stale: number of evaluations after that one; of all evaluations if `step` is None.
  """

  value: float | None = None
  step: int | None = None
  stale: int = 0

  def with_evaluation(self, step: int, value: float, direction: str) -> 'BestEvaluation':
    """Returns the best evaluation after one more with this value; NaN is never an improvement.

    Args:
      step: the step of the new evaluation.
      value: its value.
      direction: 'min' if a lower value is better, 'max' if a higher one is.
    """
    if self.value is None:
      is_better = not np.isnan(value)
    elif direction == 'min':
      is_better = value < self.value
    else:
      is_better = value > self.value
    return BestEvaluation(value, step, 0) if is_better else self._replace(stale=self.stale + 1)

  def stop_reason(self, patience: int) -> str | None:
    """Returns the reason to stop after `patience` evaluations without improvement (0: never), or None."""
    if patience and self.stale >= patience:
      if self.step is None:
        return f'the metric to select by was NaN in all {self.stale} evaluations'
      return f'no improvement since step {self.step}, evaluations: {self.stale}'
    return None


class InterruptReason(str):
  """Reason to stop, given by a signal: the run can be resumed."""


def _interrupt_reason(signal_name: str) -> InterruptReason | None:
  return InterruptReason(f'stopped by {signal_name}') if signal_name else None


class Evaluator:
  """Hook that evaluates, saves the best state by one metric, and stops training when it no longer improves.

  A signal stops training before or during an evaluation if `evaluate` calls `interrupts.check_stop`, as evaluations of
  systems do after each batch.

  Args:
    every: updates between two evaluations, see `is_due`.
    evaluate: state -> metrics by name: numbers, or strings, which are written but cannot be selected by.
    select: the metric that decides which state is best.
    direction: 'min' if a lower value of that metric is better, 'max' if a higher one is.
    patience: evaluations without improvement after which training stops; 0 never stops.
    checkpoints: where the best state is saved.
    writers: called with the metrics of each evaluation.
    clock: paused during evaluations.
    best: the best evaluation of a resumed run so far; BestEvaluation() for a new run.
    signals: the signals that stop training.

  Attributes:
    best: the best evaluation so far.
    is_interrupted: whether a signal has stopped the last evaluation, which has to be made again.

  Raises:
    UserError: for an unknown direction; when called, if `evaluate` lacks the metric or the state cannot be saved.
  """

  def __init__(
    self,
    every: int,
    evaluate: Callable[[TrainState], Mapping[str, Any]],
    *,
    select: str,
    direction: str,
    patience: int,
    checkpoints: Checkpoints,
    writers: Sequence[Writer],
    clock: TrainingClock,
    best: BestEvaluation,
    signals: StopSignals,
  ):
    choose(direction, ('min', 'max'), 'direction')
    self.best = best
    self.is_interrupted = False
    self._signals = signals
    self._every = every
    self._evaluate = evaluate
    self._select = select
    self._direction = direction
    self._patience = patience
    self._checkpoints = checkpoints
    self._writers = writers
    self._clock = clock

  def __call__(self, step, state, metrics, last):
    if not is_due(step, self._every, last):
      return None
    jax.block_until_ready(state)  # updates that are still running do not count as evaluation
    with self._clock.paused(EVALUATION):
      try:
        with stoppable(self._signals):
          results = self._evaluate(state)
      except Interrupted as signal:
        self.is_interrupted = True
        return _interrupt_reason(str(signal))
      value = float(results[choose(self._select, results, 'metric to select by')])
      # All processes must agree on which state is best, because they save it together.
      value = float(gather(np.asarray(value))[0])  # exactly: jax would round it to float32
      self.best = self.best.with_evaluation(step, value, self._direction)
      record = {f'{EVALUATION_PREFIX}{name}': x if isinstance(x, str) else float(x) for name, x in results.items()}
      for write in self._writers:
        write(step, record)
      if self.best.step == step:
        self._checkpoints.save(state, {'best': self.best._asdict()}, BEST)
    return self.best.stop_reason(self._patience)


class InterruptHandler(StopSignals):
  """Hook that turns SIGTERM (preemption) and the first Ctrl-C into a clean stop after the current update.

  It returns an InterruptReason to the loop, and handles signals only inside of its context, see StopSignals. Several
  processes stop after the same update, and only on SIGTERM.
  """

  def __call__(self, step, state, metrics, last):
    return _interrupt_reason(self.reason())

  def after_training(self) -> InterruptReason | None:
    """Returns the reason if a signal has arrived, even one after the last update, while its state was saved."""
    return _interrupt_reason(self.last_reason())


class CheckpointSaver:
  """Hook that saves the latest state and the host values of the run, periodically and after the last update.

  Files are written while training continues. If a checkpoint, even a best state that another hook has saved, cannot be
  written, the hook raises UserError after the update during which it failed.

  Args:
    every: updates between two checkpoints, see `is_due`.
    checkpoints: where the state is saved.
    clock: paused while the state is copied, while the hook waits for a checkpoint, and during `after_save`.
    host_values: returns the argument `host_values` of Checkpoints.save.
    stack: returns the state that is stored; None stores the state as it is. See side_by_side.SideBySide.
    after_save: called when a checkpoint is on disk, between two updates or after the last one.
  """

  def __init__(
    self,
    every: int,
    checkpoints: Checkpoints,
    clock: TrainingClock,
    host_values: Callable[[], Mapping[str, Any]],
    stack: Callable[[Any], TrainState] | None = None,
    after_save: Callable[[], None] | None = None,
  ):
    self._every = every
    self._checkpoints = checkpoints
    self._clock = clock
    self._host_values = host_values
    self._stack = stack
    self._after_save = after_save
    self._is_save_pending = False  # a save has been started, and is not confirmed to be on disk yet

  def __call__(self, step, state, metrics, last):
    if is_due(step, self._every, last):
      jax.block_until_ready(state)
      with self._clock.paused(SAVING):
        self._checkpoints.save(self._stack(state) if self._stack else state, self._host_values())
      self._is_save_pending = True
    if last or not self._checkpoints.is_writing():
      with self._clock.paused(SAVING):
        self._checkpoints.wait()  # also for a best state, for the error if it could not be written
        if self._is_save_pending and self._after_save:
          self._after_save()
      self._is_save_pending = False
