"""A run during training: its checkpoints, its files of metrics, its best evaluation, and the checks of its losses."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from attention_jax.errors import UserError, choose, report_write_errors
from attention_jax.training.checkpoint import BEST, Checkpoints
from attention_jax.training.clock import GOODPUT, Goodput, TrainingClock, read_goodput, write_goodput
from attention_jax.training.config import Training
from attention_jax.training.interrupts import StopSignals
from attention_jax.training.peers import gather
from attention_jax.training.state import TrainState
from attention_jax.training.watch import Watch
from attention_jax.training.writers import EVALUATION_PREFIX, JsonLines, Writer, last_step

MAX_SKIPPED = 100  # updates in a row that are skipped before training stops: the parameters no longer change
SPIKE_WINDOW = 50  # number of earlier losses with which a loss is compared
SPIKE_DEVIATIONS = 8.0  # a spike exceeds their mean by more than this number of standard deviations,
SPIKE_RATIO = 1.5  # and this multiple of their mean
MAX_SPIKES = 5  # in a row; the loss has a new level after them

Evaluate = Callable[[TrainState, Watch], Mapping[str, Any]]
Progress = Callable[[int, Mapping[str, Any]], None]


class InterruptReason(str):
  """Reason to stop, given by a signal: the run can be resumed."""


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

  def stop_reason(self, patience: int) -> str:
    """Returns the reason to stop after `patience` evaluations without improvement (0: never), or ''."""
    if patience and self.stale >= patience:
      if self.step is None:
        return f'the metric to select by was NaN in all {self.stale} evaluations'
      return f'no improvement since step {self.step}, evaluations: {self.stale}'
    return ''


class SpikeDetector:
  """Detects losses far above the last SPIKE_WINDOW ones that were not spikes.

  After MAX_SPIKES spikes in a row, losses are compared with those after them.
  """

  def __init__(self):
    self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
    self._spikes_in_a_row = 0

  def __call__(self, loss: float) -> float | None:
    """Returns the mean of the last SPIKE_WINDOW losses if `loss` is a spike; None otherwise, or if there are fewer."""
    losses = self._losses
    if len(losses) == SPIKE_WINDOW:
      mean = statistics.fmean(losses)
      bound = mean + SPIKE_DEVIATIONS * statistics.pstdev(losses)
      if loss > max(bound, SPIKE_RATIO * mean):
        self._spikes_in_a_row += 1
        if self._spikes_in_a_row == MAX_SPIKES:
          losses.clear()
        return mean
    self._spikes_in_a_row = 0
    losses.append(loss)
    return None


class TrainedRun:
  """One run while it is trained, in its own folder.

  Args:
    folder: the run folder.
    training: options of training.
    name: what messages call the run, such as 'seed 3'; '' for a single run.
    direction: 'min' if a lower value of `training.select` is better, 'max' if a higher one is.
    log: called with each line of progress.

  Attributes:
    start: the step that the run starts from.
    reason: why the run has stopped, or ''.
    best: the best evaluation so far.
    goodput: what the time of the run went into before this start, which is counted.
    awaits_evaluation: whether a signal has stopped the evaluation of the last step: it is made when the run is resumed.
  """

  def __init__(self, folder: epath.PathLike, training: Training, name: str, direction: str, log: Callable[[str], None]):
    choose(direction, ('min', 'max'), 'direction')
    self.start = 0
    self.reason = ''
    self.goodput = Goodput()
    self.best = BestEvaluation()
    self.awaits_evaluation = False
    self._folder = epath.Path(folder)
    self._training = training
    self._name = name
    self._direction = direction
    self._log = log
    self._checkpoints = Checkpoints(folder, training.keep, training.checkpoint_every)
    self._writers: list[Writer] = []
    self._progress: Progress | None = None
    self._spikes = SpikeDetector()
    self._skipped_in_a_row = 0

  @property
  def is_finished(self) -> bool:
    """Whether nothing is left to be done."""
    return bool(self.reason) and not self.awaits_evaluation

  def is_live(self, step: int) -> bool:
    """Returns whether the run makes the update of this number."""
    return not self.reason and self.start < step

  def restore(self, shapes: TrainState) -> TrainState | None:
    """Reads the latest checkpoint, and what it records of the run; None for a new run.

    Args:
      shapes: shapes, dtypes and shardings of the state.

    Raises:
      UserError: as `Checkpoints.resume`, and for the folder of an exported run.
    """
    restored = self._checkpoints.resume(lambda: shapes)
    if restored is None:
      if self._checkpoints.host_values(BEST) == {}:
        raise UserError(f'{self._folder} is an exported run, from which training cannot resume; choose another folder')
      return None
    state, host = restored
    self.start = int(state.step)
    self.best = BestEvaluation(**host['best'])
    self.awaits_evaluation = host.get('awaits_evaluation', False)
    self._checkpoints.pinned = host.get('pinned')
    if self.best.step is not None and not self._checkpoints.steps(BEST):
      self._log(f'{self._folder / BEST} lacks the best state so far, of step {self.best.step}')
    self.decide_to_stop(self.start)
    return state

  def open_writers(self, progress: Progress | None, writers: Sequence[Writer]) -> None:
    """Opens the files of metrics and `writers`, in the first process alone; `progress` gets each evaluation too."""
    self._progress = progress
    if progress:
      before = read_goodput(self._folder)
      repeated = before.repeated_updates + max(0, (last_step(self._folder) or 0) - self.start)
      self.goodput = before._replace(starts=before.starts + 1, repeated_updates=repeated)
      self._writers = [JsonLines(self._folder, self.start)]
      for writer in writers:
        writer.open(self.start)
        self._writers.append(writer)

  def write(self, step: int, record: Mapping[str, Any]) -> None:
    """Writes one record to the files of metrics."""
    for writer in self._writers:
      writer.write(step, record)

  def check(self, update: int, loss: float, gradient_norm: float) -> None:
    """Checks the loss and the gradient of an update, and records a spike of the loss.

    Args:
      update: number of the update, from 1.
      loss: its loss.
      gradient_norm: the norm of its gradient.

    Raises:
      UserError: if one of them is not finite, unless such updates are skipped, and there are at most MAX_SKIPPED in a
        row.
    """
    values = {'loss': loss, 'gradient norm': gradient_norm}
    of_run = f' of {self._name}' if self._name else ''
    problem = next((f'{name}{of_run} is {value}' for name, value in values.items() if not np.isfinite(value)), '')
    if not problem:
      self._skipped_in_a_row = 0
      if (mean := self._spikes(loss)) is not None:
        self.write(update, {'train/spike': loss, 'train/spike_mean': mean})
      return
    self._skipped_in_a_row += 1
    if self._checkpoints.pinned is None:
      self._checkpoints.pinned = self._checkpoints.latest() or 0
    if self._training.on_nonfinite == 'skip' and self._skipped_in_a_row <= MAX_SKIPPED:
      self._log(f'{problem} at step {update}: update skipped; replay --step={update} examines it')
      return
    skipping = '' if self._training.on_nonfinite == 'skip' else ', or skip such updates by on_nonfinite=skip'
    raise UserError(
      f'{problem} at step {update}; {self._checkpoints.describe()}; try a lower learning rate, a longer warm-up or '
      f'clipping{skipping}; replay --step={update} examines the update'
    )

  def evaluate(self, step: int, state: TrainState, evaluate: Evaluate, signals: StopSignals) -> None:
    """Evaluates a state, saves it if it is the best one so far, and decides whether training stops.

    Args:
      step: the step of the state.
      state: the state.
      evaluate: (state, watch) -> metrics by name.
      signals: the signals that stop an evaluation.

    Raises:
      Interrupted: if a signal has stopped the evaluation.
      UserError: if `evaluate` lacks the metric to select by, or the state cannot be saved.
    """
    self.awaits_evaluation = True
    results = evaluate(state, signals.check)
    self.awaits_evaluation = False
    value = float(results[choose(self._training.select, results, 'metric to select by')])
    # All processes must agree on which state is best, because they save it together.
    value = float(gather(np.asarray(value))[0])  # exactly: jax would round it to float32
    self.best = self.best.with_evaluation(step, value, self._direction)
    record = {f'{EVALUATION_PREFIX}{name}': x if isinstance(x, str) else float(x) for name, x in results.items()}
    self.write(step, record)
    if self._progress:
      self._progress(step, {'run': self._name, **record} if self._name else record)
    if self.best.step == step:
      self._checkpoints.save(state, {'best': self.best._asdict()}, BEST)
    self.decide_to_stop(step)

  def save(self, step: int, state: TrainState) -> None:
    """Starts to write the latest state, that of `step`; later calls, and `close`, report an error of writing."""
    host = {
      'best': self.best._asdict(),
      'awaits_evaluation': self.awaits_evaluation,
      'pinned': self._checkpoints.pinned,
    }
    self._checkpoints.save(state, host)
    for writer in self._writers:
      writer.begin_part(step)

  def store_goodput(self, clock: TrainingClock) -> str:
    """Stores the goodput of the run, in the first process alone, and returns its description."""
    goodput = clock.goodput(self.goodput)
    if self._progress:
      with report_write_errors(self._folder / GOODPUT):
        write_goodput(self._folder, goodput)
    return goodput.describe()

  def report_save_error(self) -> None:
    """Raises UserError if the last checkpoint could not be written; does not wait for one that is being written."""
    if not self._checkpoints.is_writing():
      self._checkpoints.wait()

  def close(self) -> None:
    """Waits until the last checkpoint is on disk, and closes all files."""
    for writer in self._writers:
      writer.close()
    self._checkpoints.close()

  def decide_to_stop(self, step: int) -> None:
    """Sets the reason to stop after an update, if there is one: the evaluations so far, or that it was the last."""
    finished = f'all {self._training.steps} steps are done' if step >= self._training.steps else ''
    self.reason = self.best.stop_reason(self._training.patience) or finished
