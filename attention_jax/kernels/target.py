"""How kernels are traced: for this machine or for another platform, and whether their matrix products are countable."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax

from attention_jax.errors import choose
from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Problem
from attention_jax.functional.lifting import Axes

INTERPRET = 'interpret'  # runs Pallas kernels on a CPU, for tests
PLATFORMS = ('cpu', 'gpu', 'tpu', INTERPRET)
_override = jax.make_user_context()  # its value is part of the keys of jit's caches; None stands for this machine
_is_for_counting = jax.make_user_context(False)


@contextlib.contextmanager
def compile_for(platform: str) -> Iterator[None]:
  """Traces the kernels in its block for one of PLATFORMS, whatever the machine.

  Raises:
    UserError: for an unknown platform.
  """
  with _override(choose(platform, PLATFORMS, 'platform')):
    yield


def kernel_platform() -> str:
  """Returns the platform that kernels are compiled for: that of `compile_for`, else that of this machine."""
  return _override.value or jax.default_backend()


@contextlib.contextmanager
def trace_for_counting() -> Iterator[None]:
  """Traces the programs of its block so that their matrix products can be counted, see `replaced_for_counting`."""
  with _is_for_counting(True):
    yield


def is_traced_for_counting() -> bool:
  """Returns whether the code runs in a block of `trace_for_counting`."""
  return _is_for_counting.value


def replaced_for_counting(attend_batch: Callable[[Problem, Axes], Attended]) -> Callable[[Problem, Axes], Attended]:
  """Wraps the `attend_batch` of a kernel so that `trace_for_counting` traces the definition in its place.

  For kernels whose own traced program does not show how many matrix products they compute.
  """

  @functools.wraps(attend_batch)
  def attend_kernel_or_definition(problem: Problem, axes: Axes) -> Attended:
    return (definition.attend_batch if is_traced_for_counting() else attend_batch)(problem, axes)

  return attend_kernel_or_definition
