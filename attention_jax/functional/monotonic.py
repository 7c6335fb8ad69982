"""Alignments that only move forward. Their state is the distribution of the position after the previous query, for
`forward` and `forward_agent` its logarithm; `forward_agent` adds the log-odds of its next move.

The weights of `forward` and `forward_agent` are normalised. Those of the others may sum to less than 1: mass that moves
past the end of the memory is lost, and is not spread over the other positions. The expected weights of `monotonic` and
`mocha` are computed from a linear recurrence, q[s] = a[s] q[s - 1] + b[s], solved by an associative scan, which never
divides by a product of small numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Float
from attention_jax.functional.dense import (
  Mask,
  Scores,
  Weights,
  check_at_least,
  check_single_query,
  log_softmax,
  softmax,
)
from attention_jax.functional.local import check_width
from attention_jax.functional.masking import Dimension, at_least_float32

WeightsAndState = tuple[Weights, Weights]


class AgentState(NamedTuple):
  """State of `forward_agent`.

  Attributes:
    log_weights: logarithm of the weights of the previous query, [S].
    move_logit: log-odds of moving on with the next query, [].
  """

  log_weights: Scores
  move_logit: Float[Array, '']


CHUNK = 3  # default width of a chunk, in positions
LOG_ZERO = -1e30  # finite replacement for the logarithm of 0


def init_at_first_position(size: Dimension, dtype) -> Weights:
  """Returns the state before the first query: all weight at position 0."""
  return jnp.zeros((size,), dtype).at[0].set(1.0)


@check_single_query
def monotonic(scores: Scores, mask: Mask, *, state: Weights, rng: jax.Array, noise: float = 1.0) -> WeightsAndState:
  """Expected weights of a walk that stops at s with probability pₛ = σ(eₛ + nₛ). Raffel et al. 2017, section 2.

  wₛ = pₛ qₛ, qₛ = (1 - pₛ₋₁) qₛ₋₁ + w'ₛ, with w' the previous weights, which are the state. n is Gaussian noise of
  standard deviation `noise`, which drives the learned probabilities towards 0 and 1. Consumes rng. The test-time
  counterpart is `hard_monotonic`.

  Raises:
    UserError: if `noise` is negative.
  """
  check_at_least('monotonic', 'noise', noise, 0)
  scores = at_least_float32(scores)
  # Always drawn in float32, so that a seed gives the same noise in every precision.
  stop_logits = scores + noise * jax.random.normal(rng, scores.shape, jnp.float32).astype(scores.dtype)
  weights = _stopping_probabilities(stop_logits, mask, state)
  return weights, weights.astype(state.dtype)


@check_single_query
def hard_monotonic(scores: Scores, mask: Mask, *, state: Weights) -> WeightsAndState:
  """1 at the first s, at or after the previous position, with σ(eₛ) > 1/2; zeros if there is none. No gradient.

  After a query with zeros, all later queries get zeros too. Raffel et al. 2017.
  """
  stops = mask & (scores > 0) & (jnp.cumsum(state) > 0.5)
  is_first = stops & (jnp.cumsum(stops) == 1)
  weights = jnp.where(is_first, 1.0, 0.0).astype(at_least_float32(scores).dtype)
  return weights, weights.astype(state.dtype)


@check_single_query
def mocha(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, ' Dq'],
  remembered: Float[Array, 'S F'],
  w: Float[Array, 'Dq F'],
  bias: Float[Array, ' F'],
  v: Float[Array, ' F'],
  state: Weights,
  rng: jax.Array,
  width: int = CHUNK,
  noise: float = 1.0,
) -> WeightsAndState:
  """Monotonic chunkwise attention: softmax over `width` positions that end where the walk stops. Chiu & Raffel 2018.

  Scores inside the chunk are vᵀ tanh(Wᵀ q + Uᵀ h + b), computed from the unprojected query q and the values h. The walk
  and its state are those of `monotonic`. Consumes rng.

  Raises:
    UserError: if the width is less than 1 or not a whole number, or if `noise` is negative.
  """
  stops, state = monotonic(scores, mask, state=state, rng=rng, noise=noise)
  return _chunk_weights(stops, mask, _chunk_scores(query, remembered, w, bias, v), width), state


@check_single_query
def hard_mocha(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, ' Dq'],
  remembered: Float[Array, 'S F'],
  w: Float[Array, 'Dq F'],
  bias: Float[Array, ' F'],
  v: Float[Array, ' F'],
  state: Weights,
  width: int = CHUNK,
) -> WeightsAndState:
  """`mocha` with a walk that stops as in `hard_monotonic`. Chiu & Raffel 2018.

  Raises:
    UserError: if the width is less than 1 or not a whole number.
  """
  stops, state = hard_monotonic(scores, mask, state=state)
  return _chunk_weights(stops, mask, _chunk_scores(query, remembered, w, bias, v), width), state


def project_values(value: Float[Array, 'S V'], *, u: Float[Array, 'V F']) -> Float[Array, 'S F']:
  """Returns Uᵀ h of each value h, which `mocha` and `forward_agent` take as `remembered`."""
  return value @ u.astype(value.dtype)


def chunk_lookback(*, width: int = CHUNK) -> int:
  """Returns how many positions before the end of its chunk `mocha` attends to."""
  return width - 1


@check_single_query
def forward(scores: Scores, mask: Mask, *, state: Scores) -> WeightsAndState:
  """wₛ ∝ (w'ₛ + w'ₛ₋₁) yₛ, y = softmax(e): stays or moves on by one. Zhang, Ling & Dai 2018, algorithm 1.

  The state is the logarithm of the previous weights w', in which small weights do not underflow.
  """
  return _forward(scores, mask, state, jnp.zeros((), state.dtype), jnp.zeros((), state.dtype))


@check_single_query
def forward_agent(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, ' Dq'],
  remembered: Float[Array, 'S F'],
  w: Float[Array, 'Dq F'],
  bias: Float[Array, ' F'],
  v: Float[Array, ' F'],
  offset: Float[Array, ''],
  state: AgentState,
) -> tuple[Weights, AgentState]:
  """`forward` with an agent that moves on with probability p: wₛ ∝ ((1 - p') w'ₛ + p' w'ₛ₋₁) yₛ.

  p = σ(vᵀ tanh(Wᵀ q + Uᵀ c + b) + offset), of the query q and the context c = Σ wₛ hₛ of this step, is the probability
  of moving on at the next step; p' is the p of the previous step, or 1/2 at the first step. Zhang et al. 2018,
  algorithm 2. The network of the paper also reads the previous output. Here the query depends on that output if the
  decoder attends with a state that has read it, as `luong` does.
  """
  logit = at_least_float32(state.move_logit)
  weights, log_weights = _forward(
    scores, mask, state.log_weights, jax.nn.log_sigmoid(-logit), jax.nn.log_sigmoid(logit)
  )
  projected_context = weights @ at_least_float32(remembered)
  move_logit = _tanh_unit(query, projected_context, w, bias, v) + at_least_float32(offset)
  return weights, AgentState(log_weights, move_logit.astype(state.move_logit.dtype))


def init_forward(size: Dimension, dtype) -> Scores:
  """Returns the state before the first query: the logarithm of `init_at_first_position`."""
  return jnp.full((size,), LOG_ZERO, dtype).at[0].set(0.0)


def init_agent(size: Dimension, dtype) -> AgentState:
  """Returns the state before the first query: that of `forward`, and a probability of 1/2 to move on."""
  return AgentState(init_forward(size, dtype), jnp.zeros((), dtype))


def linear_recurrence(a: Float[Array, ' S'], b: Float[Array, ' S']) -> Float[Array, ' S']:
  """Solves q[s] = a[s] q[s - 1] + b[s], q[-1] = 0."""

  def compose(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]

  return jax.lax.associative_scan(compose, (a, b))[1]


def log_add(x: Array, y: Array) -> Array:
  """log(eˣ + eʸ) of finite numbers, where LOG_ZERO is the logarithm of 0."""
  return jnp.maximum(jnp.logaddexp(x, y), LOG_ZERO)


def _stopping_probabilities(stop_logits: Scores, mask: Mask, previous: Weights) -> Weights:
  """Probability that a walk from `previous` ends at s.

  At s it stops with probability σ(stop_logits[s]), or 0 if s is masked.
  """
  stop_logits = jnp.where(mask, stop_logits, 0.0)
  stop_probability = jnp.where(mask, jax.nn.sigmoid(stop_logits), 0.0)
  pass_probability = jnp.where(mask, jax.nn.sigmoid(-stop_logits), 1.0)
  arrival_probability = linear_recurrence(jnp.roll(pass_probability, 1), previous.astype(stop_logits.dtype))
  return stop_probability * arrival_probability


def _tanh_unit(query, projected, w, bias, v) -> Array:
  """vᵀ tanh(Wᵀ q + p + b) for one projected vector p, [F]."""
  query, projected, w, bias, v = map(at_least_float32, (query, projected, w, bias, v))
  return jnp.tanh(query @ w + projected + bias) @ v


def _chunk_scores(query, remembered, w, bias, v) -> Scores:
  """The scores of `mocha` inside a chunk: vᵀ tanh(Wᵀ q + p + b) for each projected value p of remembered [S, F]."""
  return jax.vmap(lambda projected: _tanh_unit(query, projected, w, bias, v))(remembered)


def _chunk_weights(stops, mask, scores, width: int) -> Weights:
  """Σ over the ends s of chunks: stops[s] softmax(scores[s - width + 1], ..., scores[s])."""
  check_width('mocha', width, 1)
  dtype = stops.dtype
  size = mask.size
  positions = jnp.arange(size)[:, None] - jnp.arange(width)[None, :]  # [end of the chunk, distance to its end]
  chunk_mask = (positions >= 0) & mask[jnp.maximum(positions, 0)]
  chunk_scores = scores.astype(dtype)[jnp.maximum(positions, 0)]
  chunks = jax.vmap(softmax)(chunk_scores, chunk_mask) * stops[:, None]
  weights = jnp.zeros((size + width,), dtype)  # position s is entry s + width
  for i in range(width):
    weights = weights.at[width - i : width - i + size].add(chunks[:, i])
  return jnp.where(mask, weights[width:], 0.0)


def _forward(scores: Scores, mask: Mask, state: Scores, log_stay: Array, log_move: Array) -> WeightsAndState:
  """`forward`, with the logarithms of the factors of w'ₛ (staying) and of w'ₛ₋₁ (moving on)."""
  scores = at_least_float32(scores)
  state = _move_to_unmasked(state, mask)
  last_unmasked = jax.lax.cummax(jnp.where(mask, jnp.arange(mask.size), -1))
  # The unmasked position before each position, -1 if there is none.
  predecessor = jnp.concatenate([jnp.full((1,), -1), last_unmasked[:-1]])
  moved = jnp.where(predecessor >= 0, state[jnp.maximum(predecessor, 0)], LOG_ZERO)
  prior = log_add(state + log_stay, moved + log_move).astype(scores.dtype)
  reachable = mask & (prior > LOG_ZERO / 2)
  joint = jnp.where(reachable, prior + scores, 0.0)
  logs = jnp.where(reachable, log_softmax(joint, reachable), LOG_ZERO)
  return softmax(joint, reachable), logs.astype(state.dtype)


def _move_to_unmasked(state: Scores, mask: Mask) -> Scores:
  """Moves mass from masked positions, such as a masked first one, to the next unmasked position."""
  target = jax.lax.cummin(jnp.where(mask, jnp.arange(mask.size), mask.size), reverse=True)
  mass = jnp.zeros(mask.size + 1, state.dtype).at[target].add(jnp.where(mask, 0.0, jnp.exp(state)))[:-1]
  moved = jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1.0)), LOG_ZERO)
  return jnp.where(mask, log_add(state, moved), LOG_ZERO)
