"""Sparse alignments: argmax over the simplex of p·z + H_α(p), which gives exactly zero weight to small scores.

H_α is the Tsallis entropy (1 - Σ pᵅ) / (α(α - 1)); α = 1 is softmax, α = 2 sparsemax. Gradients are computed from the
output, not through the sort or the bisection: with s = p^(2 - α) on the support, ∂p/∂z = diag(s) - s sᵀ / Σ s.
"""

import math

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Float
from attention_jax.errors import UserError
from attention_jax.functional.dense import (
  NUMBERS,
  Mask,
  Scores,
  Weights,
  check_number,
  check_single_query,
  normalised,
  subtract_max,
)
from attention_jax.functional.masking import at_least_float32, vary_like


@check_single_query
def sparsemax(scores: Scores, mask: Mask) -> Weights:
  """argmin over the simplex of ‖p - z‖². Martins & Astudillo 2016, equation 2 and algorithm 1."""
  return _sparsemax(at_least_float32(scores), mask)


@check_single_query
def entmax15(scores: Scores, mask: Mask) -> Weights:
  """α-entmax with α = 1.5, exactly, by sorting. Peters, Niculae & Martins 2019, algorithm 2."""
  return _entmax15(at_least_float32(scores), mask)


@check_single_query
def entmax(scores: Scores, mask: Mask, *, alpha: float | Float[Array, '']) -> Weights:
  """α-entmax for any α > 1, by bisection: p = [(α - 1) z - τ]₊^(1/(α - 1)). Peters et al. 2019, algorithm 1.

  An alpha below 1.01 counts as 1.01. A learned one keeps its gradient there (Correia et al. 2019, proposition 1), so
  that it can increase again.

  Raises:
    UserError: for a number alpha <= 1 (softmax is the limit at 1), or one that is infinite in the dtype of the weights.
  """
  check_number('entmax', 'alpha', alpha)
  scores = at_least_float32(scores)
  if isinstance(alpha, NUMBERS):
    if not alpha > 1:
      raise UserError(f"entmax: alpha must be greater than 1, got {alpha} ('softmax' is the limit at 1)")
    if alpha > float(jnp.finfo(scores.dtype).max):
      raise UserError(f'entmax: alpha must be finite in {scores.dtype}, got {alpha}')
  alpha = jnp.asarray(alpha, scores.dtype)
  return _entmax(scores, mask, alpha + jax.lax.stop_gradient(jnp.maximum(alpha, 1.01) - alpha))


def _shifted(scores: Scores, mask: Mask) -> Scores:
  """Scores minus their maximum, and -4 where masked, which is outside of every support for α >= 1.5."""
  return jnp.where(mask, subtract_max(scores, mask), -4.0)


def _finish(weights: Weights, mask: Mask) -> Weights:
  """Sets masked weights to exact zeros, and normalises, because the threshold has a rounding error."""
  return normalised(jnp.where(mask, weights, 0.0))


def _apply_jacobian(slope: Weights, tangent: Scores) -> Weights:
  """(diag(s) - s sᵀ / Σ s) · tangent, s = slope."""
  total = jnp.sum(slope)
  return slope * (tangent - jnp.sum(slope * tangent) / jnp.where(total > 0, total, 1.0))


def _slope(weights: Weights, alpha: float | Array) -> Weights:
  """p^(2 - α) on the support, 0 elsewhere."""
  support = weights > 0
  return jnp.where(support, jnp.where(support, weights, 1.0) ** (2.0 - alpha), 0.0)


@jax.custom_jvp
def _sparsemax(scores, mask):
  z = jnp.maximum(_shifted(scores, mask), -4.0)
  ordered = jnp.sort(z, descending=True)
  rank = jnp.arange(1, z.size + 1, dtype=z.dtype)
  threshold = (jnp.cumsum(ordered) - 1.0) / rank
  tau = threshold[jnp.sum(ordered > threshold) - 1]
  return _finish(jnp.maximum(z - tau, 0.0), mask)


@jax.custom_jvp
def _entmax15(scores, mask):
  z = jnp.maximum(_shifted(scores, mask), -4.0) / 2.0
  ordered = jnp.sort(z, descending=True)
  rank = jnp.arange(1, z.size + 1, dtype=z.dtype)
  mean = jnp.cumsum(ordered) / rank
  spread = rank * (jnp.cumsum(ordered**2) / rank - mean**2)
  tau = mean - jnp.sqrt(jnp.maximum((1.0 - spread) / rank, 0.0))
  tau = tau[jnp.sum(tau <= ordered) - 1]
  return _finish(jnp.maximum(z - tau, 0.0) ** 2, mask)


@jax.custom_jvp
def _entmax(scores, mask, alpha):
  z = (alpha - 1.0) * jnp.where(mask, _shifted(scores, mask), 0.0)
  power = 1.0 / (alpha - 1.0)

  def weights_at(tau):
    above = mask & (z > tau)
    return jnp.where(above, jnp.where(above, z - tau, 1.0) ** power, 0.0)

  def halve(_, bracket):
    low, width = bracket
    width = width / 2.0
    middle = low + width
    return jnp.where(jnp.sum(weights_at(middle)) >= 1.0, middle, low), width

  # The largest score is 0 and its weight at most 1, so that τ is in [-1, 0].
  steps = 30 if scores.dtype == jnp.float32 else 60
  start = vary_like((jnp.full((), -1.0, z.dtype), jnp.ones((), z.dtype)), z, mask)
  tau, _ = jax.lax.fori_loop(0, steps, halve, start)
  return _finish(weights_at(tau), mask)


@_sparsemax.defjvp
def _(primals, tangents):
  weights = _sparsemax(*primals)
  return weights, _apply_jacobian(_slope(weights, 2.0), tangents[0])


@_entmax15.defjvp
def _(primals, tangents):
  weights = _entmax15(*primals)
  return weights, _apply_jacobian(_slope(weights, 1.5), tangents[0])


@_entmax.defjvp
def _(primals, tangents):
  alpha = primals[2]
  weights = _entmax(*primals)
  support = weights > 0
  logs = jnp.log(jnp.where(support, weights, 1.0))
  # A slope p^(2 - α) may exceed every finite number: it is computed relative to the largest one, whose root multiplies
  # the tangent before and after the Jacobian. Capped, so that tangents of moderate size have a finite product.
  smallest = jnp.min(jnp.where(support, logs, 0.0))
  largest = jnp.max(jnp.where(support, logs, -jnp.inf), initial=smallest)
  at_top = jax.lax.stop_gradient(jnp.where(alpha > 2.0, smallest, largest))
  slope = jnp.where(support, jnp.exp((2.0 - alpha) * (logs - at_top)), 0.0)
  root = jnp.exp(jnp.minimum((1.0 - alpha / 2.0) * at_top, math.log(jnp.finfo(weights.dtype).max) / 2 - 1))
  total = jnp.sum(slope)
  share = slope / jnp.where(total > 0, total, 1.0)
  entropy = jnp.where(support, -weights * logs, 0.0)
  alpha_slope = (weights - share) / (alpha - 1.0) ** 2 + (entropy - share * jnp.sum(entropy)) / (alpha - 1.0)
  return weights, root * _apply_jacobian(slope, root * tangents[0]) + alpha_slope * tangents[2]
