"""Probabilities over the vocabulary and the words of the source: pointing, copying, and mixtures of both.

Formulas are written for one query, as scores are. ids [S] are the words of the source: below V they are words of the
vocabulary; V + s is a word that the vocabulary does not know and that stands at s for the first time. Every formula
gives log-probabilities [V + S] of the vocabulary followed by those words, float32. A word that stands at several
positions gets what all of them get. What cannot be said has the logarithm of MIN_PROBABILITY, so that losses stay finite. Weights
that do not sum to 1, as those of sigmoid or those that dropout leaves, are divided by their sum.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention_jax.functional.masking import at_least_float32, zero_masked

MIN_PROBABILITY = 1e-30

Words = Float[Array, 'W']  # W = V + S


def point(weights: Float[Array, 'S'], ids: Int[Array, 'S'], size: int, end: int) -> Words:
  """log P(y) with P(y) = Σ_{s: ids_s = y} w_s. Vinyals, Fortunato & Jaitly 2015, over words instead of positions.

  Args: size, of the vocabulary; end, the word that is said where all weights are 0.
  """
  shares, some = _shares(weights)
  return _log(_onto_words(shares, ids, size).at[end].add(1 - some))


def generate_or_copy(
  logits: Float[Array, 'V'], gate: Float[Array, ''], weights: Float[Array, 'S'], ids: Int[Array, 'S']
) -> Words:
  """log P(y) with P(y) = g softmax(logits)_y + (1 - g) Σ_{s: ids_s = y} w_s. See, Liu & Manning 2017, equation 9.

  Args: gate, g from 0 to 1; it counts as 1 where all weights are 0.
  """
  shares, some = _shares(weights)
  copied = some * (1 - gate)
  said = jnp.pad((1 - copied) * jax.nn.softmax(at_least_float32(logits)), (0, ids.shape[0]))
  return _log(said + copied * _onto_words(shares, ids, logits.shape[0]))


def generate_and_copy(
  logits: Float[Array, 'V'], scores: Float[Array, 'S'], mask: Bool[Array, 'S'], ids: Int[Array, 'S']
) -> Words:
  """log P(y) with P(y) ∝ exp(logits_y) + Σ_{s: ids_s = y} exp(scores_s): CopyNet. Gu, Lu, Li & Li 2016, section 3.2."""
  size = logits.shape[0]
  both = jnp.concatenate([at_least_float32(logits), at_least_float32(scores)])
  seen = jnp.concatenate([jnp.ones(size, bool), mask])
  top = jax.lax.stop_gradient(jnp.max(both, where=seen, initial=jnp.finfo(both.dtype).min))
  powers = zero_masked(jnp.exp(jnp.where(seen, both - top, 0.0)), seen)
  mass = jnp.pad(powers[:size], (0, ids.shape[0])) + _onto_words(powers[size:], ids, size)
  return _log(mass / powers.sum())


def emittable(log_probs: Float[Array, '... W']) -> Bool[Array, '... W']:
  """Which words can be said at all, by what the formulas above give."""
  return log_probs > math.log(MIN_PROBABILITY) + 0.1  # more than rounding, or the mean of an ensemble, takes from it


def _shares(weights: Float[Array, 'S']) -> tuple[Float[Array, 'S'], Float[Array, '']]:
  """Weights that sum to 1; and 1, or 0 where there are none to share."""
  weights = at_least_float32(weights)
  total = weights.sum()
  some = total > 0
  return jnp.where(some, weights / jnp.where(some, total, 1.0), 0.0), some.astype(weights.dtype)


def _onto_words(mass: Float[Array, 'S'], ids: Int[Array, 'S'], size: int) -> Words:
  return jnp.zeros(size + ids.shape[0], mass.dtype).at[ids].add(mass)


def _log(probs: Words) -> Words:
  return jnp.log(jnp.maximum(probs, MIN_PROBABILITY))
