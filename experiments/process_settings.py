"""Settings of a process. jax and the C library read some of them at start, so importing this file does not load jax."""

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Sequence

TUNABLES = 'GLIBC_TUNABLES'  # the environment variable from which the GNU C library reads its settings
LARGE_PAGES = 'glibc.malloc.hugetlb'
COMPILATION_EVENT = '/jax/core/compile/backend_compile_duration'  # the event of jax after each compilation
SLOW_COMPILATION = 0.1  # seconds; returning memory takes a few milliseconds
GC_THRESHOLDS = (100_000, 50, 100)
PROGRAM_PACKAGES = ('experiments.', 'lab.')
OPTIONS_WITH_VALUE = ('-W', '-X', '--check-hash-based-pycs')  # of the interpreter


def prepare_process() -> None:
  """Hides alarms of the compiler, relaxes the garbage collector, and restarts with `glibc.malloc.hugetlb=1`.

  With this setting, large arrays are allocated in large pages. An update allocates and frees arrays of many MB, which
  with pages of 4 KB takes up to a sixth of its time on CPUs. The C library reads the setting only when a process
  starts, hence the restart.

  Does not restart if the environment sets glibc.malloc.hugetlb already, if the command is not that of a program (as in
  tests, see `_is_program`), and on systems other than Linux.
  """
  # jax logs alarms about slow compilation as errors, which no user can act on.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # Tracing creates many objects that live on. With the default thresholds, a tenth of its time goes to collections.
  gc.set_threshold(*GC_THRESHOLDS)
  # Otherwise the interpreter searches all objects of the traced programs for cycles at its end, for half a second.
  atexit.register(gc.freeze)
  settings = os.environ.get(TUNABLES, '')
  if sys.platform != 'linux' or LARGE_PAGES in settings or not _is_program(sys.orig_argv):
    return
  large_pages = f'{LARGE_PAGES}=1'
  os.environ[TUNABLES] = f'{settings}:{large_pages}' if settings else large_pages
  os.execv(sys.executable, sys.orig_argv)


def trim_memory_after_compilation() -> None:
  """Makes the GNU C library return freed memory to the system after each slow compilation.

  Otherwise fragmentation keeps 100 to 300 MB in free blocks that are too small for an array of a batch.
  """
  import jax

  try:
    malloc_trim = ctypes.CDLL(None).malloc_trim
  except (AttributeError, OSError):  # another C library
    return

  def trim(event: str, seconds: float, **_) -> None:
    if event == COMPILATION_EVENT and seconds > SLOW_COMPILATION:
      malloc_trim(0)

  jax.monitoring.register_event_duration_secs_listener(trim)


def program_of(command: Sequence[str]) -> list[str]:
  """Returns what a command line runs, without the options of the interpreter and without arguments.

  Args:
    command: the command line of an interpreter, such as sys.orig_argv.

  Returns:
    ['-m', MODULE], [SCRIPT], or [] if there is none.
  """
  arguments = iter(command[1:])
  for argument in arguments:
    if argument == '-m':
      return [argument, next(arguments, '')]
    if argument in OPTIONS_WITH_VALUE:
      next(arguments, '')
    elif not argument.startswith('-'):
      return [argument]
  return []


def _is_program(command: Sequence[str]) -> bool:
  """Returns whether a command line is `python -m experiments.NAME ...` (or lab.NAME) or `attention-jax NAME ...`."""
  *module_flag, name = program_of(command) or ['']
  return name.startswith(PROGRAM_PACKAGES) if module_flag else os.path.basename(name) == 'attention-jax'
