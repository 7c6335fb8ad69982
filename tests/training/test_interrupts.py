"""Signals request an orderly stop, and the earlier handlers are restored afterwards."""

import itertools
import os
import signal
import threading

import jax
import orbax.checkpoint as ocp
import pytest

from attention_jax.training import interrupts
from attention_jax.training.interrupts import Interrupted, StopRequest, StopSignals


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop(number):
  before = signal.getsignal(number)
  with StopRequest() as request:
    assert request.reason == ''
    os.kill(os.getpid(), number)
    assert request.reason == number.name
    if number == signal.SIGINT:  # a second one ends the program at once
      with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
  assert signal.getsignal(number) == before


def test_other_threads_set_no_handlers():
  before = signal.getsignal(signal.SIGTERM)
  handlers = []

  def enter():
    with StopRequest():
      handlers.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert handlers == [before]


def test_check_raises_after_a_signal():
  with StopSignals() as signals:
    signals.check(1, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match=r'^SIGTERM$'):
      signals.check(2, 2)


def test_several_processes_stop_at_the_step_that_jax_selects(monkeypatch):
  previous_handler = signal.getsignal(signal.SIGTERM)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(interrupts, '_calls', itertools.count(1))
  monkeypatch.setattr(ocp.utils, 'reached_preemption', lambda call: call == 3)
  with StopSignals() as signals:
    assert signal.getsignal(signal.SIGTERM) == previous_handler
    assert [signals.reason() for _ in range(3)] == ['', '', 'SIGTERM']
