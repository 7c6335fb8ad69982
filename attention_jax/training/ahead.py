"""Computes the first state, and compiles later updates and the evaluation, in a background thread."""

import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax


class CompileAhead(contextlib.AbstractContextManager):
  """Compiles the update of every batch shape in the order in which the shapes occur, each once, then the evaluation.

  The training thread calls `first_state()` if `make_state` is set, and `prepare(batch)` before each update:
  `prepare` compiles a shape that no thread has begun, and waits for one that is being compiled. The training thread
  evaluates by calling the function that `wrap_evaluation` returns. The programs, and with them all numbers, are the
  same as without this thread. On exit the thread stops after the program that it is compiling.

  The thread computes the first state while the training thread compiles the first shape. Later shapes wait until that
  shape has been lowered: tracing and lowering hold the lock of the interpreter, so that later shapes would delay the
  first update.

  With several processes there is no thread: compilers of GPUs exchange measurements between processes, which must
  therefore compile the same programs in the same order.

  Args:
    compile_for: (batch, when_lowered) -> None; compiles the update for the shapes of a batch, so that the update itself
      compiles nothing. It calls `when_lowered()` before the compiler starts.
    batches: one batch of each shape, in the order in which the shapes occur.
    compile_evaluation: (is_stopped) -> None; compiles the programs of an evaluation, and returns soon after
      `is_stopped()` becomes true. If None, each evaluation compiles the programs that it needs.
    make_state: returns the state before the first update; it compiles programs of its own. None for a resumed run.
  """

  def __init__(
    self,
    compile_for: Callable[[Any, Callable[[], None]], None],
    batches: Iterable[Any],
    compile_evaluation: Callable[[Callable[[], bool]], None] | None = None,
    make_state: Callable[[], Any] | None = None,
  ):
    self._compile_for = compile_for
    self._later = iter(batches)
    self._first = next(self._later, None)
    self._compile_evaluation = compile_evaluation
    self._make_state = make_state
    self._state = concurrent.futures.Future()
    self._evaluation_lock = threading.Lock()  # held by the thread that compiles or runs an evaluation
    self._evaluation_begun = threading.Event()  # set when the training thread first evaluates
    self._ready: dict[Hashable, threading.Event] = {}  # by shape; added when its compilation begins, set when it ends
    self._num_shapes = 0  # 0 until `batches` has been read
    self._lock = threading.Lock()
    self._closed = threading.Event()
    self._lowered = threading.Event()  # set when the first shape has been lowered, and on exit
    self._thread: threading.Thread | None = None

  def __enter__(self) -> 'CompileAhead':
    if jax.process_count() == 1:
      context = contextvars.copy_context()
      self._thread = threading.Thread(target=context.run, args=(self._compile_all,), name='compile ahead', daemon=True)
      self._thread.start()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._closed.set()
    self._lowered.set()
    if self._thread:
      self._thread.join()

  def first_state(self) -> Any:
    """Returns the state before the first update; if there is a thread, after compiling the first shape."""
    if not self._thread:
      self._compute_state()
    elif self._first is not None:
      self.prepare(self._first)
    return self._state.result()

  def prepare(self, batch: Any) -> None:
    """Returns when the update of a batch is compiled, or when the background thread has failed to compile it."""
    key = _shapes(batch)
    if ready := self._begin(key):
      self._compile_for(batch, self._lowered.set)
      ready.set()
    else:
      self._ready[key].wait()

  def wrap_evaluation(self, evaluate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `evaluate` for the training thread, preceded by a wait for the evaluation program that is being compiled.

    The background thread compiles no further evaluation programs: `evaluate` compiles those that it needs.
    """

    def evaluate_alone(state: Any) -> Any:
      self._evaluation_begun.set()
      with self._evaluation_lock:
        return evaluate(state)

    return evaluate_alone

  def describe(self) -> str:
    """Returns what is being compiled, such as 'compiling shape 3 of 7', or 'evaluating' before any update; else ''."""
    states = [ready.is_set() for ready in self._ready.copy().values()]
    if self._evaluation_lock.locked() and not self._evaluation_begun.is_set():
      return 'compiling the evaluation'
    if self._evaluation_lock.locked() and not states:  # of a resumed run, before its first update
      return 'evaluating'
    if all(states) and (not self._is_running() or len(states) >= self._num_shapes > 0):
      return ''
    total = max(self._num_shapes, len(states))
    return f'compiling shape {min(sum(states) + 1, total)} of {total}' if total else 'compiling'

  def _is_running(self) -> bool:
    return self._thread is not None and self._thread.is_alive()

  def _begin(self, key: Hashable) -> threading.Event | None:
    """Returns an event to be set when the shape is compiled, or None if its compilation has already begun."""
    with self._lock:
      if key in self._ready:
        return None
      self._ready[key] = threading.Event()
      return self._ready[key]

  def _compute_state(self) -> None:
    try:
      self._state.set_result(self._make_state())
    except BaseException as error:
      self._state.set_exception(error)

  def _compile_all(self) -> None:
    if self._make_state:
      self._compute_state()
    self._compile_updates()
    if not self._compile_evaluation:
      return
    with self._evaluation_lock, contextlib.suppress(Exception):  # the evaluation in the training thread raises it again
      if not self._is_stopped():
        self._compile_evaluation(self._is_stopped)

  def _is_stopped(self) -> bool:
    return self._closed.is_set() or self._evaluation_begun.is_set()

  def _compile_updates(self) -> None:
    batches = []
    try:
      for batch in self._later:
        if self._closed.is_set():
          return
        batches.append(batch)
    except Exception:  # the stream of batches raises the same error in the training thread
      return
    self._num_shapes = 1 + len(batches)
    self._lowered.wait()
    for batch in batches:
      if self._closed.is_set():
        return
      ready = self._begin(_shapes(batch))
      if ready is None:
        continue
      try:
        self._compile_for(batch, self._lowered.set)
      except Exception:  # the update of this shape raises the same error in the training thread
        return
      finally:
        ready.set()


def _shapes(batch: Any) -> Hashable:
  return tuple(x.shape for x in jax.tree.leaves(batch))
