"""The messages of orbax and of its threads, about what checkpoint.py reports itself."""

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator

from absl import logging as absl_logging

# Words of errors and warnings of arrays whose reading or writing was aborted.
ABORTED = ('Event loop is closed', 'reading array index', 'was never awaited')


@contextlib.contextmanager
def without_orbax_messages() -> Iterator[None]:
  """Hides the notes of orbax about its options, and the messages of its threads about errors that it raises too.

  When one array cannot be read or written, orbax aborts all others, some of which end later, on threads of tensorstore.
  After a failure the hook that ignores their messages therefore stays.
  """
  previous_hook = sys.unraisablehook
  asyncio_log = logging.getLogger('asyncio')
  verbosity = absl_logging.get_verbosity()

  def hook(unraisable):
    if not any(words in str(unraisable.exc_value) for words in ABORTED):
      previous_hook(unraisable)

  sys.unraisablehook = hook
  asyncio_log.disabled = True
  absl_logging.set_verbosity(absl_logging.FATAL)
  try:
    yield
    sys.unraisablehook = previous_hook
    asyncio_log.disabled = False
  except Exception:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore', RuntimeWarning)  # coroutines that were never awaited
      gc.collect()
    raise
  finally:
    absl_logging.set_verbosity(verbosity)
