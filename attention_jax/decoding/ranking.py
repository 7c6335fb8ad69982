"""What finished hypotheses are ranked by."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from attention_jax.specs import Range, check_fields

MIN_COVERAGE = 1e-6  # what less attention than this counts as in the coverage penalty, whose logarithm stays finite


@dataclasses.dataclass(frozen=True)
class Ranking:
  """What finished hypotheses are ranked by: s(Y, X) = log P(Y|X) / lp(Y) + cp(X; Y). Wu et al. 2016, equation 14.

  With end-of-sentence normalisation log P(Y|X) counts the log-probability of EOS `eos_factor` times. Beams that go on
  are ranked by log P alone.

  Attributes:
    alpha: of the length penalty lp; 0 is none.
    beta: of the coverage penalty cp; 0 is none.
    gamma: of the end-of-sentence normalisation; 0 is none.

  Raises: UserError for numbers below 0 or so large that float32 could not hold the scores of long outputs.
  """

  alpha: Annotated[float, Range(0, 10)] = 0.6
  beta: Annotated[float, Range(0, 10_000)] = 0.0
  gamma: Annotated[float, Range(0, 10_000)] = 0.0

  def __post_init__(self):
    check_fields(self, 'ranking')


DEFAULT_RANKING = Ranking()


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array:
  """((5 + |Y|) / 6)^α. Wu et al. 2016, equation 14."""
  return ((5.0 + length) / 6.0) ** alpha


def coverage_penalty(coverage: jax.Array, source_mask: jax.Array, beta: float) -> jax.Array:
  """β Σᵢ log(min(Σⱼ pᵢⱼ, 1)) of coverage [..., S] -> [...]. Wu et al. 2016, equation 14.

  The coverage Σⱼ pᵢⱼ is all the attention that position i got, from the step that chose EOS too. Less than MIN_COVERAGE
  counts as MIN_COVERAGE, so that a position without any costs 13.8 β and not everything: alignments may give exact zeros.
  """
  seen = jnp.log(jnp.clip(coverage, MIN_COVERAGE, 1.0))
  return beta * jnp.sum(jnp.where(source_mask, seen, 0.0), axis=-1)


def eos_factor(source_length: jax.Array, length: jax.Array | int, gamma: float) -> jax.Array:
  """γ |X| / |Y|, by which the log-probability of EOS is multiplied: the shorter the output, the dearer its end.

  This is the option -eos_norm of OpenNMT (Klein et al. 2017) in Lua, as its program (onmt/translate/Beam.lua) computes
  it; the manual calls the factor itself the penalty of EOS. A γ below |Y| / |X| makes ending cheaper, not dearer.
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
  """What hypotheses [B, K] with these log-probabilities, in all and of their EOS, and coverage [B, K, S] rank by."""
  if ranking.gamma:
    sources = source_mask.sum(-1)[:, None]
    # Filler rows have no length.
    log_probs = log_probs + (eos_factor(sources, jnp.maximum(lengths, 1), ranking.gamma) - 1.0) * eos_log_probs
  penalty = coverage_penalty(coverage, source_mask[:, None], ranking.beta)
  return log_probs / length_penalty(lengths, ranking.alpha) + penalty
