"""The target for which kernels are traced: this machine, another platform, or a count of matrix products."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax

from attention_jax.errors import choose
from attention_jax.functional import attend as definition

INTERPRET = 'interpret'  # runs Pallas kernels on a CPU, for tests
PLATFORMS = ('cpu', 'gpu', 'tpu', INTERPRET)
_override = jax.make_user_context()  # its value is part of the keys of jit's caches; None stands for this machine
_counts_products = jax.make_user_context(False)


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
def count_products() -> Iterator[None]:
  """Traces the definition in its block instead of the kernels that are `countable`."""
  with _counts_products(True):
    yield


def counts_products() -> bool:
  """Returns whether the code runs in a block of `count_products`."""
  return _counts_products.value


def countable(attend: Callable) -> Callable:
  """Wraps the `attend` of a kernel so that `count_products` traces the definition in its place.

  The traced program of such a kernel does not show how many products of matrices it computes.
  """

  @functools.wraps(attend)
  def attend_or_count(*args, **options):
    return (definition.attend if counts_products() else attend)(*args, **options)

  return attend_or_count
