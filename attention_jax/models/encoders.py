"""Encoders of token sequences. All return `Encoded`; some decoders need the states of a recurrent encoder in it."""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.mask import Mask, positions_of
from attention_jax.functional.masking import masked_mean, zero_masked
from attention_jax.models.convolutional import ConvEncoder
from attention_jax.models.encoded import Encoded, FinalStates
from attention_jax.modules.adaptive import AdaptiveLayer, Ponder
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.intra_attention import IntraAttentionLayer
from attention_jax.modules.positions import segment_positions
from attention_jax.modules.recurrent import RecurrentLayer, State, zero_state
from attention_jax.modules.transformer import EncoderLayer
from attention_jax.modules.transformer_stack import Stack
from attention_jax.specs import Fraction, Size

# By name: for each direction of a layer, whether it reads the source backward.
DIRECTIONS: Mapping[str, tuple[bool, ...]] = {'forward': (False,), 'backward': (True,), 'both': (False, True)}


class LayerOutput(NamedTuple):
  """Output of one layer of a RecurrentEncoder in one direction.

  Attributes:
    outputs: [B, S, F].
    state: state after the last step.
    weights: weights of each position over those read before it, as in Encoded.
    ponder: numbers of updates and their cost, as in Encoded.
  """

  outputs: jax.Array
  state: State
  weights: tuple[jax.Array, ...] = ()
  ponder: tuple[Ponder, ...] = ()


class RecurrentEncoder(nn.Module):
  """Stacked recurrent layers over embedded tokens; `final` is the concatenation of the last states of all layers.

  Attributes:
    embedding: module from ids to vectors.
    rnn: a key of RECURRENCES.
    features: features of each layer.
    layers: number of layers.
    residual: whether layers add their input to their output, from layer `residual_from` on and for equal widths.
    dropout: dropout rate of the memory and between layers.
    residual_from: index, from 0, of the first layer with a residual connection; fixed by the class.
  """

  embedding: nn.Module
  rnn: str = 'gru'
  features: Size = 512
  layers: Size = 1
  residual: bool = False
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32
  residual_from = 1

  def directions(self, layer: int) -> tuple[tuple[bool, int], ...]:
    """Returns, for each direction of a layer, whether it reads the source backward, and its features."""
    raise NotImplementedError

  @property
  def incremental(self) -> bool:
    """Whether a source may be encoded in parts, because no position depends on later ones."""
    return not any(backward for layer in range(self.layers) for backward, _ in self.directions(layer))

  def __call__(self, source: jax.Array, mask: jax.Array | Mask, deterministic: bool) -> Encoded:
    """Encodes source ids [B, S] with a mask [B, S]."""
    mask = positions_of(mask, source.shape[1])
    memory, layers = self._encode(self.init_states(source.shape[0]), source, mask, deterministic)
    states = tuple(layer.state for layer in layers)
    return Encoded(
      memory,
      mask,
      jnp.concatenate(jax.tree.leaves(states), axis=-1),
      states=self._by_direction(states),
      weights=sum((layer.weights for layer in layers), ()),
      ponder=sum((layer.ponder for layer in layers), ()),
    )

  def _by_direction(self, states: tuple[State, ...]) -> FinalStates:
    directions = [backward for layer in range(self.layers) for backward, _ in self.directions(layer)]
    pairs = list(zip(directions, states, strict=True))
    return FinalStates(
      tuple(state for backward, state in pairs if not backward), tuple(state for backward, state in pairs if backward)
    )

  def init_states(self, batch: int) -> tuple[State, ...]:
    """Returns the states of all layers and directions before the first token of `batch` sources."""
    directions = [direction for layer in range(self.layers) for direction in self.directions(layer)]
    return tuple(zero_state(self.rnn, batch, features, self.dtype) for _, features in directions)

  def extend(
    self, states: tuple[State, ...], ids: jax.Array, mask: jax.Array | None = None, deterministic: bool = True
  ) -> tuple[tuple[State, ...], jax.Array]:
    """Encodes the next part of a source, or a whole one.

    Args:
      states: states after the previous part, as `init_states` or `extend` returns them.
      ids: ids of the part, [B, n]; the whole source if the encoder is not `incremental`.
      mask: True at real positions, [B, n]; by default all are.
      deterministic: whether dropout is off.

    Returns:
      The states after the part, and its memory [B, n, D].
    """
    mask = jnp.ones(ids.shape, bool) if mask is None else mask
    memory, layers = self._encode(states, ids, mask, deterministic)
    return tuple(layer.state for layer in layers), memory

  @nn.compact
  def _encode(
    self, states: tuple[State, ...], ids: jax.Array, mask: jax.Array, deterministic: bool
  ) -> tuple[jax.Array, list[LayerOutput]]:
    """Returns the memory, and the output of every layer and direction."""
    outputs = self.embedding(ids, deterministic)
    previous_states = iter(states)
    layers = []
    drop = Dropout(self.dropout)
    for layer in range(self.layers):
      inputs = outputs
      by_direction = [
        self.run_layer(features, backward, inputs, mask, next(previous_states), deterministic)
        for backward, features in self.directions(layer)
      ]
      layers += by_direction
      outputs = jnp.concatenate([output.outputs for output in by_direction], axis=-1)
      if self.residual and layer >= self.residual_from and inputs.shape == outputs.shape:
        outputs = outputs + zero_masked(inputs, mask)
      outputs = drop(outputs, deterministic=deterministic)
    return outputs, layers

  def run_layer(
    self, features: int, backward: bool, inputs: jax.Array, mask: jax.Array, state: State, deterministic: bool
  ) -> LayerOutput:
    """Runs a new layer with `features` in one direction over inputs [B, S, D] with mask [B, S].

    Args:
      features: features F of the layer.
      backward: whether the layer reads the source backward.
      inputs: inputs, [B, S, D].
      mask: True at real positions, [B, S].
      state: state before the first step of the layer.
      deterministic: whether to use test-time behaviour.
    """
    return LayerOutput(*RecurrentLayer(self.rnn, features, backward, self.dtype)(inputs, mask, state))


class RNN(RecurrentEncoder):
  """Recurrent layers that all read in one direction, or all in both.

  Other attributes are those of RecurrentEncoder.

  Attributes:
    direction: 'forward', 'backward' (as in Sutskever et al. 2014), or 'both', with half of the features for each
      direction.
  """

  direction: str = 'forward'

  def directions(self, layer):
    directions = DIRECTIONS[choose(self.direction, DIRECTIONS, 'direction')]
    if self.features % len(directions):
      raise UserError(f'encoder: features must be even for two directions, got {self.features}')
    return tuple((is_backward, self.features // len(directions)) for is_backward in directions)


class BiRNN(RNN):
  """Recurrent layers that read in both directions, unless `direction` is set."""

  direction: str = 'both'


class GNMT(RecurrentEncoder):
  """A layer in both directions, then forward layers, with residual connections from the third layer on. Wu et al. 2016.

  Attributes as in RecurrentEncoder; the lowest layer has all `features` in each direction.
  """

  rnn: str = 'lstm'
  layers: Size = 4
  residual: bool = True
  residual_from = 2

  def directions(self, layer):
    return ((False, self.features), (True, self.features)) if layer == 0 else ((False, self.features),)


class LSTMN(RNN):
  """Recurrent layers whose state before a step is a weighted sum of all past states. Cheng et al. 2016, section 3.

  The equations are in modules.intra_attention. Other attributes are those of RNN.

  Attributes:
    score: spec of SCORES, for the query [x; h̃] and the key h. `dot`, `scaled_dot` and `cosine` raise, because the
      widths of query and key differ.
    alignment: spec of ALIGNMENTS that trains by backpropagation alone and has no state.
  """

  rnn: str = 'lstm'
  score: str = 'additive'
  alignment: str = 'softmax'

  @property
  def incremental(self) -> bool:
    return False  # a part would need the tape of the parts before it

  def run_layer(self, features, backward, inputs, mask, state, deterministic):
    layer = IntraAttentionLayer(self.rnn, features, backward, self.score, self.alignment, self.dtype)
    outputs, state, weights = layer(inputs, mask, deterministic)
    return LayerOutput(outputs, state, (weights,))


class ACT(RNN):
  """Adaptive computation time: every step updates the state of a recurrence until it halts. Graves 2016, section 2.

  The auxiliary loss `ponder` is the cost of these updates; without it, training does not favour early halting. Other
  attributes are those of RNN.

  Attributes:
    limit: largest number of updates of a step.
    epsilon: a step halts when its halting probabilities sum to at least 1 - epsilon.
  """

  limit: Size = 10
  epsilon: Fraction = 0.01

  def run_layer(self, features, backward, inputs, mask, state, deterministic):
    layer = AdaptiveLayer(self.rnn, features, backward, self.limit, self.epsilon, self.dtype)
    outputs, state, ponder = layer(inputs, mask, state)
    return LayerOutput(outputs, state, ponder=(ponder,))


class TransformerEncoder(Stack, kw_only=True):
  """Layers of self-attention; `final` is the mean of the memory. Vaswani et al. 2017, section 3.1.

  Other attributes are those of Stack.

  Attributes:
    embedding: module from ids to vectors.
  """

  embedding: nn.Module

  def setup(self):
    self.prepare(causal=False)
    layer = self.layer_class(EncoderLayer, 4)
    self.blocks = [layer(self.self_attention(i), self.feed_forward(), self.residual) for i in range(self.layers)]

  def __call__(self, source: jax.Array, mask: jax.Array | Mask, deterministic: bool) -> Encoded:
    """Encodes source ids [B, S] with a mask [B, S]; positions restart at every segment of a Mask of segments."""
    structure = mask if isinstance(mask, Mask) else Mask.array(mask[:, None])
    mask = positions_of(mask, source.shape[1])
    positions = jnp.arange(source.shape[1])
    segments = structure.query_segments
    embedded_positions = positions if segments is None else segment_positions(segments)
    x = self.embed_inputs(self.embedding(source, deterministic), embedded_positions)
    for block in self.blocks:
      x = self.apply_layer_drop(x, block(x, structure & self.self_mask, positions, deterministic), deterministic)
    memory = zero_masked(self.finalize(x), mask)
    return Encoded(memory, mask, masked_mean(memory, mask), structure=structure)


class Embedded(nn.Module):
  """Embeddings alone, without context; `final` is their mean.

  Attributes:
    embedding: module from ids to vectors; it determines the features and the dropout rate.
    scale: factor of the embeddings.
  """

  embedding: nn.Module
  scale: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, source: jax.Array, mask: jax.Array | Mask, deterministic: bool) -> Encoded:
    """Encodes source ids [B, S] with a mask [B, S]."""
    mask = positions_of(mask, source.shape[1])
    memory = zero_masked(self.embedding(source, deterministic).astype(self.dtype) * self.scale, mask)
    return Encoded(memory, mask, masked_mean(memory, mask))


ENCODERS: Mapping[str, type[nn.Module]] = {
  'rnn': RNN,
  'birnn': BiRNN,
  'embedded': Embedded,
  'gnmt': GNMT,
  'act': ACT,
  'lstmn': LSTMN,
  'conv': ConvEncoder,
  'transformer': TransformerEncoder,
}
