"""What encoders hand to decoders."""

from typing import Any, NamedTuple

import jax


class Encoded(NamedTuple):
  """An encoded source: memory [B, S, D] (zero where masked), mask [B, S], and a summary `final` [B, D'].

  `value` [B, S, D] is what attention gives of each position, where that is more than the memory; () is the memory.
  """

  memory: jax.Array
  mask: jax.Array
  final: jax.Array
  value: Any = ()

  @property
  def values(self) -> jax.Array:
    """What attention gives of each position [B, S, D]."""
    return self.memory if isinstance(self.value, tuple) else self.value
