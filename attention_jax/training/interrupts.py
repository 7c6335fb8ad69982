"""Signals that request an orderly stop of a program."""

import contextlib
import itertools
import signal
from typing import Any

import jax
import orbax.checkpoint as ocp


class StopRequest:
  """Context manager that turns SIGTERM or Ctrl-C into a request to stop; a Ctrl-C after that interrupts at once.

  Outside the main thread, which alone can set handlers, signals keep their meaning.

  Attributes:
    reason: the name of the signal, or ''.
  """

  def __init__(self):
    self.reason = ''
    self._previous_handlers: dict[signal.Signals, Any] = {}

  def __enter__(self):
    with contextlib.suppress(ValueError):  # handlers can be set in the main thread only
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous_handlers[number] = signal.signal(number, self._request)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous_handlers.items():
      signal.signal(number, handler)
    self._previous_handlers.clear()

  def _request(self, number, frame):
    self.reason = signal.Signals(number).name
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupted(Exception):
  """Ends work that a signal has stopped; its text is the name of the signal."""


# Numbers of the calls of `StopSignals.reason` in this program. Jax selects the number after the last one that a process
# has passed, 0 at the start, and compares it for equality: the steps of a resumed run would begin after that number.
_calls = itertools.count(1)


class StopSignals:
  """Context manager that handles the signals of one process or of several that work together.

  With several processes, jax itself handles SIGTERM: a signal to one process is a request to all, and Ctrl-C keeps its
  default meaning.
  """

  def __init__(self):
    self._request = StopRequest()
    self._stack = contextlib.ExitStack()
    self._is_multi_process = jax.process_count() > 1

  def reason(self) -> str:
    """Returns the name of the signal that requests a stop, or ''; the same in every process.

    All processes make the same calls, and return the signal at the same call: the first one after the signal, even one
    that has arrived while they were starting, that none of them has passed yet.
    """
    if self._is_multi_process:
      return 'SIGTERM' if ocp.utils.reached_preemption(next(_calls)) else ''
    return self._request.reason

  def check(self, *_: int) -> None:
    """Raises Interrupted after a signal; a watch of batches, see watch.Watch."""
    if reason := self.reason():
      raise Interrupted(reason)

  def last_reason(self) -> str:
    """Returns the name of the signal that has arrived, or '', after the last call of `reason`.

    Of several processes always '': their signal remains for the next context.
    """
    return self._request.reason

  def __enter__(self):
    if not self._is_multi_process:
      self._stack.enter_context(self._request)
    return self

  def __exit__(self, *_):
    self._stack.close()
