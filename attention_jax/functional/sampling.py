"""Hard alignments that sample one position, trained by REINFORCE or by the straight-through gradient of a relaxation.

They sample during training; at test time they select the most probable position (`hardmax`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Float, Int
from attention_jax.errors import UserError
from attention_jax.functional.dense import (
  Mask,
  Scores,
  Weights,
  check_single_query,
  check_temperature,
  hardmax,
  log_softmax,
  softmax,
)
from attention_jax.functional.masking import Dimension, at_least_float32


class Samples(NamedTuple):
  """State of `hard_once`.

  Attributes:
    log_prob: sum of the log-probabilities of all samples so far.
    entropy: sum of the entropies of softmax(e) so far.
    is_expectation: 1 if weights are the expectation instead of samples, else 0.
  """

  log_prob: Float[Array, '']
  entropy: Float[Array, '']
  is_expectation: Float[Array, '']


@check_single_query
def hard(
  scores: Scores, mask: Mask, *, rng: jax.Array, state: Float[Array, ''], expectation_rate: float = 0.0
) -> tuple[Weights, Float[Array, '']]:
  """A position sampled from softmax(e), or with probability `expectation_rate` softmax(e) itself. Xu et al. 2015.

  Section 4.1 of the paper chooses between sample and expectation once per image, with probability 1/2, see
  `hard_once`; here the choice is made at every step. The expectation trains the scores while the samples are not yet
  useful.

  Sampled weights have no gradient. The state is the sum of the log-probabilities of all samples so far; the REINFORCE
  estimator multiplies its gradient by the reward. Consumes rng.

  Raises:
    UserError: if `expectation_rate` is outside of [0, 1].
  """
  _check_expectation_rate('hard', expectation_rate)
  sample, log_prob = _sample_with_log_prob(scores, mask, rng)
  log_prob = log_prob.astype(state.dtype)
  if not expectation_rate:
    return sample, state + log_prob
  is_expectation = jax.random.bernoulli(jax.random.fold_in(rng, 1), expectation_rate)
  weights = jnp.where(is_expectation, softmax(scores, mask), sample)
  return weights, state + jnp.where(is_expectation, 0.0, log_prob)


@check_single_query
def hard_once(
  scores: Scores, mask: Mask, *, rng: jax.Array, step: Int[Array, ''], state: Samples, expectation_rate: float = 0.5
) -> tuple[Weights, Samples]:
  """`hard` with one choice for the whole sequence: all weights are samples, or all are softmax(e). Xu et al. 2015.

  The first step makes the choice. Consumes rng.

  Raises:
    UserError: if `expectation_rate` is outside of [0, 1].
  """
  _check_expectation_rate('hard_once', expectation_rate)
  sample, log_prob = _sample_with_log_prob(scores, mask, rng)
  logs = log_softmax(scores, mask)
  weights = softmax(scores, mask)
  first_choice = jax.random.bernoulli(jax.random.fold_in(rng, 1), expectation_rate)
  is_expectation = jnp.where(step == 0, first_choice, state.is_expectation > 0)
  dtype = state.log_prob.dtype
  log_prob = state.log_prob + jnp.where(is_expectation, 0.0, log_prob).astype(dtype)
  entropy = state.entropy - jnp.sum(weights * logs).astype(dtype)
  return jnp.where(is_expectation, weights, sample), Samples(log_prob, entropy, is_expectation.astype(dtype))


@check_single_query
def gumbel(scores: Scores, mask: Mask, *, rng: jax.Array, temperature: float | Float[Array, ''] = 1.0) -> Weights:
  """One position sampled from softmax(e), with the gradient of softmax((e + g)/τ), g ~ Gumbel: straight through.

  Jang, Gu & Poole 2017, section 2.2. Consumes rng.

  Raises:
    UserError: if the temperature is a number that is not positive.
  """
  check_temperature('gumbel', temperature)
  noisy = at_least_float32(scores) + _gumbel_noise(scores, rng)
  return straight_through(hardmax(noisy, mask), softmax(noisy, mask, temperature=temperature))


@check_single_query
def gumbel_annealed(scores: Scores, mask: Mask, *, rng: jax.Array, temperature: float | Float[Array, '']) -> Weights:
  """`gumbel` with a temperature that is a parameter: learned, or set by a schedule (`training.anneal`).

  A temperature below 0.01 counts as 0.01, so that a schedule may end at 0.
  """
  return gumbel(scores, mask, rng=rng, temperature=jnp.maximum(temperature, 0.01))


def init_log_prob(size: Dimension, dtype) -> Float[Array, '']:
  """Returns the state of `hard` before the first query."""
  return jnp.zeros((), dtype)


def init_samples(size: int, dtype) -> Samples:
  """Returns the state of `hard_once` before the first query."""
  return Samples(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))


def _check_expectation_rate(name: str, expectation_rate: float) -> None:
  if not 0 <= expectation_rate <= 1:
    raise UserError(f'{name}: expectation_rate must be at least 0 and at most 1, got {expectation_rate}')


def _sample_with_log_prob(scores: Scores, mask: Mask, rng: jax.Array) -> tuple[Weights, Float[Array, '']]:
  """A sample without gradient, and its log-probability."""
  sample = jax.lax.stop_gradient(_sample(scores, mask, rng))
  return sample, jnp.sum(sample * log_softmax(scores, mask))


@jax.custom_jvp
def straight_through(hard: Weights, soft: Weights) -> Weights:
  """Returns exactly `hard`, with the gradient of `soft`. Bengio, Léonard & Courville 2013."""
  return hard


@straight_through.defjvp
def _(primals, tangents):
  hard, _ = primals
  _, soft_tangent = tangents
  return hard, soft_tangent


def _gumbel_noise(scores: Scores, rng: jax.Array) -> Scores:
  # Always drawn in float32, so that a seed gives the same noise in every precision.
  return jax.random.gumbel(rng, scores.shape, jnp.float32).astype(at_least_float32(scores).dtype)


def _sample(scores: Scores, mask: Mask, rng: jax.Array) -> Weights:
  """One-hot sample from softmax(scores): the largest of scores + Gumbel noise."""
  return hardmax(at_least_float32(scores) + _gumbel_noise(scores, rng), mask)
