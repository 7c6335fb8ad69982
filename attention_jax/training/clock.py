"""Wall-clock time of a run by activity, over all its starts: updates, data, compiling, evaluating, saving."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from etils import epath

from attention_jax.atomic import write_text
from attention_jax.errors import UserError

GOODPUT = 'goodput.json'
UPDATES = 'updates'
DATA = 'waiting for data'
COMPILATION = 'compiling'
EVALUATION = 'evaluating'
SAVING = 'saving'


class Goodput(NamedTuple):
  """What the time of a run went into, over all its starts; of a killed start, up to its last checkpoint.

  Attributes:
    starts: number of processes, or groups of processes, that have trained the run.
    repeated_updates: number of logged updates after the checkpoint from which a later start resumed.
    seconds: activity -> wall-clock time.
  """

  starts: int = 0
  repeated_updates: int = 0
  seconds: dict[str, float] = dict.fromkeys((UPDATES, DATA, COMPILATION, EVALUATION, SAVING), 0.0)

  def describe(self) -> str:
    """Returns 'wall clock 25 s: updates 60 %, waiting for data 3 %, ...', and the starts if there are several."""
    total = max(sum(self.seconds.values()), 1e-9)
    shares = ', '.join(f'{activity} {100 * part / total:.0f} %' for activity, part in self.seconds.items())
    starts = f'; {self.starts} starts, {self.repeated_updates} updates repeated' if self.starts > 1 else ''
    return f'wall clock {total:.0f} s: {shares}{starts}'


def read_goodput(folder: epath.PathLike) -> Goodput:
  """Returns the goodput that a run folder holds; that of a new run if there is none.

  Raises:
    UserError: if it cannot be read.
  """
  path = epath.Path(folder) / GOODPUT
  try:
    return Goodput(**json.loads(path.read_text()))
  except FileNotFoundError:
    return Goodput()
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}; delete it to count from now on') from error


def write_goodput(folder: epath.PathLike, goodput: Goodput) -> None:
  """Stores the goodput of a run in its folder."""
  write_text(epath.Path(folder) / GOODPUT, json.dumps(goodput._asdict(), indent=2) + '\n')


class TrainingClock:
  """Measures the seconds spent on training itself, without those inside `paused()`, and those of each activity."""

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

  def seconds(self) -> float:
    """Returns the seconds since the start, without pauses."""
    now = time.monotonic()
    return now - self._start - sum(self._seconds.values()) + self._seconds[DATA]

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

  def goodput(self, before: Goodput) -> Goodput:
    """Returns the goodput of a run at this moment; what is not measured counts as updates.

    Args:
      before: its goodput before this start, with this start among `starts`.
    """
    updates = time.monotonic() - self._start - sum(self._seconds.values())
    seconds = {UPDATES: updates} | self._seconds
    return before._replace(seconds={name: round(before.seconds.get(name, 0.0) + x, 2) for name, x in seconds.items()})

  @contextlib.contextmanager
  def _measured(self, activity: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    self._seconds[activity] += time.monotonic() - start
