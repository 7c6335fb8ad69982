"""Implementation 'factored': additive scores from exponentials of queries and of keys, in blocks of queries.

The array [T, S, F] is never materialised, neither in the forward nor in the backward pass. No transcendental function
is evaluated for its entries, except for keys of a very wide range (see tanh_sum.py). Blocks are those of 'chunked', but
without its limit MAX_BLOCK_ENTRIES. A single step of a decoder is computed by the definition's `attend_step`: its array
is [S, F], which XLA fuses away, and computing the exponentials would cost more than it saves.
"""

import functools

import jax

from attention_jax.functional.attend import (
  Problem,
  attend_from_scores,
  bias_of_queries,
  is_recurrent,
  lifted,
  scan_or_map_queries,
  score_terms,
)
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels import chunked, tanh_sum


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported, or ''."""
  if not isinstance(score.form, TanhSum):
    return 'the score is not v . tanh(q + k) with q depending on the query alone and k on the key alone'
  return ''


def attend_block(problem: Problem, carry):
  """Attends with a block of queries: all its scores by one contraction, then its weights. Returns carry, Attended.

  Arguments: see `functional.attend.attend_queries`; the score has the form TanhSum.
  """
  score, alignment, params, query, memory, bias, rngs, deterministic, *_ = problem
  q, k, v, offset = score_terms(problem)
  sizes = query.shape[0], memory.key.shape[0]
  scores = tanh_sum.scores(q, k, v, memory.mask.any_query(*sizes)) + offset

  def step(carry, xs):
    scores, query, position, mask_fields, bias, rng = xs
    rng = None if rng is None else jax.random.split(rng)[1]  # the rng of the alignment, as in attend_step
    query_memory = memory._replace(mask=memory.mask.row(mask_fields, memory.key.shape[0]))
    options = {'deterministic': deterministic, 'query_position': position, 'return_log_sum': problem.return_log_sum}
    return attend_from_scores(alignment, params, carry, scores, query, query_memory, bias=bias, rng=rng, **options)

  positions = problem.query_positions
  bias = bias_of_queries(bias, positions, sizes[1]) if callable(bias) else bias
  xs = (scores, query, positions, memory.mask.by_query(query.shape[0]), bias, rngs)
  return scan_or_map_queries(step, is_recurrent(score, alignment), carry, xs, (params, memory))


attend = functools.partial(chunked.attend, block=attend_block)
attend_batch = lifted(attend)
