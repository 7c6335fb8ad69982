"""The platform that kernels are compiled for: that of this machine, or another one for ahead-of-time compilation."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from attention_jax.errors import choose

INTERPRET = 'interpret'  # runs Pallas kernels on a CPU, for tests
PLATFORMS = ('cpu', 'gpu', 'tpu', INTERPRET)
_override: contextvars.ContextVar[str | None] = contextvars.ContextVar('target', default=None)


@contextlib.contextmanager
def compile_for(platform: str) -> Iterator[None]:
  """Traces the kernels in its block for one of PLATFORMS, whatever the machine.

  Raises:
    UserError: for an unknown platform.
  """
  token = _override.set(choose(platform, PLATFORMS, 'platform'))
  try:
    yield
  finally:
    _override.reset(token)


def kernel_platform() -> str:
  """Returns the platform that kernels are compiled for: that of `compile_for`, else that of this machine."""
  return _override.get() or jax.default_backend()
