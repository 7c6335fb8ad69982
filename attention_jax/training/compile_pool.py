"""Compiles the updates of later batch shapes in threads while training runs."""

import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

THREADS = 2


class CompilePool(contextlib.AbstractContextManager):
  """Compiles the update of each batch shape once, in the order in which the shapes occur.

  The programs are those that the updates would compile themselves. With several processes there are no threads: the
  compilers of GPUs exchange measurements between processes, which must compile the same programs in the same order.

  Args:
    compile_for: compiles the update for the shapes of a batch, so that an update of such a batch compiles nothing.
    batches: one batch of each shape, in the order in which the shapes occur.
  """

  def __init__(self, compile_for: Callable[[Any], Any], batches: Iterable[Any]):
    self._compile_for = compile_for
    self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, 'compile')
    self._programs: dict[Hashable, concurrent.futures.Future] = {}  # by shape
    self._lock = threading.Lock()
    self._is_closed = False
    self._is_threaded = jax.process_count() == 1
    if self._is_threaded:
      self._pool.submit(contextvars.copy_context().run, self._submit_all, batches)

  def __exit__(self, *exception: Any) -> None:
    self._is_closed = True
    self._pool.shutdown(cancel_futures=True)

  def wait(self, batch: Any) -> None:
    """Returns when the update of a batch is compiled; raises the error of the compiler."""
    if self._is_threaded:
      self._submit(batch).result()

  def describe(self) -> str:
    """Returns what is being compiled, such as 'compiling shape 3 of 7', or ''."""
    done = [program.done() for program in self._programs.copy().values()]
    return '' if all(done) else f'compiling shape {sum(done) + 1} of {len(done)}'

  def _submit(self, batch: Any) -> concurrent.futures.Future:
    shapes = tuple(x.shape for x in jax.tree.leaves(batch))
    with self._lock:
      if shapes not in self._programs:
        run = contextvars.copy_context().run
        self._programs[shapes] = self._pool.submit(run, self._compile_for, batch)
      return self._programs[shapes]

  def _submit_all(self, batches: Iterable[Any]) -> None:
    for batch in batches:  # an error of the data is raised again where the batch is needed
      if self._is_closed:
        return
      self._submit(batch)
