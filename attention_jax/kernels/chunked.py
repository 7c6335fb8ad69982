"""Implementation 'chunked': computes attention in blocks of queries, and recomputes each block for its gradient.

Storage is linear in T + S unless weights are returned or a bias or a mask per query is passed; each of these is
[T, S]. The gradient of a recurrent score or alignment also stores one carry for each block. A block has complete rows
of scores, so that every score and every alignment is supported: recurrent ones pass their carry from block to block.

Block sizes apply to one sequence. A block has at most MAX_BLOCK_SCORES scores. For a TanhSum, its array
[queries, S, F] also has at most MAX_BLOCK_ENTRIES entries; this limit does not apply to 'factored', which has its own
block function. A block of a single query may exceed both limits. With symbolic sizes, a block has at most
SYMBOLIC_BLOCK queries instead. The sequences of a batch and their heads are computed together, one block of each at a
time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from attention_jax.functional.attend import (
  Attended,
  Problem,
  attend_queries,
  init_carry,
  lifted,
  score_terms,
  zero_masked_memory,
)
from attention_jax.functional.mask import split_blocks
from attention_jax.functional.masking import accumulation_dtype, share_over_steps, vary_like
from attention_jax.functional.rngs import split_rng
from attention_jax.functional.table import TanhSum
from attention_jax.kernels.symbolic import has_symbolic_sizes

MAX_BLOCK_SCORES = 2**20  # maximum number of scores in a block
MAX_BLOCK_ENTRIES = 2**24  # maximum size of a block's array [T, S, F], for a TanhSum
SYMBOLIC_BLOCK = 128  # queries of a block if the number of queries or of positions is symbolic


# A recurrent score may compute an array [S, F] per query, which must not be stored for all queries.
attend_block = functools.partial(attend_queries, wrap=functools.partial(jax.checkpoint, prevent_cse=False))


def attend(problem: Problem, block: Callable = attend_block) -> Attended:
  """Attends block by block.

  Args:
    problem: all queries of one sequence.
    block: (problem, carry) -> carry, Attended; computes a block of queries, see `functional.attend.attend_queries`.

  Returns:
    Contexts [T, V], and weights [T, S], or None without `return_weights`.
  """
  memory = zero_masked_memory(problem.memory, problem.query.shape[0])
  problem = problem._replace(score=problem.score.with_fast_gradient, memory=memory)
  score, alignment, params, query, memory, bias, rng, *_ = problem
  num_queries = query.shape[0]
  size = memory.key.shape[0]
  carry = init_carry(score, alignment, size, accumulation_dtype(query, memory.key))
  is_function = callable(bias)
  xs = (query, problem.query_positions, None if is_function else bias, split_rng(rng, num_queries))

  def run_block(params, memory, carry, mask_fields, xs):
    query, positions, bias_rows, rngs = xs
    memory = memory._replace(mask=dataclasses.replace(memory.mask, **mask_fields))
    fields = {'params': params, 'query': query, 'memory': memory, 'rng': rngs, 'query_position': positions}
    block_bias = bias if is_function else bias_rows
    carry, attended = block(problem._replace(**fields, bias=block_bias), carry)
    return carry, attended if problem.return_weights else attended._replace(weights=None)

  if has_symbolic_sizes(problem):
    block_queries = SYMBOLIC_BLOCK
  else:
    block_queries = max(1, MAX_BLOCK_SCORES // size)
    if block is attend_block and isinstance(score.form, TanhSum):
      # F of the array [T, S, F]; for `concat` it may differ from the width of the key.
      width = jax.eval_shape(lambda: score_terms(problem))[1].shape[-1]
      block_queries = max(1, min(block_queries, MAX_BLOCK_ENTRIES // (size * width)))
    if block_queries >= num_queries:
      return run_block(params, memory, carry, {}, xs)[1]
  num_blocks = -(-num_queries // block_queries)
  block_queries = -(-num_queries // num_blocks)  # nearly equal blocks: at most num_blocks - 1 queries are padding

  get_shared = share_over_steps((params, memory))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def recomputed_block(carry, xs):
    return run_block(*get_shared(), carry, *xs)

  start = vary_like(carry, params, memory, xs)
  blocks = jax.tree.map(lambda x: split_blocks(x, num_blocks, block_queries), xs)
  mask_blocks = memory.mask.by_block(num_blocks, block_queries)
  _, attended = jax.lax.scan(recomputed_block, start, (mask_blocks, blocks))
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_queries], attended)


attend_batch = lifted(attend)
