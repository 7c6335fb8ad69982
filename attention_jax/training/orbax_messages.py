"""Hides messages of orbax and of its threads, most of them about errors that checkpoint.py reports itself."""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator

from absl import logging as absl_logging

# Words of errors and warnings of arrays whose reading or writing was aborted.
ABORTED = ('Event loop is closed', 'reading array index', 'was never awaited')


class _Hiding:
  """Counts the blocks that hide messages, which may end in any order, and restores the settings after the last one.

  After a failed block, only the verbosity of absl is restored.
  """

  def __init__(self):
    self._blocks = 0
    self._has_failed = False

  def start(self) -> None:
    """Begins a block."""
    self._blocks += 1
    if self._blocks > 1:
      return
    self._verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.FATAL)
    if not self._has_failed:  # else these are hidden already
      self._previous_hook = sys.unraisablehook
      sys.unraisablehook = self._hook
      logging.getLogger('asyncio').disabled = True

  def stop(self, has_failed: bool) -> None:
    """Ends a block."""
    self._has_failed |= has_failed
    self._blocks -= 1
    if self._blocks:
      return
    absl_logging.set_verbosity(self._verbosity)
    if not self._has_failed:
      sys.unraisablehook = self._previous_hook
      logging.getLogger('asyncio').disabled = False

  def _hook(self, unraisable) -> None:
    if not any(words in str(unraisable.exc_value) for words in ABORTED):
      self._previous_hook(unraisable)


_hiding = _Hiding()


@contextlib.contextmanager
def without_orbax_messages() -> Iterator[None]:
  """Hides the notes of orbax about its options, and the messages of its threads about errors that it raises too.

  When one array cannot be read or written, orbax aborts all others, some of which end later, on threads of tensorstore.
  After a failure their messages are therefore hidden until the program ends.
  """
  _hiding.start()
  has_failed = True
  try:
    yield
    has_failed = False
  except Exception:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', RuntimeWarning)  # coroutines that were never awaited
      gc.collect()
    raise
  finally:
    _hiding.stop(has_failed)
