"""Dropout: which numbers are kept, and dropout on weights, as one more alignment made of any other."""

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.attend import split_rng
from attention_jax.functional.table import Row, lookup


def keep_mask(rng: jax.Array, rate: float, shape: tuple[int, ...]) -> Bool[Array, '...']:
  """True with probability 1 - rate, to 2^-32. Consumes rng.

  Two words are drawn from rng, and every position of the array is hashed with both; so what is kept is the same under
  vmap, and on however many devices.
  """
  first, second = jax.random.bits(rng, (2,), jnp.uint32)
  at = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  return _scrambled(_scrambled(at ^ first) ^ second) >= jnp.uint32(rate * 2**32)


def _scrambled(x: jax.Array) -> jax.Array:
  """A permutation of 32-bit words, each of whose bits depends on all: lowbias32 of Wellons 2018, "Hash Prospector"."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


class WeightDropout(NamedTuple):
  """What a row made by `with_dropout` is made of: the function whose weights it drops, and how many of them."""

  fn: Callable
  rate: float

  def factors(self, rng: jax.Array, size: int) -> Float[Array, 'S']:
    """For each weight 0, or 1 / (1 - rate). Consumes rng."""
    return keep_mask(rng, self.rate, (size,)) / (1 - self.rate)


def strip_dropout(alignment: Row) -> Callable:
  """The function of an alignment, without dropout."""
  return alignment.dropout.fn if alignment.dropout else alignment.fn


def differs_at_test(alignment: Row) -> bool:
  """Whether it is another function at test time, dropout aside."""
  return alignment.at_test not in (None, strip_dropout(alignment))


def dropout_factors(alignment: Row, rng: jax.Array | None, steps: int, size: int) -> Float[Array, 'T S'] | None:
  """What the weights of all queries of one sequence are multiplied by; None for an alignment without dropout.

  The same numbers as `attend` draws from the same rng.
  """
  if not alignment.dropout:
    return None

  def of_query(rng):
    _, of_alignment = jax.random.split(rng)  # as attend_step has them for the score and for the alignment,
    _, mine = jax.random.split(of_alignment)  # and `dropped` for what it drops weights of and for itself
    return alignment.dropout.factors(mine, size)

  return jax.vmap(of_query)(split_rng(rng, steps))


def with_dropout(alignment: str | Row | Callable, rate: float) -> Row:
  """`alignment` whose weights are 0 with probability `rate` and divided by 1 - rate otherwise; at test it is itself.

  Srivastava et al. 2014, on the weights of attention as in the program of Vaswani et al. 2017. The context is made with
  the weights that are left, and later steps are told of those. It consumes the rng of its step.

  Args: alignment, as in `attend`.
  Raises: UserError for a rate outside of [0, 1), and for a latent alignment, whose weights are probabilities.
  """
  alignment = lookup(alignment, ALIGNMENTS, 'alignment')
  if not 0 <= rate < 1:
    raise UserError(f'dropout on weights: rate={rate}; possible: from 0 to below 1')
  if not rate:
    return alignment
  if alignment.latent:
    raise UserError('dropout on weights: those of a latent alignment are probabilities that are summed over')

  dropout = WeightDropout(alignment.fn, rate)

  def dropped(scores, mask, *, rng, **given):
    own, mine = jax.random.split(rng)
    found = alignment.fn(scores, mask, **given, **({'rng': own} if 'rng' in alignment.required_inputs else {}))
    weights, *state = found if isinstance(found, tuple) else (found,)
    weights = weights * dropout.factors(mine, len(weights)).astype(weights.dtype)
    return (weights, *state) if state else weights

  asked = [p for p in inspect.signature(alignment.fn).parameters.values() if p.name != 'rng']
  rng = inspect.Parameter('rng', inspect.Parameter.KEYWORD_ONLY)
  dropped.__signature__ = inspect.Signature([*asked, rng])
  return alignment._replace(fn=dropped, at_test=alignment.at_test or alignment.fn, form=None, dropout=dropout)
