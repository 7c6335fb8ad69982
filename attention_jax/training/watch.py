"""What watches the batches of an evaluation, which may take minutes: a report of progress, and the signals to stop."""

import time
from collections.abc import Callable

FIRST_REPORT = 15.0  # seconds after which the first line is logged; the intervals double

Watch = Callable[[int, int], None]  # called before each batch: (batches that are done, all batches or 0 if unknown)


def unwatched(done: int, total: int) -> None:
  """The watch that does nothing."""


def watch_all(*watches: Watch) -> Watch:
  """Returns the watch that calls each of these."""

  def watch(done: int, total: int) -> None:
    for each in watches:
      each(done, total)

  return watch


class BatchProgress:
  """A watch that logs a line at intervals that double, for the first time after FIRST_REPORT seconds.

  Args:
    subject: the work that takes long, such as 'evaluating test'; each line begins with it.
    log: called with each line.
  """

  def __init__(self, subject: str, log: Callable[[str], None]):
    self._subject = subject
    self._log = log
    self._start = time.monotonic()  # of the present sequence of batches
    self._next = self._start + FIRST_REPORT
    self._interval = FIRST_REPORT

  def __call__(self, done: int, total: int) -> None:
    now = time.monotonic()
    if not done:
      self._start = now
    elif now >= self._next:
      self._interval *= 2
      self._next = now + self._interval
      progress = f'{done} batches'
      if total:
        progress = f'batch {done} of {total}, {(now - self._start) * (total - done) / done / 60:.1f} min left'
      self._log(f'{self._subject}: {progress}')
