"""Alignments that only move forward: each keeps, as its state, where it stood before.

Weights may sum to less than 1: what runs off the end of the memory is gone, and is never spread over the rest. Expected
weights are linear recurrences, q[s] = a[s] q[s - 1] + b[s], solved by an associative scan: nothing is divided by a
product of small numbers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.functional.dense import check_at_least, check_single_query, log_softmax, softmax
from attention_jax.functional.local import check_width
from attention_jax.functional.masking import at_least_float32

Scores = Float[Array, 'S']
Mask = Bool[Array, 'S']
Weights = Float[Array, 'S']
Stepped = tuple[Weights, Weights]

CHUNK = 3  # positions, unless a spec says another width
LOG_ZERO = -1e30  # the log of what cannot be reached: finite, and nothing beside any real score


def init_at_first_position(size: int, dtype) -> Weights:
  """The weights before the first query: all at position 0."""
  return jnp.zeros((size,), dtype).at[0].set(1.0)


@check_single_query
def monotonic(scores: Scores, mask: Mask, *, state: Weights, rng: jax.Array, noise: float = 1.0) -> Stepped:
  """Expected weights of a walk that stops at s with probability pₛ = σ(eₛ + noise). Raffel et al. 2017, section 2.

  wₛ = pₛ qₛ, qₛ = (1 - pₛ₋₁) qₛ₋₁ + w'ₛ, with w' the weights before: the state. Consumes rng: Gaussian noise of the
  deviation `noise` makes it learn probabilities near 0 and 1. At test it is `hard_monotonic`.
  Raises: UserError for negative noise.
  """
  check_at_least('monotonic', 'noise', noise, 0)
  scores = at_least_float32(scores)
  # Drawn in float32 in any precision, so that a seed means the same walk.
  stop = scores + noise * jax.random.normal(rng, scores.shape, jnp.float32).astype(scores.dtype)
  weights = _walk(stop, mask, state)
  return weights, weights


@check_single_query
def hard_monotonic(scores: Scores, mask: Mask, *, state: Weights) -> Stepped:
  """1 at the first s, from where the weights before stood, with σ(eₛ) > 1/2; nothing if there is none.

  Raffel et al. 2017. No gradient.
  """
  choice = mask & (scores > 0) & (jnp.cumsum(state) > 0.5)
  weights = jnp.where(choice & (jnp.cumsum(choice) == 1), 1.0, 0.0).astype(at_least_float32(scores).dtype)
  return weights, weights


@check_single_query
def mocha(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, 'Dq'],
  key: Float[Array, 'S Dk'],
  w: Float[Array, 'Dq Dk'],
  bias: Float[Array, 'Dk'],
  v: Float[Array, 'Dk'],
  state: Weights,
  rng: jax.Array,
  width: int = CHUNK,
  noise: float = 1.0,
) -> Stepped:
  """Monotonic chunkwise: a softmax over the `width` positions that end where the walk stops. Chiu & Raffel 2018.

  The chunk has scores of its own, u = vᵀ tanh(Wᵀ q + k + b), on the key as it is remembered. The state and the first
  half are those of `monotonic`. Consumes rng. Raises: UserError unless width ≥ 1.
  """
  stops, state = monotonic(scores, mask, state=state, rng=rng, noise=noise)
  return _chunks(stops, mask, query, key, w, bias, v, width), state


@check_single_query
def hard_mocha(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, 'Dq'],
  key: Float[Array, 'S Dk'],
  w: Float[Array, 'Dq Dk'],
  bias: Float[Array, 'Dk'],
  v: Float[Array, 'Dk'],
  state: Weights,
  width: int = CHUNK,
) -> Stepped:
  """`mocha` where the walk stops as in `hard_monotonic`. Chiu & Raffel 2018."""
  stops, state = hard_monotonic(scores, mask, state=state)
  return _chunks(stops, mask, query, key, w, bias, v, width), state


def chunk_lookback(*, width: int = CHUNK) -> int:
  """How many positions before the end of its chunk `mocha` looks at."""
  return width - 1


@check_single_query
def forward(scores: Scores, mask: Mask, *, state: Scores) -> Stepped:
  """wₛ ∝ (w'ₛ + w'ₛ₋₁) yₛ, y = softmax(e): stays or moves on by one. Zhang, Ling & Dai 2018, algorithm 1.

  The state is the log of the weights before, w': in logs, no score is too extreme to get somewhere.
  """
  return _forward(scores, mask, state, jnp.zeros((), state.dtype), jnp.zeros((), state.dtype))


@check_single_query
def forward_agent(
  scores: Scores, mask: Mask, *, query: Float[Array, 'Dq'], w: Float[Array, 'Dq'], bias: Float[Array, ''], state: Scores
) -> Stepped:
  """`forward` with an agent that moves on with probability u = σ(wᵀ q + b): wₛ ∝ ((1 - u) w'ₛ + u w'ₛ₋₁) yₛ.

  Zhang et al. 2018, algorithm 2; their agent also sees the context and the output before.
  """
  moves = jnp.sum(at_least_float32(query) * at_least_float32(w)) + at_least_float32(bias)
  moves = moves.astype(state.dtype)
  return _forward(scores, mask, state, jax.nn.log_sigmoid(-moves), jax.nn.log_sigmoid(moves))


def init_forward(size: int, dtype) -> Scores:
  """The state before the first query: the log of `init_at_first_position`."""
  return jnp.full((size,), LOG_ZERO, dtype).at[0].set(0.0)


def _walk(stop: Scores, mask: Mask, before: Weights) -> Weights:
  """Where a walk ends that stops at s with probability σ(stop[s]), and never where masked."""
  stop = jnp.where(mask, stop, 0.0)
  here = jnp.where(mask, jax.nn.sigmoid(stop), 0.0)
  passes = jnp.where(mask, jax.nn.sigmoid(-stop), 1.0)
  arrives = linear_recurrence(jnp.roll(passes, 1), before.astype(stop.dtype))
  return here * arrives


def linear_recurrence(a: Float[Array, 'S'], b: Float[Array, 'S']) -> Float[Array, 'S']:
  """q[s] = a[s] q[s - 1] + b[s], q[-1] = 0."""
  join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
  return jax.lax.associative_scan(join, (a, b))[1]


def _chunks(stops, mask, query, key, w, bias, v, width: int) -> Weights:
  """Σ over the ends s of chunks: stops[s] softmax(u[s - width + 1], ..., u[s])."""
  check_width('mocha', width, 1)
  dtype = stops.dtype
  project = at_least_float32(query) @ at_least_float32(w) + at_least_float32(bias)
  scores = jnp.tanh(project[None, :] + at_least_float32(key)) @ at_least_float32(v)
  size = mask.size
  back = jnp.arange(size)[:, None] - jnp.arange(width)[None, :]  # [end of the chunk, how far before its end]
  there = (back >= 0) & mask[jnp.maximum(back, 0)]
  chunk = jax.vmap(softmax)(scores.astype(dtype)[jnp.maximum(back, 0)], there) * stops[:, None]
  spread = jnp.zeros((size + width,), dtype)
  for i in range(width):  # chunk[:, i] lies i positions before the end of its chunk
    spread = spread.at[width - i : width - i + size].add(chunk[:, i])
  return jnp.where(mask, spread[width:], 0.0)


def _forward(scores: Scores, mask: Mask, state: Scores, stays: Array, moves: Array) -> Stepped:
  scores, state = at_least_float32(scores), _on_real(state, mask)
  last = jax.lax.cummax(jnp.where(mask, jnp.arange(mask.size), -1))
  before = jnp.concatenate([jnp.full((1,), -1), last[:-1]])  # the real position before each, -1 where there is none
  moved = jnp.where(before >= 0, state[jnp.maximum(before, 0)], LOG_ZERO)
  reach = log_add(state + stays, moved + moves).astype(scores.dtype)
  allowed = mask & (reach > LOG_ZERO / 2)
  total = jnp.where(allowed, reach + scores, 0.0)
  logs = jnp.where(allowed, log_softmax(total, allowed), LOG_ZERO)
  return softmax(total, allowed), logs.astype(state.dtype)


def _on_real(state: Scores, mask: Mask) -> Scores:
  """Whoever stands where nothing may be attended to, as at the start before a masked position, stands at the next real
  one."""
  onto = jax.lax.cummin(jnp.where(mask, jnp.arange(mask.size), mask.size), reverse=True)
  mass = jnp.zeros(mask.size + 1, state.dtype).at[onto].add(jnp.where(mask, 0.0, jnp.exp(state)))[:-1]
  moved = jnp.where(mass > 0, jnp.log(jnp.where(mass > 0, mass, 1.0)), LOG_ZERO)
  return jnp.where(mask, log_add(state, moved), LOG_ZERO)


def log_add(x: Array, y: Array) -> Array:
  """log(eˣ + eʸ) of finite numbers, LOG_ZERO counting as the log of 0."""
  return jnp.maximum(jnp.logaddexp(x, y), LOG_ZERO)
