"""Dropout on weights, as one more alignment made of any other."""

import inspect

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.table import Row


def with_dropout(alignment: Row, rate: float) -> Row:
  """`alignment` whose weights are 0 with probability `rate` and divided by 1 - rate otherwise; at test it is itself.

  Srivastava et al. 2014, on the weights of attention as in the program of Vaswani et al. 2017. The context is made with
  the weights that are left, and later steps are told of those. It consumes the rng of its step.

  Raises: UserError for a rate outside of [0, 1), and for a latent alignment, whose weights are probabilities.
  """
  if not 0 <= rate < 1:
    raise UserError(f'dropout on weights: rate={rate}; possible: from 0 to below 1')
  if not rate:
    return alignment
  if alignment.latent:
    raise UserError('dropout on weights: those of a latent alignment are probabilities that are summed over')

  def dropped(scores, mask, *, rng, **given):
    own, mine = jax.random.split(rng)
    found = alignment.fn(scores, mask, **given, **({'rng': own} if 'rng' in alignment.needs else {}))
    weights, *state = found if isinstance(found, tuple) else (found,)
    weights = jnp.where(jax.random.bernoulli(mine, 1 - rate, weights.shape), weights / (1 - rate), 0.0)
    return (weights, *state) if state else weights

  asked = [p for p in inspect.signature(alignment.fn).parameters.values() if p.name != 'rng']
  rng = inspect.Parameter('rng', inspect.Parameter.KEYWORD_ONLY)
  dropped.__signature__ = inspect.Signature([*asked, rng])
  return alignment._replace(fn=dropped, at_test=alignment.at_test or alignment.fn, window=None)
