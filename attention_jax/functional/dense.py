"""Alignments that look at the whole memory: softmax and its relatives. Their table is ALIGNMENTS in alignments.py."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.errors import UserError
from attention_jax.functional.masking import at_least_float32, min_finite

Scores = Float[Array, 'S']
Mask = Bool[Array, 'S']
Weights = Float[Array, 'S']


def check_single_query(alignment: Callable) -> Callable:
  """An alignment that raises UserError for anything but scores [S] and mask [S], instead of mixing queries."""

  @functools.wraps(alignment)
  def checked(scores, mask, *state, **options):
    if jnp.ndim(scores) != 1 or jnp.shape(mask) != jnp.shape(scores):
      raise UserError(
        f'{alignment.__name__}: scores and mask are those of one query, [S] both, got {list(jnp.shape(scores))} and '
        f'{list(jnp.shape(mask))}; for more, jax.vmap of it, or attend'
      )
    return alignment(scores, mask, *state, **options)

  return checked


@check_single_query
def softmax(scores: Scores, mask: Mask, *, temperature: float | Float[Array, ''] = 1.0) -> Weights:
  """wₛ = exp(eₛ/τ) / Σ exp(e/τ). Bahdanau, Cho & Bengio 2015, equation 6.

  Raises: UserError unless temperature > 0.
  """
  check_temperature('softmax', temperature)
  scores = at_least_float32(scores)
  scores = scores / jnp.asarray(temperature, scores.dtype)
  top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, scores, min_finite(scores.dtype))))
  # Double where: exp must not see what stands behind the mask, or 0 · inf would make its gradient NaN.
  return normalised(jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0))


def strip_options(fn: Callable) -> Callable:
  """The function of an alignment behind its options."""
  return fn.func if isinstance(fn, functools.partial) and not fn.args else fn


def softmax_temperature(fn: Callable) -> float | Float[Array, '']:
  """The temperature of a softmax with options. Raises: UserError unless it is greater than 0."""
  temperature = getattr(fn, 'keywords', {}).get('temperature', 1.0)
  check_temperature('softmax', temperature)
  return temperature


@check_single_query
def sigmoid(scores: Scores, mask: Mask) -> Weights:
  """wₛ = 1 / (1 + exp(-eₛ)): every position by itself, the weights need not sum to 1."""
  return jnp.where(mask, jax.nn.sigmoid(jnp.where(mask, at_least_float32(scores), 0.0)), 0.0)


@check_single_query
def smoothed(scores: Scores, mask: Mask) -> Weights:
  """wₛ = σ(eₛ) / Σ σ(e): bounded, so that several positions share. Chorowski et al. 2015 (smoothing)."""
  # In logs: where all scores are low, their sigmoids must not vanish before they are divided.
  logs = jax.nn.log_sigmoid(jnp.where(mask, at_least_float32(scores), 0.0))
  return softmax(logs, mask)


@check_single_query
def hardmax(scores: Scores, mask: Mask) -> Weights:
  """1 at the largest score (the first of equals), 0 elsewhere; no gradient."""
  scores = jnp.where(mask, at_least_float32(scores), -jnp.inf)
  return jnp.where(mask, jax.nn.one_hot(jnp.argmax(scores), scores.size, dtype=scores.dtype), 0.0)


@check_single_query
def coverage_penalised(
  scores: Scores, mask: Mask, *, coverage: Float[Array, 'S'], penalty: float | Float[Array, ''] = 1.0
) -> Weights:
  """softmax(eₛ - λ cₛ): what has been attended to (its weights so far sum to cₛ) is attended to less.

  Raises: UserError for a negative penalty.
  """
  check_at_least('coverage_penalised', 'penalty', penalty, 0)
  scores = at_least_float32(scores)
  return softmax(scores - penalty * coverage.astype(scores.dtype), mask)


def normalised(weights: Weights) -> Weights:
  """Weights divided by their sum; zeros stay zeros."""
  total = jnp.sum(weights)
  return weights / jnp.where(total > 0, total, 1.0)


def log_softmax(scores: Scores, mask: Mask) -> Scores:
  """Logs of the softmax weights; 0 where masked."""
  scores = at_least_float32(scores)
  top = jax.lax.stop_gradient(jnp.max(jnp.where(mask, scores, min_finite(scores.dtype))))
  shifted = jnp.where(mask, scores - top, 0.0)
  total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0.0))
  return jnp.where(mask, shifted - jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)


def check_temperature(name: str, temperature) -> None:
  """Raises UserError for a number that is no temperature; a learned one cannot be looked at here."""
  if isinstance(temperature, int | float) and not temperature > 0:
    raise UserError(f"{name}: temperature must be greater than 0, got {temperature} ('hardmax' is the limit at 0)")


def check_at_least(name: str, option: str, value, least: float) -> None:
  """Raises UserError for a number below the least possible."""
  if isinstance(value, int | float) and not value >= least:
    raise UserError(f'{name}: {option} must be at least {least}, got {value}')
