"""The interface between encoders and decoders."""

from typing import Any, NamedTuple

import jax


class Encoded(NamedTuple):
  """An encoded source.

  Attributes:
    memory: vectors that queries are compared with, [B, S, D], zero where masked.
    mask: True at real positions, [B, S].
    final: summary of the source, [B, D'].
    value: vectors that contexts are made of, [B, S, D]; () if they are the memory.
  """

  memory: jax.Array
  mask: jax.Array
  final: jax.Array
  value: Any = ()

  @property
  def values(self) -> jax.Array:
    """`value`, or the memory if `value` is ()."""
    return self.memory if isinstance(self.value, tuple) else self.value
