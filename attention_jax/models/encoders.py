"""Encoders: from a source to a memory. All of them return `Encoded`, so that every decoder works with every encoder."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.masking import masked_mean, zero_masked
from attention_jax.models.convolutional import ConvEncoder
from attention_jax.models.encoded import Encoded
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.recurrent import RecurrentLayer, State, zero_state
from attention_jax.modules.transformer import EncoderLayer, Stack, visibility_mask
from attention_jax.specs import Fraction, Size

DIRECTIONS: Mapping[str, tuple[bool, ...]] = {'forward': (False,), 'backward': (True,), 'both': (False, True)}


class RecurrentEncoder(nn.Module):
  """Stacked recurrent layers over embedded tokens; `final` is the concatenation of the last states of all layers.

  Attributes:
    embedding: module from ids to vectors.
    rnn: name of a row of RECURRENCES.
    features: width of each layer.
    layers: number of layers.
    residual: whether layers from number `residual_from` on add their input to their output, if the widths agree.
    dropout: dropout rate of the memory and between layers.
    dtype: dtype of the computation.
  """

  embedding: nn.Module
  rnn: str = 'gru'
  features: Size = 512
  layers: Size = 1
  residual: bool = False
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32
  residual_from = 1

  def sides(self, layer: int) -> tuple[tuple[bool, int], ...]:
    """Returns, for each direction of a layer, whether it reads the source backward, and its width."""
    raise NotImplementedError

  @property
  def incremental(self) -> bool:
    """Whether a source may be encoded part by part, because later tokens do not change earlier states."""
    return not any(backward for layer in range(self.layers) for backward, _ in self.sides(layer))

  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    """source [B, S] ids, mask [B, S] -> Encoded."""
    states, memory = self.extend(self.init_states(source.shape[0]), source, mask, deterministic)
    return Encoded(memory, mask, jnp.concatenate(jax.tree.leaves(states), axis=-1))

  def init_states(self, batch: int) -> tuple[State, ...]:
    """Returns the states of all layers and directions before the first token of `batch` sources."""
    sides = [side for layer in range(self.layers) for side in self.sides(layer)]
    return tuple(zero_state(self.rnn, batch, features, self.dtype) for _, features in sides)

  @nn.compact
  def extend(
    self, states: tuple[State, ...], ids: jax.Array, mask: jax.Array | None = None, deterministic: bool = True
  ) -> tuple[tuple[State, ...], jax.Array]:
    """Continues from `states` with more tokens.

    An encoder that is not `incremental` needs the whole source at once.

    Args:
      states: as returned by `init_states` or by this method.
      ids: [B, n].
      mask: [B, n], True = real; by default all are.
      deterministic: whether dropout is off.

    Returns:
      The new states, and the memory [B, n, D] of these positions.
    """
    mask = jnp.ones(ids.shape, bool) if mask is None else mask
    outputs, before, after = self.embedding(ids, deterministic), iter(states), []
    drop = Dropout(self.dropout)
    for layer in range(self.layers):
      inputs, sides = outputs, []
      for backward, features in self.sides(layer):
        side = RecurrentLayer(self.rnn, features, backward, self.dtype)
        output, state = side(inputs, mask, next(before))
        sides.append(output)
        after.append(state)
      outputs = jnp.concatenate(sides, axis=-1)
      if self.residual and layer >= self.residual_from and inputs.shape == outputs.shape:
        outputs = outputs + zero_masked(inputs, mask)
      outputs = drop(outputs, deterministic=deterministic)
    return tuple(after), outputs


class RNN(RecurrentEncoder):
  """Recurrent layers that all read in one direction, or all in both directions.

  Attributes as in RecurrentEncoder, and direction: 'forward', 'backward' (Sutskever et al. 2014 read the source
  backward) or 'both', where each direction has half of the features.
  """

  direction: str = 'forward'

  def sides(self, layer):
    backward = DIRECTIONS[choose(self.direction, DIRECTIONS, 'direction')]
    if self.features % len(backward):
      raise UserError(f'encoder: features={self.features} cannot be divided between both directions')
    return tuple((one, self.features // len(backward)) for one in backward)


class BiRNN(RNN):
  """RNN that reads in both directions."""

  direction: str = 'both'


class GNMT(RecurrentEncoder):
  """A layer in both directions, then layers forward with residual connections from the third on. Wu et al. 2016.

  Attributes as in RecurrentEncoder; the lowest layer has all features in each direction.
  """

  rnn: str = 'lstm'
  layers: Size = 4
  residual: bool = True
  residual_from = 2

  def sides(self, layer):
    return ((False, self.features), (True, self.features)) if layer == 0 else ((False, self.features),)


class TransformerEncoder(Stack, kw_only=True):
  """Layers with self-attention; `final` is the mean of the memory. Vaswani et al. 2017, section 3.1.

  Attributes as in Stack, and embedding: module from ids to vectors.
  """

  embedding: nn.Module

  def setup(self):
    self.prepare(causal=False)
    self.blocks = [EncoderLayer(self.self_attention(), self.feed_forward(), self.residual) for _ in range(self.layers)]

  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    """source [B, S] ids, mask [B, S] -> Encoded."""
    at = jnp.arange(source.shape[1])
    x, near = self.embed_inputs(self.embedding(source, deterministic), at), mask
    if self.window:
      near = mask[:, None, :] & visibility_mask(at, len(at), causal=False, window=self.window, sinks=self.sinks)[None]
    for block in self.blocks:
      x = self.apply_layer_drop(x, block(x, near, at, deterministic), deterministic)
    memory = zero_masked(self.finalize(x), mask)
    return Encoded(memory, mask, masked_mean(memory, mask))


class Embedded(nn.Module):
  """Embeddings without an encoder, whose mean is `final`: attention over the words themselves.

  Attributes:
    embedding: module from ids to vectors, which determines width and dropout.
    scale: factor of the embeddings.
    dtype: dtype of the computation.
  """

  embedding: nn.Module
  scale: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    """source [B, S] ids, mask [B, S] -> Encoded."""
    memory = zero_masked(self.embedding(source, deterministic).astype(self.dtype) * self.scale, mask)
    return Encoded(memory, mask, masked_mean(memory, mask))


ENCODERS: Mapping[str, type[nn.Module]] = {
  'rnn': RNN,
  'birnn': BiRNN,
  'embedded': Embedded,
  'gnmt': GNMT,
  'conv': ConvEncoder,
  'transformer': TransformerEncoder,
}
