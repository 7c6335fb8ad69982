"""Signals that request an orderly stop of a program."""

import contextlib
import signal
from typing import Any


class StopRequest:
  """Context manager that turns SIGTERM and the first Ctrl-C into a request to stop; a second Ctrl-C interrupts at once.

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
