"""Latent alignments: the output is read at ONE position, which nobody sees, and training sums over all of them.

Exactly, for alignments of order zero, p(y) = Π_t Σ_a w_t(a) p(y_t | a), and of order one, where a_t depends on a_{t-1}
and the sum is the forward algorithm. By samples, for everything else: REINFORCE.

The weights of a latent alignment are the prior of a_t given the outputs before. Whoever knows p(y_t | a) tells it by
`observe` once y_t is known, and `posterior` is the distribution of a_t given the whole output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.functional.dense import check_single_query, softmax
from attention_jax.functional.masking import at_least_float32
from attention_jax.functional.monotonic import LOG_ZERO, init_forward, linear_recurrence

Scores = Float[Array, 'S']
Mask = Bool[Array, 'S']
Weights = Float[Array, 'S']


class LatentAlignment(NamedTuple):
  """What makes an alignment latent.

  Attributes:
    observe: (state, log_likelihood [S]) -> the state when the output of this step is known; None where later steps do
      not depend on it.
    posterior: (weights [T, S], states of the T steps, log_likelihood [T, S]) -> posterior weights [T, S].
  """

  observe: Callable[[Any, Array], Any] | None
  posterior: Callable[[Array, Any, Array], Array]


class ChainState(NamedTuple):
  """The state of `latent_monotonic`.

  `position` is the log-probability of a_t given all outputs observed so far, `scores` those of the last step, LOG_ZERO
  where they were masked.
  """

  position: Scores
  scores: Scores


@check_single_query
def latent(scores: Scores, mask: Mask) -> Weights:
  """softmax(e) as the prior of a hidden position: p(y) = Σ_a w(a) p(y | a). Wu, Shapiro & Cotterell 2018."""
  return softmax(scores, mask)


@check_single_query
def latent_monotonic(scores: Scores, mask: Mask, *, state: ChainState) -> tuple[Weights, ChainState]:
  """A hidden position that never moves back: p(a | a') ∝ exp(e_a), a ≥ a'. Wu & Cotterell 2019, first-order monotonic.

  The weights are Σ_a' p(a | a') p(a' | outputs so far), in logs throughout.
  """
  scores = jnp.where(mask, at_least_float32(scores), LOG_ZERO)
  prior = _move(state.position.astype(scores.dtype), scores)
  weights = jnp.where(mask, jnp.exp(prior), 0.0)
  return weights, ChainState(prior.astype(state.position.dtype), scores.astype(state.scores.dtype))


def init_chain(size: int, dtype) -> ChainState:
  """The state before the first query: at position 0, from where every position can be reached."""
  return ChainState(init_forward(size, dtype), jnp.full((size,), LOG_ZERO, dtype))


def observe_chain(state: ChainState, log_likelihood: Scores) -> ChainState:
  """The distribution of the position once the output is known: p(a_t | y_≤t) ∝ p(a_t | y_<t) p(y_t | a_t)."""
  position = _sum_to_one(_plus(state.position, log_likelihood.astype(state.position.dtype)))
  return state._replace(position=position)


def chain_log_marginal(scores: Float[Array, 'T S'], log_likelihood: Float[Array, 'T S']) -> Float[Array, '']:
  """log Σ over all monotonic paths of Π_t p(a_t | a_{t-1}) p(y_t | a_t), by the forward algorithm.

  Args: scores, LOG_ZERO where masked; log_likelihood, of the output y_t read at each position.
  """

  def step(position, given):
    scores, likelihood = given
    joint = _plus(_move(position, scores), likelihood)
    return joint, None

  start = init_forward(scores.shape[-1], scores.dtype)
  joint, _ = jax.lax.scan(step, start, (scores, log_likelihood))
  return _log_sum(joint)


def chain_posterior(weights: Float[Array, 'T S'], states: ChainState, log_likelihood: Float[Array, 'T S']) -> Array:
  """p(a_t | the whole output): the gradient of the log marginal by the log-likelihoods (the backward algorithm)."""
  scores = at_least_float32(states.scores)
  return jax.grad(chain_log_marginal, argnums=1)(scores, log_likelihood.astype(scores.dtype))


def posterior(weights: Float[Array, 'T S'], states: Any, log_likelihood: Float[Array, 'T S']) -> Array:
  """p(a_t | y_t) ∝ w_t(a) p(y_t | a), for alignments of order zero."""
  seen = weights > 0
  logs = jnp.log(jnp.where(seen, weights, 1.0)) + log_likelihood.astype(weights.dtype)
  return jax.vmap(softmax)(logs, seen)


def log_mixture(weights: Float[Array, '... S'], log_probs: Float[Array, '... S V']) -> Float[Array, '... V']:
  """log Σ_a w(a) p(y | a): the distribution of the output, the position summed out; LOG_ZERO if there is no weight."""
  seen = (weights > 0)[..., None]
  logs = jnp.log(jnp.where(weights > 0, weights, 1.0))[..., None] + log_probs
  logs = jnp.where(seen, logs, LOG_ZERO)
  return jax.nn.logsumexp(logs, axis=-2)


def reinforce(
  log_probs: Float[Array, 'T'],
  rewards: Float[Array, 'T'],
  baseline: Float[Array, 'T'],
  entropy: float = 0.0,
  discount: float = 1.0,
) -> Float[Array, '']:
  """Σ_t log π(a_t) (G_t - b_t): its gradient is an unbiased estimate of ∂/∂π of E[Σ_t r_t] + λ H. Williams 1992.

  G_t is the sum of rewards from step t on, the draw at t having no influence on those before; with `entropy` λ every
  step earns -λ log π(a_t) besides, whose expectation is the entropy of all draws (Xu et al. 2015, section 4.1). With
  `discount` γ the reward of k steps later counts γ^k: of less variance, and biased against what a draw does later.

  Args: log_probs of the draws; rewards and baseline, through which no gradient goes, in nats.
  """
  later = rewards_to_go(jax.lax.stop_gradient(rewards - entropy * log_probs), discount)
  return jnp.sum(log_probs * (later - jax.lax.stop_gradient(baseline)))


def rewards_to_go(rewards: Float[Array, 'T'], discount: float = 1.0) -> Float[Array, 'T']:
  """Of every step, Σ_k γ^k r_{t+k}: what it and those after it earn."""
  return linear_recurrence(jnp.full_like(rewards, discount), rewards[::-1])[::-1]


def _move(position: Scores, scores: Scores) -> Scores:
  """log Σ_{a' ≤ a} p(a') exp(e_a) / Σ_{k ≥ a'} exp(e_k): one step of the chain, in logs; LOG_ZERO where it cannot be."""
  ahead = _cumulative(scores, reverse=True)
  there = (position > LOG_ZERO / 2) & (ahead > LOG_ZERO / 2)
  ratio = jnp.where(there, position - jnp.where(there, ahead, 0.0), LOG_ZERO)
  return _plus(_cumulative(ratio), scores)


def _plus(x: Scores, y: Scores) -> Scores:
  """x + y of logs, LOG_ZERO where one of them is."""
  there = (x > LOG_ZERO / 2) & (y > LOG_ZERO / 2)
  return jnp.where(there, jnp.where(there, x, 0.0) + jnp.where(there, y, 0.0), LOG_ZERO)


def _cumulative(logs: Scores, reverse: bool = False) -> Scores:
  return jnp.maximum(jax.lax.cumlogsumexp(logs, reverse=reverse), LOG_ZERO)


def _log_sum(logs: Scores) -> Float[Array, '']:
  return jnp.maximum(jax.nn.logsumexp(logs), LOG_ZERO)


def _sum_to_one(logs: Scores) -> Scores:
  there = logs > LOG_ZERO / 2
  total = jnp.where(jnp.any(there), _log_sum(logs), 0.0)
  return jnp.where(there, logs - total, LOG_ZERO)
