"""Ranking of finished hypotheses: length penalty, coverage penalty and end-of-sentence normalisation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated

import jax
import jax.numpy as jnp

from attention_jax.errors import choose
from attention_jax.specs import Range, check_fields

# Greater numbers might let the scores of long outputs overflow in float32.
Exponent = Annotated[float, Range(0, 10)]
Factor = Annotated[float, Range(0, 10_000)]

MIN_COVERAGE = 1e-6  # lower bound of a position's coverage, which keeps the logarithm of the penalty finite


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array:
  """((5 + |Y|) / 6)^α. Wu et al. 2016, equation 14."""
  return ((5.0 + length) / 6.0) ** alpha


def length_power(length: jax.Array | int, alpha: float) -> jax.Array:
  """|Y|^α, as `generate` of transformers; the mean log-probability of a token for α = 1. Filler rows have length 0."""
  return jnp.maximum(length, 1.0) ** alpha


# Functions of the length |Y|, EOS included, and of α.
LENGTH_PENALTIES: Mapping[str, Callable[[jax.Array | int, float], jax.Array]] = {
  'wu2016': length_penalty,
  'power': length_power,
}


@dataclasses.dataclass(frozen=True)
class Ranking:
  """Score of finished hypotheses: s(Y, X) = log P(Y|X) / lp(Y) + cp(X; Y). Wu et al. 2016, equation 14.

  With end-of-sentence normalisation log P(Y|X) counts the log-probability of EOS `eos_factor` times. None of these
  terms affects which beams stay live.

  Attributes:
    alpha: exponent of the length penalty lp; 0 disables it.
    beta: factor of the coverage penalty cp; 0 disables it.
    gamma: factor of the end-of-sentence normalisation; 0 disables it.
    length_penalty: the length penalty lp, a key of LENGTH_PENALTIES; that of equation 14 is 'wu2016'.

  Raises:
    UserError: for a negative number, or one so large that scores of long outputs may overflow in float32, and for an
      unknown length penalty.
  """

  alpha: Exponent = 0.6
  beta: Factor = 0.0
  gamma: Factor = 0.0
  length_penalty: str = 'wu2016'

  def __post_init__(self):
    check_fields(self, 'ranking')
    choose(self.length_penalty, LENGTH_PENALTIES, 'length penalty')

  def normalizer(self, length: jax.Array | int) -> jax.Array:
    """Returns lp(Y) of hypotheses of these lengths, EOS included."""
    return LENGTH_PENALTIES[self.length_penalty](length, self.alpha)


DEFAULT_RANKING = Ranking()


def coverage_penalty(coverage: jax.Array, source_mask: jax.Array, beta: float) -> jax.Array:
  """β Σᵢ log(min(Σⱼ pᵢⱼ, 1)) of coverage [..., S] -> [...]. Wu et al. 2016, equation 14.

  The coverage Σⱼ pᵢⱼ is the total attention to position i, including that of the step that emits EOS. It is clipped at
  MIN_COVERAGE from below: an alignment may return exact zeros, and a position without attention costs 13.8 β instead
  of infinity.

  Args:
    coverage: [..., S] weights summed over the steps.
    source_mask: bool, True = real; broadcast to the shape of `coverage`.
    beta: β, see Ranking.
  """
  log_coverage = jnp.log(jnp.clip(coverage, MIN_COVERAGE, 1.0))
  return beta * jnp.sum(jnp.where(source_mask, log_coverage, 0.0), axis=-1)


def eos_factor(source_length: jax.Array, length: jax.Array | int, gamma: float) -> jax.Array:
  """γ |X| / |Y|, the factor of the log-probability of EOS: it penalises the end of short outputs.

  This is the option -eos_norm of OpenNMT (Klein et al. 2017) in Lua. Its manual calls γ |X| / |Y| a penalty; the code,
  onmt/translate/Beam.lua, multiplies the log-probability of EOS by it. A γ below |Y| / |X| rewards the end instead.

  Args:
    source_length: |X|, number of real source positions; those of a text include EOS.
    length: |Y|, number of tokens of the hypothesis, EOS included, at least 1.
    gamma: γ, see Ranking.
  """
  return gamma * source_length / length


def ranking_scores(
  log_probs: jax.Array,
  eos_log_probs: jax.Array,
  lengths: jax.Array | int,
  coverage: jax.Array,
  source_mask: jax.Array,
  ranking: Ranking,
) -> jax.Array:
  """Returns the scores [B, K] of finished hypotheses.

  Args:
    log_probs: [B, K] log-probabilities, EOS included.
    eos_log_probs: [B, K] log-probabilities of their EOS alone.
    lengths: [B, K] or one length for all, EOS included.
    coverage: [B, K, S] weights summed over the steps.
    source_mask: [B, S], True = real.
    ranking: the penalties.
  """
  if ranking.gamma:
    source_lengths = source_mask.sum(-1)[:, None]
    # Filler rows have length 0.
    factor = eos_factor(source_lengths, jnp.maximum(lengths, 1), ranking.gamma)
    log_probs = log_probs + (factor - 1.0) * eos_log_probs
  penalty = coverage_penalty(coverage, source_mask[:, None], ranking.beta)
  return log_probs / ranking.normalizer(lengths) + penalty
