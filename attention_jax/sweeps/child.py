"""Runs a command; on Linux, on chosen cores and until its parent ends: python child.py PARENT CORES COMMAND...

A process can request the signal at the end of its parent only for itself, so that the request must be made in the
child. This is a separate program, because `preexec_fn` of subprocess is not safe in a process that has threads, such as
those of jax.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
INTERRUPTED = 75  # EX_TEMPFAIL, as train.py exits after a signal


def main(parent: str, cores: str, *command: str) -> None:
  """Replaces this process by `command`, or exits with INTERRUPTED if the parent has ended already.

  Args:
    parent: id of the process that starts this one. On Linux, the command gets SIGTERM when that process ends.
    cores: the cores to run on, such as '0,1'; '' for all.
    *command: program and arguments.
  """
  with contextlib.suppress(OSError, AttributeError):  # other systems have no such call
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
  if os.getppid() != int(parent):  # the parent ended before the call
    sys.exit(INTERRUPTED)
  if cores and hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, [int(core) for core in cores.split(',')])
  os.execvp(command[0], command)


if __name__ == '__main__':
  main(*sys.argv[1:])
