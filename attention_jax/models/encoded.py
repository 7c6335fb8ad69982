"""The interface between encoders and decoders."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax

from attention_jax.modules.adaptive import Ponder


@runtime_checkable
class EmbedsTokens(Protocol):
  """An encoder of token ids, which it embeds first."""

  embedding: nn.Module


@runtime_checkable
class DeclaresIncremental(Protocol):
  """An encoder that declares whether its source may be encoded in parts."""

  @property
  def incremental(self) -> bool:
    """Whether the source may be encoded in parts, from the first to the last."""


@runtime_checkable
class DeclaresPacking(Protocol):
  """An encoder that declares whether a row may hold several sources."""

  @property
  def packs(self) -> bool:
    """Whether a row may hold several sources, as segments that do not affect each other."""


class FinalStates(NamedTuple):
  """States of a recurrent encoder after its last step, from the lowest layer to the highest.

  Attributes:
    forward: states of the layers that read forward, each a tuple of arrays whose first one is the output.
    backward: states of the layers that read backward, whose last step is at the first token.
  """

  forward: tuple = ()
  backward: tuple = ()

  def describe_encoder(self) -> str:
    """Returns a description of the encoder by the directions in which it reads, for error messages."""
    directions = ' and '.join(name for name, states in zip(self._fields, self, strict=True) if states)
    return f'an encoder that reads {directions}' if directions else 'an encoder without recurrent layers'


class Encoded(NamedTuple):
  """An encoded source.

  Attributes:
    memory: vectors that queries are compared with, [B, S, D], zero where masked.
    mask: True at real positions, [B, S].
    final: summary of the source, [B, D'].
    value: vectors that contexts are weighted sums of, [B, S, D]; () if they are the memory.
    states: FinalStates of a recurrent encoder; () for other encoders.
    weights: for each layer with intra-attention, from the lowest to the highest, and for each of its directions, the
      weights of each position over those that the layer has read before it, [B, S, S].
    ponder: for each layer with adaptive computation time and each of its directions, in the same order, a Ponder of
      arrays [B, S].
    structure: the mask as a Mask, for attention over all positions at once; () if there is none.
  """

  memory: jax.Array
  mask: jax.Array
  final: jax.Array
  value: Any = ()
  states: Any = ()
  weights: tuple[jax.Array, ...] = ()
  ponder: tuple[Ponder, ...] = ()
  structure: Any = ()

  @property
  def attention_mask(self) -> Any:
    """The mask of the memory, with its structure if it is known."""
    return self.mask if isinstance(self.structure, tuple) else self.structure

  @property
  def values_or_memory(self) -> jax.Array:
    """`value`, or the memory if `value` is ()."""
    return self.memory if isinstance(self.value, tuple) else self.value
