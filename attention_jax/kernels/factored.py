"""Implementation 'factored': additive scores from exponentials of queries and of keys, in blocks of queries.

The array [T, S, F] never exists, in value or gradient, and no transcendental is computed for its entries: tanh_sum.py.
Blocks and their memory are those of 'chunked'. One query at a time is the definition's step: there the array is [S, F],
the compiler fuses it away, and preparing exponentials would cost more than it saves.
"""

import functools

import jax

from attention_jax.functional.attend import Memory, attend_from_scores, is_recurrent, scan_or_map_queries, score_terms
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels import chunked, tanh_sum


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Why this pair cannot be computed so; '' if it can."""
  if not isinstance(score.form, TanhSum):
    return 'the score is not v . tanh(q + k) with q of the query and k of the key alone'
  return ''


def score_together(score: Row, alignment: Row, params, carry, xs, memory: Memory, deterministic: bool):
  """The scores of a block of queries by one contraction, then its weights -> carry, Attended."""
  query, mask, bias, rngs = xs
  q, k, v, offset = score_terms(score.form.fn, params, query, memory)
  scores = tanh_sum.scores(q, k, v, mask.any(0)) + offset

  def one(carry, xs):
    scores, query, mask, bias, rng = xs
    rng = None if rng is None else jax.random.split(rng)[1]
    visible = memory._replace(mask=mask)
    return attend_from_scores(
      alignment, params, carry, scores, query, visible, bias=bias, rng=rng, deterministic=deterministic
    )

  xs = (scores, query, mask, bias, rngs)
  return scan_or_map_queries(one, is_recurrent(score, alignment), carry, xs, (params, memory))


attend = functools.partial(chunked.attend, block=score_together)
