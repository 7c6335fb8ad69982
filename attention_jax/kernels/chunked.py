"""Implementation 'chunked': queries in blocks, each computed again for its gradient. Memory is linear in T + S.

A block has whole rows of scores, so that every score and every alignment allows it: those that are recurrent hand
their carry from block to block. Blocks are of one sequence: T S up to BLOCK is one block, and the sequences of a batch
and their heads, which are worked through together, have one each.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention_jax.functional.attend import (
  Attended,
  Memory,
  attend_queries,
  init_carry,
  split_rng,
  zero_masked_memory,
)
from attention_jax.functional.masking import accumulation_dtype, vary_like
from attention_jax.functional.table import Row, TanhSum

BLOCK = 2**20  # scores of a block
ENTRIES = 2**24  # [T, S, F] of a block, where a score makes them


# A recurrent score may make [S, F] of every query, which must not be kept for all of them.
score_each = functools.partial(attend_queries, wrap=functools.partial(jax.checkpoint, prevent_cse=False))


def attend(
  score: Row,
  alignment: Row,
  params,
  query,
  memory: Memory,
  *,
  bias=None,
  rng=None,
  deterministic=True,
  return_weights=True,
  block: Callable = score_each,
) -> Attended:
  """As functional.attend; block(score, alignment, params, carry, xs, memory, deterministic) attends some queries."""
  memory = zero_masked_memory(memory)
  steps, size = query.shape[0], memory.key.shape[0]
  carry = init_carry(score, alignment, size, accumulation_dtype(query, memory.key))
  own_mask = memory.mask if memory.mask.ndim == 2 else None
  xs = (query, own_mask, bias, split_rng(rng, steps))

  def some(carry, xs):
    query, mask, bias, rngs = xs
    mask = jnp.broadcast_to(memory.mask if mask is None else mask, (query.shape[0], size))
    carry, attended = block(score, alignment, params, carry, (query, mask, bias, rngs), memory, deterministic)
    return carry, attended if return_weights else attended._replace(weights=None)

  rows = max(1, BLOCK // size)
  if block is score_each and isinstance(score.form, TanhSum):
    rows = max(1, min(rows, ENTRIES // (size * memory.key.shape[-1])))
  if rows >= steps:
    return some(carry, xs)[1]
  blocks = -(-steps // rows)
  rows = -(-steps // blocks)  # as even as can be: no more than blocks - 1 rows are there for nothing

  def cut(x):
    x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (blocks * rows - steps, *x.shape[1:]))])
    return x.reshape(blocks, rows, *x.shape[1:])

  one_block = jax.checkpoint(some, prevent_cse=False)
  _, attended = jax.lax.scan(one_block, vary_like(carry, params, memory, xs), jax.tree.map(cut, xs))
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:steps], attended)
