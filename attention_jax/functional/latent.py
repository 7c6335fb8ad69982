"""Latent alignments: the output depends on ONE position, which is a latent variable that training marginalises.

Training computes the sum over positions exactly. (`hard` and `hard_once` instead maximise a lower bound of its
logarithm, E[log p(y | a)], whose gradient `reinforce` estimates from samples.) There are two kinds:

- order zero: p(y) = Π_t Σ_a w_t(a) p(y_t | a);
- order one: a_t depends on a_{t-1}, and the forward algorithm computes the sum.

The weights of a latent alignment are the prior of a_t given the previous outputs. Once y_t is known, the caller passes
log p(y_t | a) to `LatentAlignment.observe`, if it is not None. `LatentAlignment.posterior` returns the distribution of
a_t given the whole output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Float
from attention_jax.functional.dense import Mask, Scores, Weights, check_single_query, clamp_to_finite, softmax
from attention_jax.functional.masking import Dimension, at_least_float32
from attention_jax.functional.monotonic import LOG_ZERO, init_forward, linear_recurrence

LARGE_SCORE = 1e24


class LatentAlignment(NamedTuple):
  """Functions that make an alignment latent.

  Attributes:
    observe: (state, log_likelihood [S]) -> the state after the output of this step is known; None if later steps do not
      depend on it.
    posterior: (weights [T, S], states of the T steps, log_likelihood [T, S]) -> posterior weights [T, S].
  """

  observe: Callable[[Any, Array], Any] | None
  posterior: Callable[[Array, Any, Array], Array]


class ChainState(NamedTuple):
  """The state of `latent_monotonic`.

  Attributes:
    position: log-probabilities of a_t given all outputs observed so far.
    scores: the scores of the last step, LOG_ZERO where masked.
  """

  position: Scores
  scores: Scores


@check_single_query
def latent(scores: Scores, mask: Mask) -> Weights:
  """softmax(e) as the prior of a latent position: p(y) = Σ_a w(a) p(y | a). Wu, Shapiro & Cotterell 2018."""
  return softmax(scores, mask)


@check_single_query
def latent_monotonic(scores: Scores, mask: Mask, *, state: ChainState) -> tuple[Weights, ChainState]:
  """A latent position that never moves back: p(a | a') ∝ exp(e_a), a ≥ a'. Wu & Cotterell 2019, first-order monotonic.

  The weights are Σ_a' p(a | a') p(a' | outputs so far), computed in logs.
  """
  scores = jnp.where(mask, at_least_float32(scores), 0.0)
  scores = jnp.where(mask, _compress(scores), LOG_ZERO)
  prior = _transition(state.position.astype(scores.dtype), scores)
  weights = jnp.where(mask, jnp.exp(prior), 0.0)
  return weights, ChainState(prior.astype(state.position.dtype), scores.astype(state.scores.dtype))


def init_chain(size: Dimension, dtype) -> ChainState:
  """Returns the state before the first query: at position 0, from which every position can be reached."""
  return ChainState(init_forward(size, dtype), jnp.full((size,), LOG_ZERO, dtype))


def observe_chain(state: ChainState, log_likelihood: Scores) -> ChainState:
  """Updates the position once the output is known: p(a_t | y_≤t) ∝ p(a_t | y_<t) p(y_t | a_t)."""
  position = _normalise(_multiply(state.position, log_likelihood.astype(state.position.dtype)))
  return state._replace(position=position)


def chain_log_marginal(scores: Float[Array, 'T S'], log_likelihood: Float[Array, 'T S']) -> Float[Array, '']:
  """log Σ over all monotonic paths of Π_t p(a_t | a_{t-1}) p(y_t | a_t), by the forward algorithm.

  Args:
    scores: LOG_ZERO where masked.
    log_likelihood: log p(y_t | a_t) for each position a_t.
  """

  def step(position, x):
    scores, likelihood = x
    return _multiply(_transition(position, scores), likelihood), None

  start = init_forward(scores.shape[-1], scores.dtype)
  joint, _ = jax.lax.scan(step, start, (scores, log_likelihood))
  return _log_sum(joint)


def chain_posterior(weights: Float[Array, 'T S'], states: ChainState, log_likelihood: Float[Array, 'T S']) -> Array:
  """p(a_t | the whole output): gradient of the log marginal with respect to log_likelihood (backward algorithm)."""
  scores = at_least_float32(states.scores)
  return jax.grad(chain_log_marginal, argnums=1)(scores, log_likelihood.astype(scores.dtype))


def posterior(weights: Float[Array, 'T S'], states: Any, log_likelihood: Float[Array, 'T S']) -> Array:
  """p(a_t | y_t) ∝ w_t(a) p(y_t | a), for alignments of order zero."""
  is_positive = weights > 0
  logs = jnp.log(jnp.where(is_positive, weights, 1.0)) + log_likelihood.astype(weights.dtype)
  return jax.vmap(softmax)(logs, is_positive)


def log_mixture(weights: Float[Array, '... S'], log_probs: Float[Array, '... S V']) -> Float[Array, '... V']:
  """log Σ_a w(a) p(y | a): log-probabilities of the output, summed over positions; LOG_ZERO if all weights are 0."""
  is_positive = weights > 0
  logs = jnp.log(jnp.where(is_positive, weights, 1.0))[..., None] + log_probs
  logs = jnp.where(is_positive[..., None], logs, LOG_ZERO)
  return jax.nn.logsumexp(logs, axis=-2)


def reinforce(
  log_probs: Float[Array, ' T'],
  rewards: Float[Array, ' T'],
  baseline: Float[Array, ' T'],
  entropy: float = 0.0,
  discount: float = 1.0,
) -> Float[Array, '']:
  """Σ_t log π(a_t) (G_t - b_t), whose gradient estimates that of E[Σ_t r_t] + λ H without bias. Williams 1992.

  G_t is the sum of the rewards from step t on, because the sample at t has no influence on earlier ones. With `entropy`
  λ every step has the additional reward -λ log π(a_t); their expectations sum to λ times the entropy H of all samples
  (Xu et al. 2015, section 4.1). With `discount` γ the reward k steps later is multiplied by γᵏ, which lowers the
  variance but biases the estimate, since it underrates the later effects of a sample.

  Args:
    log_probs: log π(a_t) of the samples.
    rewards: r, in nats, without gradient.
    baseline: b, in nats, without gradient.
    entropy: λ.
    discount: γ.

  Returns:
    The surrogate objective, which is to be maximised.
  """
  returns = rewards_to_go(jax.lax.stop_gradient(rewards - entropy * log_probs), discount)
  return jnp.sum(log_probs * (returns - jax.lax.stop_gradient(baseline)))


def rewards_to_go(rewards: Float[Array, ' T'], discount: float = 1.0) -> Float[Array, ' T']:
  """Returns the discounted sum Σ_k γᵏ r_{t+k} of the rewards from each step on."""
  return linear_recurrence(jnp.full_like(rewards, discount), rewards[::-1])[::-1]


def _transition(position: Scores, scores: Scores) -> Scores:
  """log Σ_{a' ≤ a} p(a') exp(e_a) / Σ_{k ≥ a'} exp(e_k): one step of the chain, in logs; LOG_ZERO if unreachable."""
  ahead = _cumulative(scores, reverse=True)
  is_reachable = _is_positive(position) & _is_positive(ahead)
  ratio = jnp.where(is_reachable, position - jnp.where(is_reachable, ahead, 0.0), LOG_ZERO)
  return _multiply(_cumulative(ratio), scores)


def _compress(scores: Scores) -> Scores:
  """Compresses scores beyond ±LARGE_SCORE, keeping their order, so that float32 scores stay far above LOG_ZERO."""
  scores = clamp_to_finite(scores)
  is_large = jnp.abs(scores) > LARGE_SCORE
  return jnp.where(is_large, jnp.sign(scores) * LARGE_SCORE + 1e-10 * scores, scores)


def _is_positive(logs: Scores) -> Array:
  """Whether exp(logs) is greater than 0, where LOG_ZERO is the logarithm of 0."""
  return logs > LOG_ZERO / 2


def _multiply(x: Scores, y: Scores) -> Scores:
  """Adds logarithms; LOG_ZERO where either is LOG_ZERO."""
  is_positive = _is_positive(x) & _is_positive(y)
  return jnp.where(is_positive, jnp.where(is_positive, x, 0.0) + jnp.where(is_positive, y, 0.0), LOG_ZERO)


def _cumulative(logs: Scores, reverse: bool = False) -> Scores:
  return jnp.maximum(jax.lax.cumlogsumexp(logs, reverse=reverse), LOG_ZERO)


def _log_sum(logs: Scores) -> Float[Array, '']:
  return jnp.maximum(jax.nn.logsumexp(logs), LOG_ZERO)


def _normalise(logs: Scores) -> Scores:
  """Subtracts the logarithm of the sum; LOG_ZERO stays LOG_ZERO."""
  is_positive = _is_positive(logs)
  total = jnp.where(jnp.any(is_positive), _log_sum(logs), 0.0)
  return jnp.where(is_positive, logs - total, LOG_ZERO)
