"""Recurrent layers: the recurrences as pure functions, and modules that own their parameters.

What does not depend on the recurrence (the projection of the inputs) is done for all steps at once, outside the scan.
Padding is right in both directions: a masked step leaves the carry as it was, so that a reverse layer starts at the
last real position, and the outputs at masked positions are zero.
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

State = tuple[jax.Array, ...]  # the first of it is the layer's output


class Recurrence(NamedTuple):
  """One kind of recurrence.

  Attributes:
    gates: how many times `features` wide the projected inputs are.
    states: how many arrays its state has.
    step: (projected inputs [..., G F], state, recurrent kernel [F, G F], bias [F]) -> state.
    bias: where its bias starts; 1 opens the forget gate.
  """

  gates: int
  states: int
  step: Callable
  bias: float = 0.0


def _simple(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """h = tanh(x + h U + b). Elman 1990."""
  return (jnp.tanh(x + _fed(state[0], kernel) + _row(bias, x)).astype(state[0].dtype),)


def _gru(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """Gated recurrent unit (Cho et al. 2014), with the reset gate after the product, as cuDNN has it."""
  (h,) = state
  reset, update, new = jnp.split(_fed(h, kernel), 3, axis=-1)
  x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
  reset, update = jax.nn.sigmoid(x_reset + reset), jax.nn.sigmoid(x_update + update)
  new = jnp.tanh(x_new + reset * (new + _row(bias, new)))
  return ((new + update * (h - new)).astype(h.dtype),)


def _lstm(x: jax.Array, state: State, kernel: jax.Array, bias: jax.Array) -> State:
  """Long short-term memory (Hochreiter & Schmidhuber 1997; forget gate of Gers et al. 2000, its bias b)."""
  h, c = state
  i, f, g, o = jnp.split(x + _fed(h, kernel), 4, axis=-1)
  c = (jax.nn.sigmoid(f + _row(bias, f)) * c + jax.nn.sigmoid(i) * jnp.tanh(g)).astype(c.dtype)
  return (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(h.dtype), c


def _fed(h: jax.Array, kernel: jax.Array) -> jax.Array:
  """What the state adds to the gates, which are computed in float32 whatever the state is kept in."""
  return product(h, kernel, accumulation_dtype(h))


def _row(bias: jax.Array, like: jax.Array) -> jax.Array:
  return bias.reshape((1,) * (like.ndim - 1) + bias.shape)


RECURRENCES: Mapping[str, Recurrence] = {
  'simple': Recurrence(1, 1, _simple),
  'gru': Recurrence(3, 1, _gru),
  'lstm': Recurrence(4, 2, _lstm, bias=1.0),
}


class RecurrentCell(nn.Module):
  """One recurrent layer, one step at a time: `project` the inputs of all steps, then call it step by step."""

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
    """[..., D] -> [..., G F]: what a step needs of its inputs."""
    return self.inputs(inputs)

  def __call__(self, state: State, projected: jax.Array) -> State:
    """One step; state[0] is its output [..., F]."""
    return self.step()(state, projected)

  def step(self) -> Callable[[State, jax.Array], State]:
    """The step as a plain function of (state, projected), for jax.lax.scan."""
    kernel, bias, fn = self.kernel.astype(self.dtype), self.bias.astype(self.dtype), self.recurrence.step
    return lambda state, projected: fn(projected, state, kernel, bias)


def _orthogonal_gates(gates: int):
  def init(rng, shape, dtype=jnp.float32):
    square = (shape[0], shape[1] // gates)
    rngs = jax.random.split(rng, gates)
    return jnp.concatenate([nn.initializers.orthogonal()(r, square, dtype) for r in rngs], axis=1)

  return init


def zero_state(kind: str, batch: int, features: int, dtype=jnp.float32) -> State:
  """The state of one layer [batch, features] before its first step."""
  zeros = jnp.zeros((batch, features), dtype)
  return (zeros,) * RECURRENCES[choose(kind, RECURRENCES, 'rnn')].states


class RecurrentLayer(nn.Module):
  """One recurrent layer over a whole sequence, in one direction; or over a part of it, from a given state."""

  kind: str = 'gru'
  features: int = 256
  reverse: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array, mask: jax.Array, state: State | None = None) -> tuple[jax.Array, State]:
    """inputs [B, S, D], mask [B, S] -> outputs [B, S, F] (zero where masked), the state after the last real step."""
    cell = RecurrentCell(self.kind, self.features, self.dtype)
    projected = jnp.moveaxis(cell.project(zero_masked(inputs, mask)), 1, 0)
    step = cell.step()
    state = zero_state(self.kind, inputs.shape[0], self.features, self.dtype) if state is None else state

    def body(state, xs):
      x, real = xs
      state = jax.tree.map(lambda new, old: jnp.where(real[:, None], new, old), step(state, x), state)
      return state, state[0]

    state, outputs = jax.lax.scan(body, state, (projected, mask.T), reverse=self.reverse)
    return zero_masked(jnp.moveaxis(outputs, 0, 1), mask), state


class RecurrentStack(nn.Module):
  """Stacked recurrent layers of a decoder, one step at a time. The lowest layer's inputs may be projected before.

  Attributes:
    residual: adds the input of every layer above the first to its output (Wu et al. 2016).
    dropout: between layers.
    bridge: whether `start` is a learned map of the summary; without it, it is zeros.
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
    """How wide projected inputs are."""
    return self._recurrence.gates * self.features

  def start(self, summary: jax.Array) -> tuple[State, ...]:
    """The states of all layers before the first step, from a summary [B, D] of the source: h = tanh(W x), c = W x."""
    if not self.bridge:
      return (zero_state(self.kind, summary.shape[0], self.features, self.dtype),) * self.layers
    return tuple(
      tuple(jnp.tanh(b(summary)) if i == 0 else b(summary) for i, b in enumerate(layer)) for layer in self.bridges
    )

  def project(self, inputs: jax.Array) -> jax.Array:
    """What the lowest layer needs of its inputs."""
    return self.cells[0].project(inputs)

  def __call__(
    self, states: tuple[State, ...], projected: jax.Array, deterministic: bool, beside: jax.Array | None = None
  ) -> tuple[tuple[State, ...], jax.Array]:
    """One step: the new states, and the output [B, F] of the top layer.

    Args: beside [B, V], an input of every layer above the lowest, besides what comes from below.
    """
    states, new = list(states), []
    new.append(self.cells[0](states[0], projected))
    output = new[0][0]
    for cell, state in zip(self.cells[1:], states[1:], strict=True):
      below = self.between(output, deterministic=deterministic)
      given = below if beside is None else jnp.concatenate([below, beside], axis=-1)
      new.append(cell(state, cell.project(given)))
      output = new[-1][0] + (below if self.residual else 0.0)
    return tuple(new), output
