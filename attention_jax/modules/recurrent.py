"""Recurrent layers: the recurrences as pure functions, and modules that own their parameters.

`RecurrentLayer` projects its inputs for all steps at once, outside the scan. A masked step leaves the state unchanged,
and outputs at masked positions are zero. A reverse layer therefore starts at the last unmasked position.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.masking import accumulation_dtype, zero_masked
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.linear import Dense, product

State = tuple[jax.Array, ...]  # the first array is the output of the layer


class Recurrence(NamedTuple):
  """One kind of recurrence.

  Attributes:
    gates: number G of gates; the projected inputs have G F features.
    states: number of arrays in the state.
    step: (projected inputs [..., G F], state, recurrent kernel [F, G F], bias [F]) -> state.
    bias: initial value of the bias; 1 opens the forget gate.
  """

  gates: int
  states: int
  step: Callable
  bias: float = 0.0


def _simple(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """h = tanh(x + h U + b). Elman 1990."""
  return (jnp.tanh(x + _recurrent_product(state[0], kernel) + _expand_bias(bias, x)).astype(state[0].dtype),)


def _gru(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """Gated recurrent unit (Cho et al. 2014), with the reset gate after the product, as in cuDNN."""
  (h,) = state
  reset, update, new = jnp.split(_recurrent_product(h, kernel), 3, axis=-1)
  x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
  reset = jax.nn.sigmoid(x_reset + reset)
  update = jax.nn.sigmoid(x_update + update)
  new = jnp.tanh(x_new + reset * (new + _expand_bias(bias, new)))
  return ((new + update * (h - new)).astype(h.dtype),)


def _gru_reset_first(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """Gated recurrent unit with the reset gate before the product. Bahdanau, Cho & Bengio 2015, appendix A.1.1.

  s' = tanh(x + (r * s) U + b), s = (1 - z) * s + z * s'; `_gru` has 1 - z in the place of z.
  """
  (h,) = state
  size = h.shape[-1]
  x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
  reset, update = jnp.split(_recurrent_product(h, kernel[:, : 2 * size]), 2, axis=-1)
  reset = jax.nn.sigmoid(x_reset + reset)
  update = jax.nn.sigmoid(x_update + update)
  product_of_reset = _recurrent_product((reset * h).astype(h.dtype), kernel[:, 2 * size :])
  new = jnp.tanh(x_new + product_of_reset + _expand_bias(bias, x_new))
  return ((h + update * (new - h)).astype(h.dtype),)


def _lstm(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """Long short-term memory (Hochreiter & Schmidhuber 1997; forget gate of Gers et al. 2000, its bias b)."""
  h, c = state
  i, f, g, o = jnp.split(x + _recurrent_product(h, kernel), 4, axis=-1)
  c = (jax.nn.sigmoid(f + _expand_bias(bias, f)) * c + jax.nn.sigmoid(i) * jnp.tanh(g)).astype(c.dtype)
  return (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(h.dtype), c


def _recurrent_product(h: jax.Array, kernel: jax.Array) -> jax.Array:
  """Contribution of the state to the gates, in float32 or the dtype of the state if that is more precise."""
  return product(h, kernel, accumulation_dtype(h))


def _expand_bias(bias: jax.Array, like: jax.Array) -> jax.Array:
  """Adds leading axes, because implicit rank promotion is an error in tests."""
  return bias.reshape((1,) * (like.ndim - 1) + bias.shape)


RECURRENCES: Mapping[str, Recurrence] = {
  'simple': Recurrence(1, 1, _simple),
  'gru': Recurrence(3, 1, _gru),
  'gru_reset_first': Recurrence(3, 1, _gru_reset_first),
  'lstm': Recurrence(4, 2, _lstm, bias=1.0),
}


class RecurrentCell(nn.Module):
  """One recurrent layer: `project` projects the inputs of all steps at once, and a call computes one step."""

  kind: str = 'gru'
  features: int = 256
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.recurrence = RECURRENCES[choose(self.kind, RECURRENCES, 'rnn')]
    width = self.recurrence.gates * self.features
    self.inputs = Dense(width, dtype=self.dtype, kernel_init=nn.initializers.glorot_uniform())
    self.kernel = self.param('kernel', _orthogonal_gates(self.recurrence.gates), (self.features, width))
    self.bias = self.param('bias', nn.initializers.constant(self.recurrence.bias), (self.features,))

  def project(self, inputs: jax.Array) -> jax.Array:
    """Projects inputs [..., D] to [..., G F]."""
    return self.inputs(inputs)

  def __call__(self, state: State, projected: jax.Array) -> State:
    """Returns the state after one step; its first array is the output [..., F]."""
    return self.step()(state, projected)

  def step(self) -> Callable[[State, jax.Array], State]:
    """Returns the step as a plain function of (state, projected), for the body of jax.lax.scan."""
    kernel = self.kernel
    bias = self.bias
    dtype = self.dtype
    recurrence_step = self.recurrence.step

    def step(state: State, projected: jax.Array) -> State:
      # Cast here and not before the scan, so that the gradients of all steps are added in the dtype of the parameters.
      return recurrence_step(projected, state, kernel.astype(dtype), bias.astype(dtype))

    return step


def _orthogonal_gates(gates: int):
  def init(rng, shape, dtype=jnp.float32):
    square = (shape[0], shape[1] // gates)
    rngs = jax.random.split(rng, gates)
    return jnp.concatenate([nn.initializers.orthogonal()(r, square, dtype) for r in rngs], axis=1)

  return init


def zero_state(kind: str, batch: int, features: int, dtype=jnp.float32) -> State:
  """Returns the state of one layer before its first step, arrays [batch, features].

  Args:
    kind: a key of RECURRENCES, which determines the number of arrays.
    batch: number of rows B.
    features: features F of the layer.
    dtype: dtype of the arrays.

  Raises:
    UserError: for an unknown kind.
  """
  zeros = jnp.zeros((batch, features), dtype)
  return (zeros,) * RECURRENCES[choose(kind, RECURRENCES, 'rnn')].states


class RecurrentLayer(nn.Module):
  """One recurrent layer over a sequence in one direction, from zeros or from the state of a previous call."""

  kind: str = 'gru'
  features: int = 256
  reverse: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array, mask: jax.Array, state: State | None = None) -> tuple[jax.Array, State]:
    """Runs the layer over a sequence.

    Args:
      inputs: inputs, [B, S, D].
      mask: True at real positions, [B, S].
      state: state before the first step; by default zeros.

    Returns:
      Outputs [B, S, F], zero where masked, and the state after the last unmasked step.
    """
    cell = RecurrentCell(self.kind, self.features, self.dtype)
    projected = jnp.moveaxis(cell.project(zero_masked(inputs, mask)), 1, 0)
    step = cell.step()
    state = zero_state(self.kind, inputs.shape[0], self.features, self.dtype) if state is None else state

    def body(state, xs):
      x, is_real = xs
      state = jax.tree.map(lambda new, old: jnp.where(is_real[:, None], new, old), step(state, x), state)
      return state, state[0]

    state, outputs = jax.lax.scan(body, state, (projected, mask.T), reverse=self.reverse)
    return zero_masked(jnp.moveaxis(outputs, 0, 1), mask), state


class RecurrentStack(nn.Module):
  """Stacked recurrent layers of a decoder, one step at a time; `project` projects the inputs of the lowest layer.

  Attributes:
    kind: a key of RECURRENCES.
    features: features F of each layer.
    layers: number of layers.
    residual: whether the output of each layer, after dropout, is added to that of the next (Wu et al. 2016).
    dropout: dropout rate between layers.
    bridge: whether the initial states are a learned function of a summary of the source; otherwise they are zeros.
  """

  kind: str = 'gru'
  features: int = 256
  layers: int = 1
  residual: bool = False
  dropout: float = 0.0
  bridge: bool = True
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    if self.layers < 1:
      raise UserError(f'layers must be at least 1, got {self.layers}')
    self.cells = [RecurrentCell(self.kind, self.features, self.dtype) for _ in range(self.layers)]
    self.between = Dropout(self.dropout)
    states = self._recurrence.states if self.bridge else 0
    self.bridges = [[Dense(self.features, dtype=self.dtype) for _ in range(states)] for _ in range(self.layers)]

  @property
  def _recurrence(self) -> Recurrence:
    return RECURRENCES[choose(self.kind, RECURRENCES, 'rnn')]

  @property
  def width(self) -> int:
    """Width of projected inputs."""
    return self._recurrence.gates * self.features

  def start(self, summary: jax.Array) -> tuple[State, ...]:
    """Returns the initial states of all layers; zeros without a bridge.

    Args:
      summary: summary x of the source, [B, D]; with a bridge, h = tanh(W x + b), and c = V x + d of an LSTM.
    """
    if not self.bridge:
      return (zero_state(self.kind, summary.shape[0], self.features, self.dtype),) * self.layers
    states = []
    for output_bridge, *cell_bridges in self.bridges:
      output = jnp.tanh(output_bridge(summary))
      states.append((output, *(bridge(summary) for bridge in cell_bridges)))
    return tuple(states)

  def project(self, inputs: jax.Array) -> jax.Array:
    """Projects the inputs of the lowest layer."""
    return self.cells[0].project(inputs)

  def __call__(
    self, states: tuple[State, ...], projected: jax.Array, deterministic: bool, extra_inputs: jax.Array | None = None
  ) -> tuple[tuple[State, ...], jax.Array]:
    """Computes one step of all layers.

    Args:
      states: states of all layers.
      projected: projected inputs of the lowest layer.
      deterministic: whether dropout is off.
      extra_inputs: additional inputs of every layer above the lowest, [B, V], or None.

    Returns:
      The new states, and the output [B, F] of the top layer.
    """
    new_states = [self.cells[0](states[0], projected)]
    output = new_states[0][0]
    for cell, state in zip(self.cells[1:], states[1:], strict=True):
      below = self.between(output, deterministic=deterministic)
      inputs = below if extra_inputs is None else jnp.concatenate([below, extra_inputs], axis=-1)
      new_states.append(cell(state, cell.project(inputs)))
      output = new_states[-1][0] + (below if self.residual else 0.0)
    return tuple(new_states), output
