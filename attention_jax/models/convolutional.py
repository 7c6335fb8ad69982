"""Encoder and decoder of convolutions, with attention in every layer of the decoder. Gehring et al. 2017.

Their layers are all of one width here; those of the paper's largest models grow towards the top. Where ours differ from
the paper besides: dropout is on embeddings before positions are added, embeddings start as they do in every model here
and not with a standard deviation of 0.1, and the output layer is not normalised. The equations are those of the text;
the paper's own program also multiplies both sums of attention, that of the query and that of the values, and the sum of
a layer's output and its context by √0.5, and divides the gradient of the encoder by twice the number of attentions.
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
  """What both sides share.

  Attributes:
    features, layers: D, and how many blocks.
    width: how many positions a convolution reads.
    max_positions: how many positions have a vector of their own.
    dropout: on embeddings, on what goes into every block, and on what the decoder gives.
  """

  features: Size = 512
  layers: Size = 4
  width: Size = 3
  max_positions: Size = 512
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def prepare(self) -> None:
    """Makes what both have in `setup`."""
    self.positions = LearnedPositions(max_positions=self.max_positions)
    self.widen = Normed(self.features, 1 - self.dropout, self.dtype)

  def embed_inputs(self, embeddings: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Embeddings [B, T, E] at positions [T] -> embeddings that know of positions, and x [B, T, D]. Section 3.1."""
    embedded = self.positions.embed(embeddings.astype(self.dtype), at)
    return embedded, self.widen(embedded)

  @nn.compact
  def finalize(self, x: jax.Array, size: int) -> jax.Array:
    """x [..., D] -> [..., E], as wide as embeddings are."""
    return Normed(size, dtype=self.dtype, name='narrow')(x)


class EncoderBlock(nn.Module):
  """x ← (v(W [x_{t-k/2} ... x_{t+k/2}] + b) + x) √0.5. Gehring et al. 2017, section 3.2."""

  features: int
  width: int
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
    """x [B, S, D], mask [B, S]."""
    # To the last real position padding has to look as what is beyond the ends does.
    given = zero_masked(Dropout(self.dropout)(x, deterministic=deterministic), mask)
    near = windows(given, self.width // 2, self.width // 2)
    return average_residual(GatedConvolution(self.features, self.dropout, self.dtype)(near), x)


class ConvEncoder(Convolutional, kw_only=True):
  """Gated convolutions; attention gives what was read and the embeddings, zₛ + eₛ. Gehring et al. 2017, section 3.2.

  The memory zₛ and the values zₛ + eₛ are as wide as the embeddings; `final` is the mean of the memory.
  Attributes as in Convolutional, and embedding: module from ids to vectors.
  """

  embedding: nn.Module

  def setup(self):
    if self.width % 2 == 0:
      raise UserError(f'conv: width={self.width} of the encoder has no position in its middle; possible: odd numbers')
    self.prepare()
    block = lambda: EncoderBlock(self.features, self.width, self.dropout, self.dtype)
    self.blocks = [block() for _ in range(self.layers)]

  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    """source [B, S] ids, mask [B, S] -> Encoded."""
    embedded, x = self.embed_inputs(self.embedding(source, deterministic), jnp.arange(source.shape[1]))
    for block in self.blocks:
      x = block(x, mask, deterministic)
    memory = zero_masked(self.finalize(x, embedded.shape[-1]), mask)
    return Encoded(memory, mask, masked_mean(memory, mask), memory + zero_masked(embedded, mask))


class ConvLayerCarry(NamedTuple):
  """What one step of a decoder layer hands to the next: its last inputs [B, width - 1, D], zeros before the first, and
  the carry of its attention, () where queries may come in any order."""

  inputs: jax.Array
  attention: Any


class ConvDecoderLayer(nn.Module):
  """h = v(W [x_{t-k+1} ... x_t] + b); h ← h + U √m c_t; x ← (h + x) √0.5. Gehring et al. 2017, sections 3.2 to 3.4.

  c_t = attend(d_t), d_t = V h_t + b + g_t (equation 1), with g_t the embedding of the token that goes in, m the number
  of real positions of the source. U is there for contexts of another width, as it is in the paper's own program; the
  paper's text adds c_t as it is.
  """

  attention: Attention
  features: int
  width: int
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.drop = Dropout(self.dropout)

  def remember(self, encoded: Encoded) -> Memory:
    """What is looked at in every step, prepared once."""
    return self.attention.remember(encoded.memory, encoded.mask, value=encoded.values)

  def start(self, memory: Memory) -> ConvLayerCarry:
    """The carry before the first step."""
    nothing = jnp.zeros((memory.key.shape[0], self.width - 1, self.features), self.dtype)
    return ConvLayerCarry(nothing, self.attention.init_carry(memory) if self.attention.is_recurrent else ())

  def __call__(self, x: jax.Array, embedded: jax.Array, memory: Memory, deterministic: bool):
    """All steps: x [B, T, D], embedded [B, T, E] -> x, weights over the memory [B, N, T, S]."""
    near = windows(self.drop(x, deterministic=deterministic), self.width - 1, 0)
    attend = lambda query: ((), *self.attention.parallel(query, memory, deterministic))
    return self._through(near, x, embedded, memory, attend)[1:]

  def step(self, carry: ConvLayerCarry, x: jax.Array, embedded: jax.Array, memory: Memory, deterministic: bool):
    """One step: x [B, D], embedded [B, E] -> the next carry, x, weights over the memory [B, N, S]."""
    inputs = jnp.concatenate([carry.inputs, self.drop(x, deterministic=deterministic)[:, None]], axis=1)
    attend = lambda query: attend_single_query(self.attention, carry.attention, query, memory, deterministic)
    after, x, weights = self._through(inputs.reshape(x.shape[0], -1), x, embedded, memory, attend)
    return ConvLayerCarry(inputs[:, 1:], after), x, weights

  @nn.compact
  def _through(self, near: jax.Array, x: jax.Array, embedded: jax.Array, memory: Memory, attend):
    """attend(query) -> the next carry of attention, context, weights; returns that carry, x, weights."""
    h = GatedConvolution(self.features, self.dropout, self.dtype, name='convolution')(near)
    query = Normed(embedded.shape[-1], dtype=self.dtype, name='query')(h) + embedded
    after, context, weights = attend(query)
    # A mean of m vectors that know nothing of each other varies 1 / m as much as each: times m √(1 / m), section 3.4.
    real = memory.mask.sum(-1).reshape((x.shape[0],) + (1,) * (context.ndim - 1))
    context = context * jnp.sqrt(real).astype(context.dtype)
    h = h + Normed(self.features, dtype=self.dtype, name='back')(context)
    return after, average_residual(h, x), with_head_axis(weights, self.attention.heads)


class ConvDecoder(LayeredDecoder, Convolutional, kw_only=True):
  """Gated convolutions over what came before, each followed by attention. Gehring et al. 2017, sections 3.2 and 3.3.

  The features for the output layer are as wide as the embeddings. Attributes as in LayeredDecoder and Convolutional; the paper
  has score='dot' and one head.
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
    self.positions.check(max_length)
    memory = self._remember(encoded)
    layers = tuple(block.start(own_memory) for block, own_memory in zip(self.blocks, memory, strict=True))
    return initial_carry(encoded.memory.shape[0], layers), memory

  def step(
    self, carry: LayeredCarry, embedding: jax.Array, memory: tuple[Memory, ...], deterministic: bool = True
  ) -> tuple[LayeredCarry, DecoderOutput]:
    embedded, x = (y[:, 0] for y in self.embed_inputs(embedding[:, None], carry.step[:1]))
    carries, seen = [], []
    for block, own, own_memory in zip(self.blocks, carry.layers, memory, strict=True):
      own, x, weights = block.step(own, x, embedded, own_memory, deterministic)
      carries.append(own)
      seen.append(weights)
    output = self._output(x, embedded, seen, 1, deterministic)
    return LayeredCarry(carry.step + 1, tuple(carries)), output

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> DecoderOutput:
    (embedded, x), seen = self.embed_inputs(embeddings, jnp.arange(embeddings.shape[1])), []
    for block, own_memory in zip(self.blocks, self._remember(encoded), strict=True):
      x, weights = block(x, embedded, own_memory, deterministic)
      seen.append(jnp.moveaxis(weights, 2, 1))
    return self._output(x, embedded, seen, 2, deterministic)

  def _remember(self, encoded: Encoded) -> tuple[Memory, ...]:
    # The encoder hears the mean of what all layers have to say to it, not the sum; what the values have besides the
    # memory, the embeddings of the source, hears all of it (section 3.4).
    memory = scale_gradient(encoded.memory, 1 / self.layers)
    encoded = encoded._replace(memory=memory, value=encoded.values + (memory - encoded.memory))
    return tuple(block.remember(encoded) for block in self.blocks)

  def _output(
    self, x: jax.Array, embedded: jax.Array, seen: list[jax.Array], axis: int, deterministic: bool
  ) -> DecoderOutput:
    features = self.drop(self.finalize(x, embedded.shape[-1]), deterministic=deterministic)
    return self.gather(features, seen, axis)
