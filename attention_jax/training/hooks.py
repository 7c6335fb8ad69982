"""Everything periodic around the loop. A hook is called after each update with (step, state, metrics, last) and may
return why training should stop; the hooks after it then see last=True. Only hooks that are due wait for the device.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from attention_jax.errors import UserError, choose
from attention_jax.training.checkpoint import BEST, Checkpoints
from attention_jax.training.state import TrainState

Hook = Callable[[int, TrainState, Mapping[str, jax.Array], bool], str | None]
Writer = Callable[[int, Mapping[str, Any]], None]


def is_due(step: int, every: int, last: bool = False) -> bool:
  """Whether something is to happen after `step` updates: each `every` of them (0: never) and after the last."""
  return last or (every > 0 and step % every == 0)


class FiniteGuard:
  """Stops at the first update whose loss or gradient is not finite, naming it; looks whenever another hook is due.

  Args: seeds, of runs side by side, whose losses are arrays; none for one run. Any of them stops all.
  """

  def __init__(self, cadences: Sequence[int], checkpoints: Checkpoints, seeds: Sequence[int] = ()):
    self._cadences, self._checkpoints, self._seeds = cadences, checkpoints, seeds
    self._seen: list[tuple[int, Any]] = []

  def __call__(self, step, state, metrics, last):
    self._seen.append((step, (metrics['loss'], metrics['grad_norm'])))
    if not any(is_due(step, every, last) for every in self._cadences):
      return
    for at, values in jax.device_get(self._seen):
      for name, value in zip(('loss', 'gradient norm'), values, strict=True):
        for run in np.argwhere(~np.isfinite(value)):  # [] where there is only one
          whose = f' of seed {self._seeds[run[0]]}' if run.size else ''
          possible = 'a lower learning rate, a longer warm-up, clipping'
          what = f'{name}{whose} is {value[tuple(run)]} at step {at}'
          raise UserError(f'{what}; {self._checkpoints.describe()}; possible: {possible}')
    self._seen.clear()


class TrainingClock:
  """Seconds spent on training itself: what runs inside `paused()` does not count."""

  def __init__(self):
    self._since = time.monotonic()

  def lap(self) -> float:
    """Seconds since the last lap."""
    now = time.monotonic()
    seconds, self._since = now - self._since, now
    return max(seconds, 1e-9)

  @contextlib.contextmanager
  def paused(self):
    began = time.monotonic()
    yield
    self._since += time.monotonic() - began


class MetricsLogger:
  """Hands the metrics of the update, with rates over the interval and the number of compilations, to the writers.

  Of runs side by side the metrics are arrays with a number for each; the rates are of all together.
  """

  def __init__(self, every: int, writers: Sequence[Writer], clock: TrainingClock, compilations: Callable[[], int]):
    self._every, self._writers, self._clock, self._compilations = every, writers, clock, compilations
    self._tokens: list[jax.Array] = []

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
  """How the evaluations went; stored with each checkpoint, so that a resumed run stops where it would have."""

  value: float | None = None
  step: int | None = None
  stale: int = 0  # evaluations since

  def with_evaluation(self, step: int, value: float, direction: str) -> 'BestEvaluation':
    """With one more evaluation. NaN is never better."""
    first = self.value is None and not np.isnan(value)
    better = first or (self.value is not None and (value < self.value if direction == 'min' else value > self.value))
    return BestEvaluation(value, step, 0) if better else self._replace(stale=self.stale + 1)

  def stop_reason(self, patience: int) -> str | None:
    """Why to stop, if it is time: `patience` evaluations without improvement (0: never)."""
    if patience and self.stale >= patience:
      return f'no improvement in {self.stale} evaluations since step {self.step}'


class Evaluator:
  """Evaluates, keeps the best state in `best/` by one metric, and stops when it has not improved for long enough.

  Args:
    evaluate: state -> metrics by name; numbers, or strings that are only written down.
    select: the metric that decides, and direction, 'min' or 'max', what is better.
    best: where an interrupted run left off.
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
  ):
    choose(direction, ('min', 'max'), 'direction')
    self.best = best
    self._every, self._evaluate, self._select, self._direction = every, evaluate, select, direction
    self._patience, self._checkpoints, self._writers, self._clock = patience, checkpoints, writers, clock

  def __call__(self, step, state, metrics, last):
    if not is_due(step, self._every, last):
      return None
    with self._clock.paused():
      jax.block_until_ready(state)
      found = self._evaluate(state)
      value = float(found[choose(self._select, found, 'metric to select by')])
      # All processes must agree on what is best: they save together.
      value = float(multihost_utils.broadcast_one_to_all(np.asarray(value)))
      self.best = self.best.with_evaluation(step, value, self._direction)
      for write in self._writers:
        write(step, {f'validation/{name}': v if isinstance(v, str) else float(v) for name, v in found.items()})
      if self.best.step == step:
        self._checkpoints.save(state, {'best': self.best._asdict()}, BEST)
    return self.best.stop_reason(self._patience)


class InterruptHandler:
  """Turns SIGTERM (preemption) and the first Ctrl-C into a clean stop after the update at hand; a context manager.

  A second Ctrl-C interrupts at once. With several processes the signals keep their meaning, as all would have to stop
  at the same update: such a run is resumed from its last checkpoint.
  """

  def __init__(self):
    self._caught: str | None = None

  def __call__(self, step, state, metrics, last):
    return self._caught

  def __enter__(self):
    self._before = {}
    with contextlib.suppress(ValueError):  # signals belong to the main thread; elsewhere there is nothing to catch
      for number in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ():
        self._before[number] = signal.signal(number, self._catch)
    return self

  def __exit__(self, *_):
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _catch(self, number, frame):
    self._caught = f'stopped by {signal.Signals(number).name}'
    signal.signal(signal.SIGINT, signal.default_int_handler)


class CheckpointSaver:
  """Saves the latest state, with what the run must remember, and always after the last update."""

  def __init__(self, every: int, checkpoints: Checkpoints, clock: TrainingClock, host: Callable[[], Mapping[str, Any]]):
    self._every, self._checkpoints, self._clock, self._host = every, checkpoints, clock, host

  def __call__(self, step, state, metrics, last):
    if is_due(step, self._every, last):
      with self._clock.paused():
        jax.block_until_ready(state)
        self._checkpoints.save(state, self._host())
