"""Encoder and decoder of convolutions, with attention in every layer of the decoder. Gehring et al. 2017.

Differences from the paper: all layers have the same width, while those of the paper's largest models grow towards the
top; dropout is applied to embeddings before positions are added; embeddings are initialised as in every model of this
package, not with standard deviation 0.1; the output layer is not weight-normalised.

The equations are those of the text. The published code of the paper also multiplies three sums by √0.5: that of the
query and the embedding, that of the values, and that of a layer's output and its context. It divides the gradient of
the encoder by twice the number of attentions.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Memory
from attention_jax.functional.masking import masked_mean, zero_masked
from attention_jax.models.cells import DecoderOutput
from attention_jax.models.encoded import Encoded
from attention_jax.models.layered import LayeredCarry, LayeredDecoder, initial_carry
from attention_jax.modules.attention import Attention
from attention_jax.modules.convolution import GatedConvolution, Normed, average_residual, scale_gradient, windows
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.positions import LearnedPositions
from attention_jax.modules.transformer import attend_single_query, with_head_axis
from attention_jax.modules.transformer_stack import require_backprop
from attention_jax.specs import Fraction, Size


class Convolutional(nn.Module):
  """Base class of the encoder and the decoder.

  Attributes:
    features: D.
    layers: number of blocks.
    width: number of positions in the window of a convolution.
    max_positions: number of learned position vectors.
    dropout: dropout rate of embeddings, of the inputs of every block, and of the features that the decoder returns.
  """

  features: Size = 512
  layers: Size = 4
  width: Size = 3
  max_positions: Size = 512
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def prepare(self) -> None:
    """Creates the modules that both share; called by `setup`."""
    self.positions = LearnedPositions(max_positions=self.max_positions)
    self.widen = Normed(self.features, 1 - self.dropout, self.dtype)

  def embed_inputs(self, embeddings: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns embeddings [B, T, E] with positions at [T] added, and x [B, T, D] for the first block. Section 3.1."""
    embedded = self.positions.embed(embeddings.astype(self.dtype), at)
    return embedded, self.widen(embedded)

  @nn.compact
  def finalize(self, x: jax.Array, size: int) -> jax.Array:
    """Projects x [..., D] to the width of embeddings, [..., E]."""
    return Normed(size, dtype=self.dtype, name='narrow')(x)


class EncoderBlock(nn.Module):
  """x ← (v(W [x_{t-k/2} ... x_{t+k/2}] + b) + x) √0.5. Gehring et al. 2017, section 3.2."""

  features: int
  width: int
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
    """Computes the block; x [B, S, D], mask [B, S]."""
    # Padding is zero, as positions beyond the ends are, so that the result does not depend on the amount of padding.
    inputs = zero_masked(Dropout(self.dropout)(x, deterministic=deterministic), mask)
    near = windows(inputs, self.width // 2, self.width // 2)
    return average_residual(GatedConvolution(self.features, self.dropout, self.dtype)(near), x)


class ConvEncoder(Convolutional, kw_only=True):
  """Gated convolutions; contexts are sums of zₛ + eₛ, memory and embeddings. Gehring et al. 2017, section 3.2.

  The memory zₛ and the values zₛ + eₛ are as wide as the embeddings; `final` is the mean of the memory.

  Attributes beside those of Convolutional:
    embedding: module from ids to vectors.
  """

  embedding: nn.Module

  def setup(self):
    if self.width % 2 == 0:
      raise UserError(f'conv: width of the encoder must be odd, got {self.width}')
    self.prepare()
    self.blocks = [EncoderBlock(self.features, self.width, self.dropout, self.dtype) for _ in range(self.layers)]

  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    """Encodes source ids [B, S] with mask [B, S]."""
    embedded, x = self.embed_inputs(self.embedding(source, deterministic), jnp.arange(source.shape[1]))
    for block in self.blocks:
      x = block(x, mask, deterministic)
    memory = zero_masked(self.finalize(x, embedded.shape[-1]), mask)
    return Encoded(memory, mask, masked_mean(memory, mask), memory + zero_masked(embedded, mask))


class ConvLayerCarry(NamedTuple):
  """Carry of a decoder layer from one step to the next.

  Attributes:
    inputs: previous inputs of the convolution, [B, width - 1, D]; zeros before the first step.
    attention: carry of the attention; () if it is not recurrent.
  """

  inputs: jax.Array
  attention: Any


class ConvDecoderLayer(nn.Module):
  """h = v(W [x_{t-k+1} ... x_t] + b); h ← h + U √m c_t; x ← (h + x) √0.5. Gehring et al. 2017, sections 3.2 to 3.4.

  c_t = attend(d_t), d_t = V h_t + b + g_t (equation 1), with g_t the embedding of the input token and m the number of
  unmasked positions of the source. U projects contexts of another width, as in the published code of the paper; its
  text adds c_t itself.
  """

  attention: Attention
  features: int
  width: int
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.drop = Dropout(self.dropout)

  def remember(self, encoded: Encoded) -> Memory:
    """Prepares the memory that all steps attend to."""
    return self.attention.remember(encoded.memory, encoded.mask, value=encoded.values)

  def start(self, memory: Memory) -> ConvLayerCarry:
    """Returns the carry before the first step."""
    no_inputs = jnp.zeros((memory.key.shape[0], self.width - 1, self.features), self.dtype)
    return ConvLayerCarry(no_inputs, self.attention.init_carry(memory) if self.attention.is_recurrent else ())

  def __call__(self, x: jax.Array, embedded: jax.Array, memory: Memory, deterministic: bool):
    """Computes all steps.

    Args:
      x: inputs, [B, T, D].
      embedded: embeddings of the input tokens, [B, T, E].
      memory: memory, as `remember` returns it.
      deterministic: whether to use test-time behaviour.

    Returns:
      x [B, T, D], and weights over the memory [B, N, T, S].
    """

    def attend(query):
      attended = self.attention.parallel(query, memory, deterministic)
      return (), attended.context, attended.weights

    near = windows(self.drop(x, deterministic=deterministic), self.width - 1, 0)
    _, x, weights = self._convolve_and_attend(near, x, embedded, memory, attend)
    return x, weights

  def step(self, carry: ConvLayerCarry, x: jax.Array, embedded: jax.Array, memory: Memory, deterministic: bool):
    """Computes one step.

    Args:
      carry: carry of the previous step.
      x: inputs, [B, D].
      embedded: embeddings of the input tokens, [B, E].
      memory: memory, as `remember` returns it.
      deterministic: whether to use test-time behaviour.

    Returns:
      The next carry, x [B, D], and weights over the memory [B, N, S].
    """

    def attend(query):
      return attend_single_query(self.attention, carry.attention, query, memory, deterministic)

    inputs = jnp.concatenate([carry.inputs, self.drop(x, deterministic=deterministic)[:, None]], axis=1)
    near = inputs.reshape(x.shape[0], -1)
    attention_carry, x, weights = self._convolve_and_attend(near, x, embedded, memory, attend)
    return ConvLayerCarry(inputs[:, 1:], attention_carry), x, weights

  @nn.compact
  def _convolve_and_attend(self, near: jax.Array, x: jax.Array, embedded: jax.Array, memory: Memory, attend):
    """Computes the layer from the windows of its inputs.

    attend(query) -> attention carry, context, weights. Returns the attention carry, x and the weights.
    """
    h = GatedConvolution(self.features, self.dropout, self.dtype, name='convolution')(near)
    query = Normed(embedded.shape[-1], dtype=self.dtype, name='query')(h) + embedded
    attention_carry, context, weights = attend(query)
    # The mean of m independent vectors has 1 / m of their variance; m √(1 / m) restores it (section 3.4).
    num_positions = memory.mask.sum(-1).reshape((x.shape[0],) + (1,) * (context.ndim - 1))
    context = context * jnp.sqrt(num_positions).astype(context.dtype)
    h = h + Normed(self.features, dtype=self.dtype, name='back')(context)
    return attention_carry, average_residual(h, x), with_head_axis(weights, self.attention.heads)


class ConvDecoder(LayeredDecoder, Convolutional, kw_only=True):
  """Causal gated convolutions, each followed by attention. Gehring et al. 2017, sections 3.2 and 3.3.

  The features for the output layer are as wide as the embeddings. Attributes as in LayeredDecoder and Convolutional;
  the paper has score='dot' and one head.
  """

  def setup(self):
    self.prepare()
    self.check_layers('conv')
    attention = require_backprop(self.attention, 'conv')
    self.blocks = [
      ConvDecoderLayer(attention.clone(), self.features, self.width, self.dropout, self.dtype)
      for _ in range(self.layers)
    ]
    self.drop = Dropout(self.dropout)

  def start(self, encoded: Encoded, max_length: int) -> tuple[LayeredCarry, tuple[Memory, ...]]:
    """Returns the carry before the first step, and the memory of every layer."""
    self.positions.check(max_length)
    memories = self._remember(encoded)
    carries = [block.start(memory) for block, memory in zip(self.blocks, memories, strict=True)]
    return initial_carry(encoded.memory.shape[0], tuple(carries)), memories

  def step(
    self, carry: LayeredCarry, embedding: jax.Array, memory: tuple[Memory, ...], deterministic: bool = True
  ) -> tuple[LayeredCarry, DecoderOutput]:
    """Computes one step."""
    embedded, x = (y[:, 0] for y in self.embed_inputs(embedding[:, None], carry.step[:1]))
    carries = []
    weights = []
    for block, layer_carry, layer_memory in zip(self.blocks, carry.layers, memory, strict=True):
      layer_carry, x, layer_weights = block.step(layer_carry, x, embedded, layer_memory, deterministic)
      carries.append(layer_carry)
      weights.append(layer_weights)
    output = self._output(x, embedded, weights, 1, deterministic)
    return LayeredCarry(carry.step + 1, tuple(carries)), output

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> DecoderOutput:
    embedded, x = self.embed_inputs(embeddings, jnp.arange(embeddings.shape[1]))
    weights = []
    for block, memory in zip(self.blocks, self._remember(encoded), strict=True):
      x, layer_weights = block(x, embedded, memory, deterministic)
      weights.append(jnp.moveaxis(layer_weights, 2, 1))
    return self._output(x, embedded, weights, 2, deterministic)

  def _remember(self, encoded: Encoded) -> tuple[Memory, ...]:
    # The gradient of the encoder is the mean over the layers, not the sum. The gradient of the source embeddings, which
    # are part of the values alone, is not scaled (section 3.4).
    memory = scale_gradient(encoded.memory, 1 / self.layers)
    encoded = encoded._replace(memory=memory, value=encoded.values + (memory - encoded.memory))
    return tuple(block.remember(encoded) for block in self.blocks)

  def _output(
    self, x: jax.Array, embedded: jax.Array, weights: list[jax.Array], axis: int, deterministic: bool
  ) -> DecoderOutput:
    features = self.drop(self.finalize(x, embedded.shape[-1]), deterministic=deterministic)
    return self.gather(features, weights, axis)
