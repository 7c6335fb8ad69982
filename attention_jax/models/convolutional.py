"""Convolutional encoder and decoder, with attention in every decoder layer. Gehring et al. 2017.

The equations are those of the paper's text. Differences from it:
- All layers have one width; in the paper's largest models the upper layers are wider.
- Dropout is applied to embeddings before positions are added.
- Embeddings have the initialiser of all models of this package, not a standard deviation of 0.1.
- The output layer is not weight-normalised.
- Contexts are projected to the width of the layer, as in the authors' code.

The authors' code differs from the text, and from this module, in two ways: it multiplies three more sums by √0.5 (query
and embedding; memory and embedding, which are the values; layer output and context), and it divides the gradient of the
encoder by twice the number of attention layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Memory
from attention_jax.functional.mask import Mask, positions_of
from attention_jax.functional.masking import masked_mean, zero_masked
from attention_jax.models.encoded import Encoded
from attention_jax.models.layered import LayeredCarry, LayeredDecoder, initial_carry
from attention_jax.models.steps import DecoderOutput
from attention_jax.modules.attention import Attention
from attention_jax.modules.convolution import GatedConvolution, Normed, scale_gradient, scaled_residual, windows
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.positions import LearnedPositions
from attention_jax.modules.transformer import attend_single_query, with_head_axis
from attention_jax.modules.transformer_stack import require_backprop
from attention_jax.specs import Fraction, Size


class Convolutional(nn.Module):
  """Base class of ConvEncoder and ConvDecoder.

  Attributes:
    features: width of the hidden states, D.
    layers: number of blocks.
    width: number of positions in the window of a convolution.
    max_positions: number of learned position embeddings, which is the maximum length of a sequence.
    dropout: rate on block inputs and decoder outputs. The initial scale of the first projection assumes that the
      embedding applies the same rate.
    dtype: dtype of the computation.
  """

  features: Size = 512
  layers: Size = 4
  width: Size = 3
  max_positions: Size = 512
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def prepare(self) -> None:
    """Creates the submodules that encoders and decoders both have; called in `setup`."""
    self.positions = LearnedPositions(max_positions=self.max_positions)
    self.widen = Normed(self.features, 1 - self.dropout, self.dtype)

  def embed_inputs(self, embeddings: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds positions to embeddings and projects them. Section 3.1.

    Args:
      embeddings: [B, T, E].
      positions: positions of the tokens, [T].

    Returns:
      The embeddings with positions added [B, T, E], and the input of the first block [B, T, D].
    """
    embedded = self.positions.embed(embeddings.astype(self.dtype), positions)
    return embedded, self.widen(embedded)

  @nn.compact
  def finalize(self, x: jax.Array, size: int) -> jax.Array:
    """Projects x [..., D] to [..., E], where E is `size`, the width of the embeddings."""
    return Normed(size, dtype=self.dtype, name='narrow')(x)


class EncoderBlock(nn.Module):
  """x ← (v(W [x_{t-k/2} ... x_{t+k/2}] + b) + x) √0.5. Gehring et al. 2017, section 3.2.

  v([A; B]) = A ⊗ σ(B) is the gated linear unit, and k the width of the window, an odd number: k/2 is rounded down.
  """

  features: int
  width: int
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
    """Maps x [B, S, D] with mask [B, S] to [B, S, D]."""
    # Padding must be zero, as are the positions beyond the ends, so that outputs do not depend on its length.
    inputs = zero_masked(Dropout(self.dropout)(x, deterministic=deterministic), mask)
    input_windows = windows(inputs, self.width // 2, self.width // 2)
    return scaled_residual(GatedConvolution(self.features, self.dropout, self.dtype)(input_windows), x)


class ConvEncoder(Convolutional, kw_only=True):
  """Encoder of gated convolutions. Gehring et al. 2017, section 3.2.

  The keys are the outputs zₛ, and the values of attention are zₛ + eₛ, with the embeddings and positions eₛ. Both have
  the width of the embeddings; `final` is the mean of the memory.

  Attributes as in Convolutional, and:
    embedding: module from ids to vectors.
  """

  embedding: nn.Module

  def setup(self):
    if self.width % 2 == 0:
      raise UserError(f'conv: width of the encoder must be odd, got {self.width}')
    self.prepare()
    self.blocks = [EncoderBlock(self.features, self.width, self.dropout, self.dtype) for _ in range(self.layers)]

  def __call__(self, source: jax.Array, mask: jax.Array | Mask, deterministic: bool) -> Encoded:
    """Encodes a source of ids [B, S] with a mask [B, S]."""
    mask = positions_of(mask, source.shape[1])
    embedded, x = self.embed_inputs(self.embedding(source, deterministic), jnp.arange(source.shape[1]))
    for block in self.blocks:
      x = block(x, mask, deterministic)
    memory = zero_masked(self.finalize(x, embedded.shape[-1]), mask)
    return Encoded(memory, mask, masked_mean(memory, mask), memory + zero_masked(embedded, mask))


class ConvLayerCarry(NamedTuple):
  """State of a decoder layer between steps.

  Attributes:
    inputs: its last inputs [B, width - 1, D], after dropout; zeros before the first step.
    attention: the carry of its attention; () if the attention is not recurrent.
  """

  inputs: jax.Array
  attention: Any


class ConvDecoderLayer(nn.Module):
  """h = v(W [x_{t-k+1} ... x_t] + b); h ← h + U √m c_t; x ← (h + x) √0.5. Gehring et al. 2017, sections 3.2 to 3.4.

  v is the gated linear unit, see EncoderBlock, and k the width of the window. c_t = attend(d_t), d_t = V h_t + b + g_t
  (equation 1), with g_t the embedding of the input token plus that of its position, and m the number of unmasked source
  positions. U projects contexts to the width of h, as in the authors' code; the paper's text adds c_t unprojected.
  """

  attention: Attention
  features: int
  width: int
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.drop = Dropout(self.dropout)

  def remember(self, encoded: Encoded) -> Memory:
    """Prepares the memory of a source, once for all steps."""
    return self.attention.remember(encoded.memory, encoded.mask, value=encoded.values_or_memory)

  def start(self, memory: Memory) -> ConvLayerCarry:
    """Returns the carry before the first step."""
    inputs = jnp.zeros((memory.key.shape[0], self.width - 1, self.features), self.dtype)
    attention_carry = self.attention.init_carry(memory) if self.attention.needs_carry else ()
    return ConvLayerCarry(inputs, attention_carry)

  def __call__(
    self, x: jax.Array, embedded: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[jax.Array, jax.Array]:
    """Computes all steps at once.

    Args:
      x: inputs [B, T, D].
      embedded: embeddings with positions [B, T, E].
      memory: memory, as `remember` returns it.
      deterministic: whether dropout is off.

    Returns:
      The next layer's x [B, T, D], and weights over the memory [B, N, T, S].
    """
    input_windows = windows(self.drop(x, deterministic=deterministic), self.width - 1, 0)

    def attend(query):
      context, weights = self.attention.parallel(query, memory, deterministic)
      return (), context, weights

    _, x, weights = self._apply_layer(input_windows, x, embedded, memory, attend)
    return x, weights

  def step(
    self, carry: ConvLayerCarry, x: jax.Array, embedded: jax.Array, memory: Memory, deterministic: bool
  ) -> tuple[ConvLayerCarry, jax.Array, jax.Array]:
    """Computes one step.

    Args:
      carry: carry of the previous step.
      x: inputs [B, D].
      embedded: embeddings with positions [B, E].
      memory: memory, as `remember` returns it.
      deterministic: whether dropout is off.

    Returns:
      The new carry, the next layer's x [B, D], and weights over the memory [B, N, S].
    """
    inputs = jnp.concatenate([carry.inputs, self.drop(x, deterministic=deterministic)[:, None]], axis=1)

    def attend(query):
      return attend_single_query(self.attention, carry.attention, query, memory, deterministic)

    input_window = inputs.reshape(x.shape[0], -1)
    attention_carry, x, weights = self._apply_layer(input_window, x, embedded, memory, attend)
    return ConvLayerCarry(inputs[:, 1:], attention_carry), x, weights

  @nn.compact
  def _apply_layer(
    self, input_windows: jax.Array, x: jax.Array, embedded: jax.Array, memory: Memory, attend: Callable
  ) -> tuple[Any, jax.Array, jax.Array]:
    """Applies convolution, attention and residual connection.

    Args:
      input_windows: the inputs in the window of each position, concatenated, [..., width D].
      x: [..., D].
      embedded: [..., E].
      memory: memory, as `remember` returns it.
      attend: maps a query to the new carry of the attention, context and weights.

    Returns:
      The new carry of the attention, x and weights.
    """
    h = GatedConvolution(self.features, self.dropout, self.dtype, name='convolution')(input_windows)
    query = Normed(embedded.shape[-1], dtype=self.dtype, name='query')(h) + embedded
    attention_carry, context, weights = attend(query)
    # The mean of m independent vectors has 1 / m of their variance; √m restores it (section 3.4: m √(1 / m)).
    num_unmasked = memory.mask.sum(-1).reshape((x.shape[0],) + (1,) * (context.ndim - 1))
    context = context * jnp.sqrt(num_unmasked).astype(context.dtype)
    h = h + Normed(self.features, dtype=self.dtype, name='back')(context)
    return attention_carry, scaled_residual(h, x), with_head_axis(weights, self.attention.heads)


class ConvDecoder(LayeredDecoder, Convolutional, kw_only=True):
  """Causal gated convolutions, each followed by attention. Gehring et al. 2017, sections 3.2 and 3.3.

  The features for the output layer have the width of the embeddings. Attributes as in LayeredDecoder and Convolutional;
  the paper has score='dot' and one head.
  """

  def setup(self):
    self.prepare()
    self.check_weights_layer('conv')
    self.blocks = [
      ConvDecoderLayer(require_backprop(attention, 'conv').copy(), self.features, self.width, self.dropout, self.dtype)
      for attention in self.attentions
    ]
    self.drop = Dropout(self.dropout)

  def start(self, encoded: Encoded, max_length: int) -> tuple[LayeredCarry, tuple[Memory, ...]]:
    """Returns the carry before the first step, and the memory of every layer.

    Raises:
      UserError: if `max_length` exceeds the number of position embeddings.
    """
    self.positions.check(max_length)
    memories = self._remember(encoded)
    layers = tuple(block.start(memory) for block, memory in zip(self.blocks, memories, strict=True))
    return initial_carry(encoded.memory.shape[0], layers), memories

  def step(
    self, carry: LayeredCarry, embedding: jax.Array, memory: tuple[Memory, ...], deterministic: bool = True
  ) -> tuple[LayeredCarry, DecoderOutput]:
    """Decodes one step from the embedding [B, E] of the input token.

    Arguments: see decoders.Decoder.step.
    """
    embedded, x = self.embed_inputs(embedding[:, None], carry.step[:1])
    embedded = embedded[:, 0]
    x = x[:, 0]
    layer_carries = []
    layer_weights = []
    for block, layer_carry, layer_memory in zip(self.blocks, carry.layers, memory, strict=True):
      layer_carry, x, weights = block.step(layer_carry, x, embedded, layer_memory, deterministic)
      layer_carries.append(layer_carry)
      layer_weights.append(weights)
    output = self._output(x, embedded, layer_weights, 1, deterministic)
    return LayeredCarry(carry.step + 1, tuple(layer_carries)), output

  def __call__(self, encoded: Encoded, embeddings: jax.Array, deterministic: bool) -> DecoderOutput:
    """Decodes all steps at once from the embeddings [B, T, E] of the input tokens."""
    embedded, x = self.embed_inputs(embeddings, jnp.arange(embeddings.shape[1]))
    layer_weights = []
    for block, layer_memory in zip(self.blocks, self._remember(encoded), strict=True):
      x, weights = block(x, embedded, layer_memory, deterministic)
      layer_weights.append(jnp.moveaxis(weights, 2, 1))
    return self._output(x, embedded, layer_weights, 2, deterministic)

  def _remember(self, encoded: Encoded) -> tuple[Memory, ...]:
    """Prepares the memory of every layer."""
    # The gradient of the encoder is the mean of those of the layers, not their sum. The source embeddings, which are
    # added to the memory in the values, receive the sum (section 3.4). `memory - encoded.memory` is 0; it only scales
    # the gradient that the encoder's memory receives through the values.
    memory = scale_gradient(encoded.memory, 1 / self.layers)
    encoded = encoded._replace(memory=memory, value=encoded.values_or_memory + (memory - encoded.memory))
    return tuple(block.remember(encoded) for block in self.blocks)

  def _output(
    self, x: jax.Array, embedded: jax.Array, layer_weights: list[jax.Array], axis: int, deterministic: bool
  ) -> DecoderOutput:
    """Returns the features for the output layer, and the weights of all layers stacked along `axis`."""
    features = self.drop(self.finalize(x, embedded.shape[-1]), deterministic=deterministic)
    return self.make_output(features, layer_weights, axis)
