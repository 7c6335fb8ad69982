"""Output distributions over the vocabulary and the words of the source, for output layers that copy.

As with scores, every formula is written for one query. V is the size of the vocabulary and S the number of source
positions. The source is given by ids [S]: an id below V is a word of the vocabulary; V + s is an out-of-vocabulary word
that occurs at position s for the first time. Every formula returns log-probabilities [V + S] of these ids, at least
float32. The probability of a word is summed over all its positions.

Words that cannot be emitted get log(MIN_PROBABILITY), so that losses stay finite. Weights that do not sum to 1, such as
those of sigmoid or those that remain after dropout, are divided by their sum.
"""

import math

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Bool, Float, Int
from attention_jax.functional.dense import subtract_max
from attention_jax.functional.masking import at_least_float32, zero_masked

MIN_PROBABILITY = 1e-30

WordValues = Float[Array, ' W']  # W = V + S


def point(weights: Float[Array, ' S'], ids: Int[Array, ' S'], size: int, end: int) -> WordValues:
  """log P(y) with P(y) = Σ_{s: ids_s = y} w_s. Vinyals, Fortunato & Jaitly 2015, over words instead of positions.

  Args:
    weights: w.
    ids: the source.
    size: V, the size of the vocabulary.
    end: id of EOS, which has probability 1 if all weights are 0.

  Returns:
    Log-probabilities [V + S].
  """
  shares, copy_mass = _normalise(weights)
  return _log(_sum_by_word(shares, ids, size).at[end].add(1 - copy_mass))


def generate_or_copy(
  logits: Float[Array, ' V'], gate: Float[Array, ''], weights: Float[Array, ' S'], ids: Int[Array, ' S']
) -> WordValues:
  """log P(y) with P(y) = g softmax(logits)_y + (1 - g) Σ_{s: ids_s = y} w_s. See, Liu & Manning 2017, equation 9.

  Args:
    logits: unnormalised log-probabilities of the vocabulary.
    gate: g, from 0 to 1; it counts as 1 if all weights are 0.
    weights: w.
    ids: the source.

  Returns:
    Log-probabilities [V + S].
  """
  shares, copy_mass = _normalise(weights)
  # Not 1 - (1 - gate), which is 0, without a gradient, for a gate that is not.
  generating = jnp.where(copy_mass > 0, at_least_float32(gate), 1.0)
  generated = jnp.pad(generating * jax.nn.softmax(at_least_float32(logits)), (0, ids.shape[0]))
  return _log(generated + (1 - generating) * _sum_by_word(shares, ids, logits.shape[0]))


def generate_and_copy(
  logits: Float[Array, ' V'], scores: Float[Array, ' S'], mask: Bool[Array, ' S'], ids: Int[Array, ' S']
) -> WordValues:
  """log P(y) with P(y) ∝ exp(logits_y) + Σ_{s: ids_s = y} exp(scores_s): CopyNet. Gu, Lu, Li & Li 2016, section 3.2.

  Args:
    logits: unnormalised log-probabilities of the vocabulary.
    scores: unnormalised log-probabilities of copying each position.
    mask: True = may be copied.
    ids: the source.

  Returns:
    Log-probabilities [V + S].
  """
  size = logits.shape[0]
  joint = jnp.concatenate([at_least_float32(logits), at_least_float32(scores)])
  joint_mask = jnp.concatenate([jnp.ones(size, bool), mask])
  exponentials = zero_masked(jnp.exp(subtract_max(joint, joint_mask)), joint_mask)
  mass = jnp.pad(exponentials[:size], (0, ids.shape[0])) + _sum_by_word(exponentials[size:], ids, size)
  return _log(mass / exponentials.sum())


def emittable(log_probs: Float[Array, '... W']) -> Bool[Array, '... W']:
  """Returns which words can be emitted, from log-probabilities of one of the formulas above."""
  # The margin covers rounding, and averaging over an ensemble.
  return log_probs > math.log(MIN_PROBABILITY) + 0.1


def _normalise(weights: Float[Array, ' S']) -> tuple[Float[Array, ' S'], Float[Array, '']]:
  """Returns the weights divided by their sum, and 1; if all weights are 0, zeros and 0."""
  weights = at_least_float32(weights)
  total = weights.sum()
  has_weight = total > 0
  return jnp.where(has_weight, weights / jnp.where(has_weight, total, 1.0), 0.0), has_weight.astype(weights.dtype)


def _sum_by_word(mass: Float[Array, ' S'], ids: Int[Array, ' S'], size: int) -> WordValues:
  return jnp.zeros(size + ids.shape[0], mass.dtype).at[ids].add(mass)


def _log(probs: WordValues) -> WordValues:
  return jnp.log(jnp.maximum(probs, MIN_PROBABILITY))
