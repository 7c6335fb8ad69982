"""Reports the progress of evaluations, which may take minutes."""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

FIRST_REPORT = 15.0  # seconds after which the first line is logged; the intervals double

Result = TypeVar('Result')
_reporter: contextvars.ContextVar['_Reporter | None'] = contextvars.ContextVar('reporter', default=None)


class _Reporter:
  """Logs a line at intervals that double.

  Args:
    subject: the work that takes long, such as 'evaluating test'.
    log: called with each line.
  """

  def __init__(self, subject: str, log: Callable[[str], None]):
    self._subject = subject
    self._log = log
    self._next = time.monotonic() + FIRST_REPORT
    self._interval = FIRST_REPORT

  def report(self, done: int, total: int, start: float) -> None:
    """Logs a line if one is due.

    Args:
      done: number of batches that are done.
      total: number of all batches; 0 if unknown.
      start: the time at which the first batch began, see time.monotonic.
    """
    now = time.monotonic()
    if now < self._next:
      return
    self._interval *= 2
    self._next = now + self._interval
    progress = f'{done} batches'
    if total:
      progress = f'batch {done} of {total}, {(now - start) * (total - done) / done / 60:.1f} min left'
    self._log(f'{self._subject}: {progress}')


@contextlib.contextmanager
def batch_progress(subject: str, log: Callable[[str], None]) -> Iterator[None]:
  """Context manager in which `with_progress` logs progress, for the first time after FIRST_REPORT seconds.

  Args:
    subject: the work that takes long, such as 'evaluating test'; each line begins with it.
    log: called with each line.
  """
  token = _reporter.set(_Reporter(subject, log))
  try:
    yield
  finally:
    _reporter.reset(token)


def with_progress(results: Iterable[Result], total: int) -> Iterator[Result]:
  """Yields the results of batches. Inside of `batch_progress`, logs how many are done.

  Args:
    results: one result of each batch.
    total: number of all batches, from which the time left is computed; 0 if unknown.
  """
  start = time.monotonic()
  for done, result in enumerate(results):
    if done and (reporter := _reporter.get()):
      reporter.report(done, total, start)
    yield result
