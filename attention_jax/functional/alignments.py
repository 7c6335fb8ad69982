"""Alignments: maps from scores [S] and a mask [S] (True = may be attended to) to weights [S].

Weights are float32 (float64 for float64 scores), exactly 0 where masked, and all 0 when everything is masked.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.errors import UserError
from attention_jax.functional.masking import at_least_float32, lowest
from attention_jax.functional.sparse import entmax, entmax15, sparsemax
from attention_jax.functional.table import Param, Row, check

Scores = Float[Array, 'S']
Mask = Bool[Array, 'S']
Weights = Float[Array, 'S']


def softmax(scores: Scores, mask: Mask, *, temperature: float = 1.0) -> Weights:
  """wₛ = exp(eₛ/τ) / Σ exp(e/τ). Bahdanau, Cho & Bengio 2015, equation 6.

  Raises: UserError unless temperature > 0.
  """
  if isinstance(temperature, int | float) and not temperature > 0:
    raise UserError(f"softmax: temperature must be greater than 0, got {temperature} ('hardmax' is the limit at 0)")
  scores = at_least_float32(scores) / temperature
  top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, scores, lowest(scores.dtype))))
  # Double where: exp must not see what stands behind the mask, or 0 · inf would make its gradient NaN.
  exponentials = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
  total = jnp.sum(exponentials)
  return exponentials / jnp.where(total > 0, total, 1.0)


def sigmoid(scores: Scores, mask: Mask) -> Weights:
  """wₛ = 1 / (1 + exp(-eₛ)): every position by itself, the weights need not sum to 1."""
  return jnp.where(mask, jax.nn.sigmoid(jnp.where(mask, at_least_float32(scores), 0.0)), 0.0)


def hardmax(scores: Scores, mask: Mask) -> Weights:
  """1 at the largest score (the first of equals), 0 elsewhere; no gradient."""
  scores = jnp.where(mask, at_least_float32(scores), -jnp.inf)
  return jnp.where(mask, jax.nn.one_hot(jnp.argmax(scores), scores.size, dtype=scores.dtype), 0.0)


ALIGNMENTS = check(
  {
    'softmax': Row(softmax),
    'sigmoid': Row(sigmoid),
    'sparsemax': Row(sparsemax),
    'entmax15': Row(entmax15),
    'entmax': Row(entmax, params={'alpha': Param((), 1.5)}),
    'hardmax': Row(hardmax),
  }
)

__all__ = ['ALIGNMENTS', 'entmax', 'entmax15', 'hardmax', 'sigmoid', 'softmax', 'sparsemax']
