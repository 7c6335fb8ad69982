"""Programs that eager calls share: jax compiles a function that is made in each call anew, and keeps every program."""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

from attention_jax.functional.table import Row, has_tracer

MAX_PROGRAMS = 64  # functions of jax.jit, each with one program for every combination of shapes and dtypes


def call_as_program(fn: Callable, static: tuple[Hashable, ...], *operands: Any) -> Any:
  """Returns fn(*static, *operands) by a program that is compiled once for equal static arguments, shapes and dtypes.

  While jax traces the caller, the operations of `fn` become part of the caller's program.

  Args:
    fn: a function of a module, not one that is made in a call.
    static: its first arguments: rows, names, flags. The functions of a row must be pure, as for jax.jit: a value from
      outside of them is read once. For methods and other callable objects, which may depend on a state, and functions
      that close over traced arrays, there is a program for each call, which jax releases after it.
    operands: its other arguments, trees of arrays.
  """
  make = _shared_program if all(_is_pure(row) for row in static if isinstance(row, Row)) else _make_program
  return make(fn, static)(*operands)


def _make_program(fn: Callable, static: tuple[Hashable, ...]) -> Callable:
  return jax.jit(functools.partial(fn, *static))


_shared_program = functools.lru_cache(MAX_PROGRAMS)(_make_program)


def forget_programs() -> None:
  """Releases all programs: what they depend on beside their arguments, such as a constant of a kernel, has changed."""
  _shared_program.cache_clear()


def _is_pure(row: Row) -> bool:
  """Whether every function of a row is a function of a module, or one that closes over constants."""
  return all(_is_function(fn) for fn in (row.fn, row.at_test, row.remember, row.init_state) if fn is not None)


def _is_function(fn: Callable) -> bool:
  if isinstance(fn, functools.partial):
    return _is_function(fn.func) and not has_tracer((fn.args, fn.keywords))
  if inspect.ismethod(fn) or not inspect.isfunction(inspect.unwrap(fn)):
    return False
  cells = getattr(inspect.unwrap(fn), '__closure__', None) or ()
  return not has_tracer([cell.cell_contents for cell in cells])
