"""Wall-clock time of a run by activity: updates, waiting for data, compiling, evaluating, saving."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

DATA = 'waiting for data'
COMPILATION = 'compiling'
EVALUATION = 'evaluating'
SAVING = 'saving'


class TrainingClock:
  """Measures the seconds spent on training itself, without those inside `paused()`, and the share of each activity."""

  def __init__(self):
    self._start = time.monotonic()
    self._lap_start = self._start
    self._seconds = dict.fromkeys((DATA, COMPILATION, EVALUATION, SAVING), 0.0)

  def lap(self) -> float:
    """Returns the seconds since the last lap, without pauses, and starts the next one."""
    now = time.monotonic()
    seconds = now - self._lap_start
    self._lap_start = now
    return max(seconds, 1e-9)

  @contextlib.contextmanager
  def paused(self, activity: str) -> Iterator[None]:
    """Excludes the time that the block takes from the lap, and counts it for an activity."""
    pause_start = time.monotonic()
    with self._measured(activity):
      yield
    self._lap_start += time.monotonic() - pause_start

  def timed_stream(self, stream: Callable[[int, int], Iterable]) -> Callable[[int, int], Iterator]:
    """Wraps `stream`, (start, stop) -> batches: the time until each batch is available counts as DATA."""

    def timed(start: int, stop: int) -> Iterator:
      batches = iter(stream(start, stop))
      while True:
        with self._measured(DATA):
          batch = next(batches, None)
        if batch is None:
          return
        yield batch

    return timed

  def describe(self) -> str:
    """Returns 'wall clock 25 s: updates 60 %, waiting for data 3 %, ...'; what is not measured counts as updates."""
    total = max(time.monotonic() - self._start, 1e-9)
    seconds = {'updates': total - sum(self._seconds.values())} | self._seconds
    shares = ', '.join(f'{activity} {100 * part / total:.0f} %' for activity, part in seconds.items())
    return f'wall clock {total:.0f} s: {shares}'

  @contextlib.contextmanager
  def _measured(self, activity: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    self._seconds[activity] += time.monotonic() - start
