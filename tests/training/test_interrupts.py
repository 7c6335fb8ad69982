"""Signals request an orderly stop, and the handlers before are restored."""

import os
import signal
import threading

import pytest

from attention_jax.training.interrupts import Interrupted, StopRequest, check_stop, stoppable


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number):
  before = signal.getsignal(number)
  with StopRequest() as request:
    assert request.reason == ''
    os.kill(os.getpid(), number)
    assert request.reason == number.name
  assert signal.getsignal(number) == before


def test_a_second_interrupt_ends_the_program_at_once():
  with StopRequest(), pytest.raises(KeyboardInterrupt):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_set_no_handlers():
  before = signal.getsignal(signal.SIGTERM)
  seen = []

  def enter():
    with StopRequest():
      seen.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert seen == [before]


def test_work_stops_between_its_parts_inside_of_stoppable_alone():
  check_stop()
  done = []
  with pytest.raises(Interrupted, match=r'^SIGTERM$'), stoppable(step=3):
    for part in range(3):
      check_stop()
      done.append(part)
      if part == 1:
        os.kill(os.getpid(), signal.SIGTERM)
  assert done == [0, 1]
  check_stop()
