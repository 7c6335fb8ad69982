"""Runs independent programs in several threads, because a small program does not occupy all cores of a CPU."""

import collections
import concurrent.futures
import contextvars
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax

MAX_THREADS = 8  # each program that runs needs memory for its arrays

Item = TypeVar('Item')
Result = TypeVar('Result')


def program_threads() -> int:
  """Returns the number of threads that may run programs at the same time.

  If a CPU is the only device, that is the number of cores that the process may use, up to MAX_THREADS. It is 1 for an
  accelerator, which runs one program after the other, and with several devices: programs that communicate between them
  could wait for each other.
  """
  if jax.device_count() > 1 or jax.default_backend() != 'cpu':
    return 1
  return min(len(usable_cores()), MAX_THREADS)


def usable_cores() -> list[int]:
  """Returns the numbers of the cores that this process may use."""
  return sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else [*range(os.cpu_count() or 1)]


def map_in_threads(fn: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
  """Yields fn(item) for each item, in order.

  Up to `threads` calls run at the same time. At most threads + 1 items have been read whose results have not yet been
  yielded. If the iterator is closed or a call raises, calls that have not begun are cancelled, and those that run are
  waited for.

  Args:
    fn: must return only when its result is computed: programs started by the same thread do not run at the same time
      on a CPU. It has the context variables of the caller, but context managers of jax, such as jax.default_device, do
      not apply to it. It must not call `map_in_threads` itself.
    items: read by the calling thread.
    threads: number of threads; with 1, the calling thread calls `fn`.

  Raises:
    Exception: whatever `fn` raises.
  """
  if threads == 1:
    yield from map(fn, items)
    return
  pool = _pool(threads)
  pending = collections.deque()
  try:
    for item in items:
      pending.append(pool.submit(contextvars.copy_context().run, fn, item))
      if len(pending) > threads:
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()
  finally:
    for call in pending:
      call.cancel()
    concurrent.futures.wait(pending)


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
  """The threads of all calls of `map_in_threads`: new ones would each ask the system for memory again."""
  return concurrent.futures.ThreadPoolExecutor(threads)
