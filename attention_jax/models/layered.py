"""What decoders that attend in every layer share, whatever their layers are made of."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.models.cells import DecoderOutput
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention


class LayeredCarry(NamedTuple):
  """How many steps have been made [B], the same for all of a batch, and the carry of every layer."""

  step: jax.Array
  layers: tuple[Any, ...]


def initial_carry(batch: int, layers: tuple[Any, ...]) -> LayeredCarry:
  """Before the first step."""
  return LayeredCarry(jnp.zeros((batch,), jnp.int32), layers)


class LayeredDecoder(nn.Module, kw_only=True):
  """A decoder of `layers` layers, each of which attends.

  Attributes:
    attention: how each layer looks at the memory.
    weights_of: the layer whose weights over the memory, averaged over heads, are the weights of the model; counted from
      0, from the last one by negative numbers. DecoderOutput.layers has those of all layers and heads.
  """

  attention: Attention
  weights_of: int = -1

  @property
  def traits(self) -> Traits:
    """Properties that do not depend on parameters."""
    return Traits(attends_in_recurrence=self.attention.is_recurrent)

  def check_layers(self, who: str) -> None:
    """Raises: UserError, in the name of `who`, where there is no layer weights_of."""
    if not -self.layers <= self.weights_of < self.layers:
      raise UserError(f'{who}: weights_of={self.weights_of}; possible: {-self.layers} to {self.layers - 1}')

  def gather(self, features: jax.Array, seen: list[jax.Array], axis: int) -> DecoderOutput:
    """seen: of each layer, the weights [..., N, S]; the layers get this axis."""
    return DecoderOutput(features, (), seen[self.weights_of].mean(-2), layers=jnp.stack(seen, axis), top=features)
