"""The platform that kernels are compiled for: that of this machine, or another one for ahead-of-time compilation."""

import contextlib
from collections.abc import Iterator

import jax

from attention_jax.errors import choose

INTERPRET = 'interpret'  # runs Pallas kernels on a CPU, for tests
PLATFORMS = ('cpu', 'gpu', 'tpu', INTERPRET)
_override = jax.make_user_context()  # its value is part of the keys of jit's caches; None stands for this machine


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
