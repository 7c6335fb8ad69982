"""Calls in several threads: order of the results, how many run at once, errors, and iterators that are closed."""

import contextvars
import threading

import jax
import pytest

from attention_jax.training import threads
from attention_jax.training.threads import map_in_threads, program_threads


@pytest.mark.parametrize('num_threads', [1, 2, 3])
def test_results_are_in_the_order_of_the_items(num_threads):
  released = threading.Event()

  def square(i):
    if i == 0 and num_threads > 1:
      assert released.wait(60)  # the first result comes last
    elif i == 1:
      released.set()
    return i * i

  assert list(map_in_threads(square, range(7), num_threads)) == [i * i for i in range(7)]


def test_as_many_calls_run_at_once_as_there_are_threads():
  barrier = threading.Barrier(2, timeout=60)
  names = set()

  def meet(i):
    barrier.wait()  # returns only if two calls wait here
    names.add(threading.current_thread().name)

  assert list(map_in_threads(meet, range(8), 2)) == [None] * 8
  assert len(names) == 2 and threading.current_thread().name not in names


def test_items_are_read_as_they_are_needed():
  read = []

  def items():
    for i in range(100):
      read.append(i)
      yield i

  results = map_in_threads(str, items(), 2)
  assert next(results) == '0' and read == [0, 1, 2]
  results.close()
  assert read == [0, 1, 2]


@pytest.mark.parametrize('num_threads', [1, 2])
def test_an_error_is_raised_at_the_place_of_its_item(num_threads):
  def divide(i):
    return 6 // i

  results = map_in_threads(divide, [3, 0, 2], num_threads)
  assert next(results) == 2
  with pytest.raises(ZeroDivisionError):
    next(results)
  assert list(map_in_threads(divide, [3, 2], num_threads)) == [2, 3]


def test_a_closed_iterator_waits_for_the_calls_that_run():
  both_run = threading.Event()
  meeting = threading.Barrier(2, action=both_run.set, timeout=60)
  closing = threading.Event()
  finished = []

  def compute(i):
    if i in (1, 2):
      meeting.wait()
      assert closing.wait(60)
    finished.append(i)

  results = map_in_threads(compute, range(10), 2)
  next(results)
  assert both_run.wait(60)  # a call that has not begun would be cancelled
  threading.Timer(0.1, closing.set).start()
  results.close()
  assert closing.is_set() and set(finished) == {0, 1, 2}


def test_calls_have_the_context_of_the_caller():
  variable = contextvars.ContextVar('variable', default='')
  variable.set('caller')
  assert list(map_in_threads(lambda i: variable.get(), range(3), 2)) == ['caller'] * 3


@pytest.mark.parametrize(
  ('devices', 'platform', 'cores', 'expected'),
  [(1, 'cpu', 2, 2), (1, 'cpu', 96, threads.MAX_THREADS), (8, 'cpu', 96, 1), (1, 'gpu', 96, 1)],
)
def test_only_a_single_cpu_device_runs_several_programs_at_once(devices, platform, cores, expected, monkeypatch):
  monkeypatch.setattr(jax, 'device_count', lambda: devices)
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  monkeypatch.setattr(threads.os, 'sched_getaffinity', lambda process: range(cores), raising=False)
  assert program_threads() == expected
