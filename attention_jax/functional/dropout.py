"""Dropout masks, and dropout on attention weights, which turns an alignment into another alignment."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Bool, Float
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.masking import Dimension
from attention_jax.functional.rngs import split_rng
from attention_jax.functional.table import Row, lookup


def keep_mask(rng: jax.Array, rate: float, shape: tuple[int, ...]) -> Bool[Array, '...']:
  """Samples a dropout mask.

  Two 32-bit words are drawn from rng, and the index of every entry is hashed with both. The mask is a function of these
  words, the rate and the shape alone, also under vmap and on any number of devices.

  Args:
    rng: a PRNG key, consumed.
    rate: the probability of False, exact to 2⁻³².
    shape: the shape of the mask.

  Returns:
    The mask, True = keep.
  """
  first, second = jax.random.bits(rng, (2,), jnp.uint32)
  index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  return _hash(_hash(index ^ first) ^ second) >= jnp.uint32(rate * 2**32)


def _hash(x: jax.Array) -> jax.Array:
  """Permutes 32-bit words so that each bit depends on all bits: lowbias32 of Wellons 2018, "Hash Prospector"."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


class WeightDropout(NamedTuple):
  """Dropout on the weights of an alignment.

  Attributes:
    fn: the alignment without dropout.
    rate: the probability that a weight is dropped.
  """

  fn: Callable
  rate: float

  def factors(self, rng: jax.Array, size: Dimension) -> Float[Array, ' S']:
    """Returns the factors of the weights of one query, each 0 or 1 / (1 - rate). Consumes rng."""
    return keep_mask(rng, self.rate, (size,)) / (1 - self.rate)


def strip_dropout(alignment: Row) -> Callable:
  """Returns the function of an alignment without dropout."""
  return alignment.dropout.fn if alignment.dropout else alignment.fn


def differs_at_test(alignment: Row) -> bool:
  """Returns whether an alignment has a test-time counterpart other than itself without dropout."""
  return alignment.at_test not in (None, strip_dropout(alignment))


def dropout_factors(
  alignment: Row, rng: jax.Array | None, num_queries: Dimension, size: Dimension
) -> Float[Array, 'T S'] | None:
  """Returns the dropout factors of all queries of one sequence, as `attend` samples them with the same rng.

  Args:
    alignment: a table row.
    rng: the rng of the sequence.
    num_queries: T.
    size: S, the number of positions.

  Returns:
    Factors, each 0 or 1 / (1 - rate); None for an alignment without dropout.
  """
  if not alignment.dropout:
    return None

  def query_factors(rng):
    _, alignment_rng = jax.random.split(rng)  # as attend_step splits it between score and alignment
    _, dropout_rng = jax.random.split(alignment_rng)  # as `dropped` in with_dropout splits it
    return alignment.dropout.factors(dropout_rng, size)

  return jax.vmap(query_factors)(split_rng(rng, num_queries))


def with_dropout(alignment: str | Row | Callable, rate: float) -> Row:
  """Adds dropout to the weights of an alignment: Srivastava et al. 2014, as in the code of Vaswani et al. 2017.

  In training each weight is 0 with probability `rate`, and is divided by 1 - rate otherwise. The context uses the
  weights after dropout, as do `previous` and `coverage` of later steps; the private state of the alignment uses those
  before dropout. The new alignment consumes the rng of its step. At test time there is no dropout.

  Args:
    alignment: a spec string, a table row or a function.
    rate: the probability that a weight is dropped.

  Returns:
    The new row; the row of `alignment` itself if `rate` is 0.

  Raises:
    UserError: for an unknown alignment or option, for a rate outside of [0, 1), and for a rate above 0 of a latent
      alignment, whose weights are probabilities.
  """
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise UserError(f'dropout on weights: rate must be at least 0 and less than 1, got {rate}')
  if not rate:
    return alignment
  if alignment.latent:
    raise UserError(
      f'dropout on weights: rate must be 0 for a latent alignment, whose weights are probabilities, got {rate}'
    )
  fn, dropout = _drop(alignment.fn, float(rate))
  return alignment._replace(fn=fn, at_test=alignment.at_test or alignment.fn, dropout=dropout)


@functools.lru_cache(256)
def _drop(fn: Callable, rate: float) -> tuple[Callable, WeightDropout]:
  """The function of an alignment with dropout; cached, so that jax compiles it once for equal arguments."""
  dropout = WeightDropout(fn, rate)
  takes_rng = 'rng' in Row(fn).required_inputs

  def dropped(scores, mask, *, rng, **options):
    fn_rng, dropout_rng = jax.random.split(rng)
    if takes_rng:
      options['rng'] = fn_rng
    result = fn(scores, mask, **options)
    weights, *state = result if isinstance(result, tuple) else (result,)
    weights = weights * dropout.factors(dropout_rng, weights.shape[0]).astype(weights.dtype)
    return (weights, *state) if state else weights

  # The signature is the schema of the new row: that of the alignment, and rng.
  parameters = [p for p in inspect.signature(fn).parameters.values() if p.name != 'rng']
  parameters.append(inspect.Parameter('rng', inspect.Parameter.KEYWORD_ONLY))
  dropped.__signature__ = inspect.Signature(parameters)
  return dropped, dropout
