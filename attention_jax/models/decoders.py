"""Decoders: all steps in one call for training, one step at a time for search.

Every decoder has the same methods:

- start(encoded, max_length) -> carry, memory: prepares a source for at most `max_length` steps;
- share(memory, hypotheses, max_length) -> memory: the memory for several hypotheses of each source;
- step(carry, embedding [B, E], memory, deterministic) -> carry, DecoderOutput with leaves [B, ...];
- a call: (encoded, embeddings [B, T, E], deterministic) -> DecoderOutput with leaves [B, T, ...]. If `traits.packs`, a
  further argument, segments [B, T], is the number of the pair that each token belongs to.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Memory
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import share_over_steps
from attention_jax.models.cells import CELLS, Cell
from attention_jax.models.convolutional import ConvDecoder
from attention_jax.models.encoded import Encoded
from attention_jax.models.fixed_vector import Cho
from attention_jax.models.layered import LayeredCarry, LayeredDecoder, initial_carry
from attention_jax.models.steps import DecoderOutput
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.positions import segment_positions
from attention_jax.modules.transformer import DecoderLayer
from attention_jax.modules.transformer_stack import Stack, require_backprop
from attention_jax.specs import Fraction


def over_steps(step, module: nn.Module):
  """Lifts step(module, carry, inputs [B, ...]) -> (carry, outputs) to a scan over the axis T of inputs [B, T, ...]."""
  # Storing arrays [B, S, F] of every step for the backward pass costs more than recomputing them. Products with kernels
  # are stored: they are most of the computation, and their results are small.
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return nn.scan(
    nn.remat(step, prevent_cse=False, policy=policy),
    variable_broadcast='params',
    split_rngs={'params': False, 'dropout': True, 'attention': True},
    in_axes=1,
    out_axes=1,
    # True traces the step twice, which creating parameters requires.
    check_constancy_invariants=module.is_initializing(),
  )


class Decoder(nn.Module):
  """A scan over a cell.

  Attributes:
    cell: a Cell of DECODERS.
    dropout: dropout rate of the features for the output layer.
  """

  cell: Cell
  dropout: Fraction = 0.0

  def setup(self):
    self.drop = Dropout(self.dropout)

  @property
  def attention(self) -> Attention:
    """Attention over the memory."""
    return self.cell.attention

  @property
  def traits(self) -> Traits:
    """Properties of the cell."""
    return self.cell.traits

  @property
  def attentions(self) -> tuple[Attention, ...]:
    """The attention over the memory, as a tuple of length 1."""
    return (self.attention,)

  def with_attentions(self, attentions: Sequence[Attention]) -> 'Decoder':
    """Returns the same decoder with another attention over the memory."""
    (attention,) = attentions
    return self.clone(cell=self.cell.clone(attention=attention))

  def start(self, encoded: Encoded, max_length: int) -> tuple[Any, Any]:
    """Returns the carry before the first step, and the memory."""
    memory = self.cell.remember(encoded)
    return self.cell.start(encoded, memory), memory

  def share(self, memory: Any, hypotheses: int, max_length: int) -> Any:
    """Returns the memory for `hypotheses` hypotheses of each source, of up to `max_length` tokens.

    Args:
      memory: the memory, as `start` returns it.
      hypotheses: number of hypotheses of each source, for which every step is computed.
      max_length: maximum number of tokens of a hypothesis.
    """
    return self.cell.share(memory, hypotheses, max_length)

  def observe(self, carry: Any, log_likelihood: jax.Array) -> Any:
    """Updates the carry of a latent alignment with log p(output | position), [B, S]."""
    return self.cell.observe(carry, log_likelihood)

  def step(
    self, carry: Any, embedding: jax.Array, memory: Any, deterministic: bool = True
  ) -> tuple[Any, DecoderOutput]:
    """Computes one step.

    Args:
      carry: carry of the previous step; before the first step, as `start` returns it.
      embedding: embeddings of the input tokens, [B, E].
      memory: the memory, as `start` or `share` returns it.
      deterministic: whether to use test-time behaviour.

    Returns:
      The next carry, and DecoderOutput with leaves [B, ...].
    """
    embeddings = embedding[:, None]
    carry, trace = self.cell.recur(carry, self.cell.project_inputs(embeddings)[:, 0], memory, deterministic)
    output = self.cell.compute_outputs(jax.tree.map(lambda x: x[:, None], trace), embeddings, memory, deterministic)
    return carry, self._apply_dropout(jax.tree.map(lambda x: x[:, 0], output), deterministic)

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> DecoderOutput:
    carry, memory = self.start(encoded, embeddings.shape[1])
    get_memory = share_over_steps(memory)

    def recur(cell, carry, inputs):
      return cell.recur(carry, inputs, get_memory(), deterministic)

    _, traces = over_steps(recur, self)(self.cell, carry, self.cell.project_inputs(embeddings))
    return self._apply_dropout(self.cell.compute_outputs(traces, embeddings, memory, deterministic), deterministic)

  def _apply_dropout(self, output: DecoderOutput, deterministic: bool) -> DecoderOutput:
    return output._replace(features=self.drop(output.features, deterministic=deterministic))


class TransformerDecoder(LayeredDecoder, Stack, kw_only=True):
  """Layers of self-attention and attention over the memory. Vaswani et al. 2017, section 3.1.

  Attributes as in LayeredDecoder and Stack; the attention and the decoder have the same `features`.
  """

  sublayers = 3

  @property
  def traits(self) -> Traits:
    """Properties that do not depend on parameters."""
    packs = self.packs and all(attention.supports_segments for attention in self.attentions)
    return super().traits._replace(packs=packs)

  def setup(self):
    self.prepare(causal=True)
    if self.attention.features != self.features:
      raise UserError(
        'transformer: model.attention.features must be equal to the features of the decoder, '
        f'got {self.attention.features} and {self.features}'
      )
    self.check_weights_layer('transformer')
    options = {'project_values': True, 'output_scale': self.residual_scale}
    layer = self.layer_class(DecoderLayer, 5)
    self.blocks = [
      layer(self.self_attention(i), require_backprop(attention).clone(**options), self.feed_forward(), self.residual)
      for i, attention in enumerate(self.attentions)
    ]

  def start(self, encoded: Encoded, max_length: int) -> tuple[LayeredCarry, tuple[Memory, ...]]:
    """Returns the carry before the first step, and the memory of every layer.

    Raises:
      UserError: for learned positions, if `max_length` exceeds their number.
    """
    self.positions.check(max_length)
    memories = self._remember(encoded)
    carries = [
      block.start(memory, max_length, self.features) for block, memory in zip(self.blocks, memories, strict=True)
    ]
    return initial_carry(encoded.memory.shape[0], tuple(carries)), memories

  def step(
    self, carry: LayeredCarry, embedding: jax.Array, memory: tuple[Memory, ...], deterministic: bool = True
  ) -> tuple[LayeredCarry, DecoderOutput]:
    """Computes one step.

    Arguments: see Decoder.step.
    """
    position = carry.step[0]
    x = self.embed_inputs(embedding[:, None], position[None])[:, 0]
    mask = self.self_mask.at(position[None])
    carries = []
    weights = []
    for block, layer_carry, layer_memory in zip(self.blocks, carry.layers, memory, strict=True):
      layer_carry, x, layer_weights = block.step(layer_carry, x, layer_memory, mask, position, deterministic)
      carries.append(layer_carry)
      weights.append(layer_weights)
    return LayeredCarry(carry.step + 1, tuple(carries)), self.make_output(self.finalize(x), weights, 1)

  def __call__(
    self, encoded: Encoded, embeddings: jax.Array, deterministic: bool, segments: jax.Array | None = None
  ) -> DecoderOutput:
    """Computes all steps.

    Args:
      encoded: the encoded source; with segments, its `structure` has those of the source.
      embeddings: embeddings of the input tokens, [B, T, E].
      deterministic: whether to use test-time behaviour.
      segments: the segment of the source and of the target that each token attends to, [B, T]; None if a row is one.
    """
    positions = jnp.arange(embeddings.shape[1])
    self_mask = self.self_mask
    x_positions = positions
    if segments is not None:
      self_mask = self_mask & Mask.segments(segments)
      x_positions = segment_positions(segments)
      encoded = encoded._replace(structure=dataclasses.replace(encoded.structure, query_segments=segments))
    x = self.embed_inputs(embeddings, x_positions)
    weights = []
    for block, memory in zip(self.blocks, self._remember(encoded), strict=True):
      layer_output, layer_weights = block(x, memory, self_mask, positions, deterministic)
      x = self.apply_layer_drop(x, layer_output, deterministic)
      weights.append(jnp.moveaxis(layer_weights, 2, 1))
    return self.make_output(self.finalize(x), weights, 2)

  def _remember(self, encoded: Encoded) -> tuple[Memory, ...]:
    return tuple(
      block.remember(encoded.memory, encoded.attention_mask, encoded.values_or_memory) for block in self.blocks
    )


DECODERS: Mapping[str, type[nn.Module]] = {**CELLS, 'cho': Cho, 'conv': ConvDecoder, 'transformer': TransformerDecoder}


def decoder_of(module: nn.Module, dropout: float) -> nn.Module:
  """Returns the decoder of a module of DECODERS: a cell becomes a Decoder with this dropout rate."""
  return Decoder(module, dropout) if isinstance(module, Cell) else module
