"""Base class of decoders with attention in every layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.models.steps import DecoderOutput
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention


class LayeredCarry(NamedTuple):
  """Carry of a decoder with several layers of attention.

  Attributes:
    step: number of steps so far, [B], equal for all rows of a batch.
    layers: carry of every layer.
  """

  step: jax.Array
  layers: tuple[Any, ...]


def initial_carry(batch: int, layers: tuple[Any, ...]) -> LayeredCarry:
  """Returns the carry before the first step."""
  return LayeredCarry(jnp.zeros((batch,), jnp.int32), layers)


class LayeredDecoder(nn.Module, kw_only=True):
  """A decoder in which every layer attends. A subclass has the field `layers`, the number of layers.

  Attributes:
    attention: attention of each layer over the memory.
    weights_layer: index of the layer whose weights, averaged over heads, are the weights of the model; negative indices
      count from the last layer. DecoderOutput.layers contains the weights of all layers and heads.
    layer_attentions: one attention per layer, in place of `attention`; () if all layers have `attention`.
  """

  attention: Attention
  weights_layer: int = -1
  layer_attentions: tuple[Attention, ...] = ()

  @property
  def traits(self) -> Traits:
    """Properties that do not depend on parameters."""
    return Traits(attends_in_recurrence=any(attention.is_recurrent for attention in self.attentions))

  @property
  def attentions(self) -> tuple[Attention, ...]:
    """Attention of each layer over the memory."""
    return self.layer_attentions or (self.attention,) * self.layers

  def with_attentions(self, attentions: Sequence[Attention]) -> 'LayeredDecoder':
    """Returns the same decoder with another attention over the memory in each layer."""
    return self.clone(layer_attentions=tuple(attentions))

  def share(self, memory: Any, hypotheses: int, max_length: int) -> Any:
    """Returns the memory unchanged: its layout does not depend on the number or the length of hypotheses.

    Arguments: see decoders.Decoder.share.
    """
    return memory

  def check_weights_layer(self, name: str) -> None:
    """Raises UserError, with `name` as its prefix, if there is no layer `weights_layer`."""
    if not -self.layers <= self.weights_layer < self.layers:
      raise UserError(
        f'{name}: weights_layer must be from {-self.layers} to {self.layers - 1}, got {self.weights_layer}'
      )

  def make_output(self, features: jax.Array, weights: list[jax.Array], axis: int) -> DecoderOutput:
    """Returns the output of the decoder, for one step or for all steps.

    Args:
      features: features for the output layer, [..., D].
      weights: weights of each layer, [..., N, S].
      axis: position of the axis of layers in DecoderOutput.layers.
    """
    model_weights = weights[self.weights_layer].mean(-2)
    return DecoderOutput(features, (), model_weights, layers=jnp.stack(weights, axis), top=features)
