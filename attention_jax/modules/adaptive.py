"""Adaptive computation time: a recurrence that repeats its update until it halts. Graves 2016."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.masking import zero_masked
from attention_jax.modules.recurrent import RECURRENCES, RecurrentCell, State, zero_state


class Ponder(NamedTuple):
  """Updates and ponder cost of a step, or of every step of a sequence; float32.

  Attributes:
    updates: number N of updates, [B] or [B, S]; 0 where masked.
    cost: ponder cost N + R, of the same shape, whose gradient is that of the remainder R.
  """

  updates: jax.Array
  cost: jax.Array


class _Progress(NamedTuple):
  """Progress of one step: the newest state, the weighted sum of all states, and the other fields for each row [B]."""

  state: State
  mean: State
  halting: jax.Array  # sum of the halting probabilities
  ponder: Ponder
  is_running: jax.Array


def ponder(
  update: Callable[[State, jax.Array], State],
  halt: Callable[[jax.Array], jax.Array],
  state: State,
  first: jax.Array,
  later: jax.Array,
  *,
  limit: int = 10,
  epsilon: float = 0.01,
) -> tuple[State, Ponder]:
  """Repeats the update of any recurrence for one step; returns a weighted mean of its states. Graves 2016, section 2.

  sⁿ = update(sⁿ⁻¹, x), hⁿ = halt(sⁿ), N = min{n: Σ_{m≤n} hᵐ ≥ 1 − ε}, R = 1 − Σ_{n<N} hⁿ, pⁿ = hⁿ for n < N and
  pᴺ = R, s = Σ_n pⁿ sⁿ. N has no gradient.

  Args:
    update: (state, inputs [B, ...]) -> state, whose first array is the output.
    halt: output [B, F] -> halting probability [B].
    state: state before the step.
    first: inputs of the first update.
    later: inputs of the other updates.
    limit: largest N; the last update takes the remainder.
    epsilon: ε; with ε > 0 a single update can suffice, although hⁿ < 1.

  Returns:
    The state after the step, and Ponder with arrays [B].
  """
  rows = state[0].shape[0]  # not len, which raises TypeError for a symbolic size
  zeros = jnp.zeros(rows, jnp.float32)
  mean = jax.tree.map(lambda part: jnp.zeros(part.shape, jnp.float32), state)
  start = _Progress(state, mean, zeros, Ponder(zeros, zeros), jnp.ones(rows, bool))

  def advance(progress: _Progress, number: jax.Array) -> _Progress:
    new = update(progress.state, jnp.where(number == 0, first, later))
    probability = halt(new[0]).astype(jnp.float32)
    remainder = 1 - progress.halting
    halts = (progress.halting + probability >= 1 - epsilon) | (number == limit - 1)
    weight = jnp.where(progress.is_running, jnp.where(halts, remainder, probability), 0.0)
    mean = jax.tree.map(lambda total, part: total + weight[:, None] * part, progress.mean, new)
    cost = jnp.where(halts, 1 + remainder, 1.0)
    running = progress.is_running.astype(jnp.float32)
    counted = Ponder(progress.ponder.updates + running, progress.ponder.cost + running * cost)
    return _Progress(new, mean, progress.halting + weight, counted, progress.is_running & ~halts)

  def body(progress: _Progress, number: jax.Array) -> tuple[_Progress, None]:
    def unchanged(progress, _):
      return progress

    return jax.lax.cond(progress.is_running.any(), advance, unchanged, progress, number), None

  end, _ = jax.lax.scan(body, start, jnp.arange(limit))
  return jax.tree.map(lambda mean, part: mean.astype(part.dtype), end.mean, state), end.ponder


class AdaptiveLayer(nn.Module):
  """A recurrent layer with adaptive computation time around any recurrence. Graves 2016, section 2.

  The input has one more feature, which is 1 in the first update of a step and 0 in the others. The halting
  probability is hⁿ = σ(w · sⁿ + b), where sⁿ is the output; b is initialised to 1, so that an untrained layer halts
  after few updates.

  Attributes:
    kind: a key of RECURRENCES.
    features: features F of the layer.
    reverse: whether the sequence is read from its end.
    limit: largest number of updates of a step.
    epsilon: ε, see `ponder`.
    dtype: dtype of the computation; halting probabilities and sums of states are float32.
  """

  kind: str = 'gru'
  features: int = 256
  reverse: bool = False
  limit: int = 10
  epsilon: float = 0.01
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, inputs: jax.Array, mask: jax.Array, state: State | None = None) -> tuple[jax.Array, State, Ponder]:
    """Runs the layer over a sequence.

    Args:
      inputs: inputs, [B, S, D].
      mask: True at real positions, [B, S].
      state: state before the first step; by default zeros.

    Returns:
      Outputs [B, S, F], zero where masked; the state after the last unmasked step; and Ponder with arrays [B, S].
    """
    cell = RecurrentCell(self.kind, self.features, self.dtype)
    projected = jnp.moveaxis(cell.project(zero_masked(inputs, mask)), 1, 0)
    width = RECURRENCES[self.kind].gates * self.features
    flag = self.param('flag', nn.initializers.glorot_uniform(), (1, width))
    halting_kernel = self.param('halting_kernel', nn.initializers.lecun_normal(), (self.features, 1))
    halting_bias = self.param('halting_bias', nn.initializers.ones, (1,))
    update = cell.step()
    state = zero_state(self.kind, inputs.shape[0], self.features, self.dtype) if state is None else state

    def halt(output: jax.Array) -> jax.Array:
      return jax.nn.sigmoid(output.astype(jnp.float32) @ halting_kernel + halting_bias[None])[:, 0]

    def body(state: State, xs: tuple) -> tuple[State, tuple[jax.Array, Ponder]]:
      x, is_real = xs
      first = x + flag.astype(x.dtype)  # cast here, so that the gradients of all steps are added in float32
      new, pondered = ponder(update, halt, state, first, x, limit=self.limit, epsilon=self.epsilon)
      state = jax.tree.map(lambda new, old: jnp.where(is_real[:, None], new, old), new, state)
      return state, (state[0], pondered)

    state, (outputs, pondered) = jax.lax.scan(body, state, (projected, mask.T), reverse=self.reverse)

    def to_batch_first(x):
      return zero_masked(jnp.moveaxis(x, 0, 1), mask)

    return to_batch_first(outputs), state, jax.tree.map(to_batch_first, pondered)
