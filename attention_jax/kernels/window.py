"""Implementation 'window': local alignments that read nothing but their window.

2 reach + 1 positions of the memory are sliced out for each query, scored, weighed and summed, so that the cost of a
query does not grow with the memory. Weights [S], where they are wanted, are zeros with the window put in.
"""

import jax
import jax.numpy as jnp

from attention_jax.functional.attend import (
  Attended,
  Carry,
  Memory,
  call_variant,
  init_carry,
  project,
  score_keys,
  zero_masked_memory,
)
from attention_jax.functional.local import unmasked_extent
from attention_jax.functional.masking import accumulation_dtype, zero_masked
from attention_jax.functional.table import LocalWindow, Row


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Why this pair cannot be computed through a window; '' if it can."""
  if not isinstance(alignment.form, LocalWindow) or alignment.at_test:
    return 'the alignment looks at the whole memory; possible: local_m, local_p'
  if not score.is_pointwise:
    return 'the score of a position needs more than its key'
  return ''


def attend_step(
  score: Row, alignment: Row, params, carry: Carry, query, memory: Memory, *, bias=None, rng=None, deterministic=True
) -> tuple[Carry, Attended]:
  """As functional.attend_step."""
  memory = _barred(memory, bias)
  attended = _look(score, alignment, params, carry, query, memory, unmasked_extent(memory.mask), bias)
  weights = attended.weights.astype(carry.previous.dtype)
  return carry._replace(previous=weights, coverage=carry.coverage + weights, step=carry.step + 1), attended


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
) -> Attended:
  """As functional.attend. The window of a query does not depend on other queries: all are attended at once."""
  memory = _barred(zero_masked_memory(memory), bias)
  steps, size = query.shape[0], memory.key.shape[0]
  carry = init_carry(score, alignment, size, accumulation_dtype(query, memory.key))
  reached = tuple(jnp.broadcast_to(x, (steps,)) for x in unmasked_extent(memory.mask))

  def one(step, query, mask, bias, reached):
    at = carry._replace(step=step)
    return _look(score, alignment, params, at, query, memory._replace(mask=mask), reached, bias)

  own_mask = 0 if memory.mask.ndim == 2 else None
  over = jax.vmap(one, in_axes=(0, 0, own_mask, None if bias is None else 0, 0))
  attended = over(jnp.arange(steps, dtype=jnp.int32), query, memory.mask, bias, reached)
  return attended if return_weights else attended._replace(weights=None)


def _look(score: Row, alignment: Row, params, carry: Carry, query, memory: Memory, reached, bias) -> Attended:
  size = memory.key.shape[0]
  step_inputs = {'query': query, 'step': carry.step}
  window, _ = call_variant(alignment.form.fn, reached, params.get('alignment', {}), step_inputs, ())
  reach = min(2 * window.reach + 1, size)
  first = jnp.ceil(window.centre - window.reach).astype(jnp.int32)
  start = jnp.clip(first, 0, size - reach)
  part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, reach)

  key, value, mask = (part(x) for x in memory)
  scores, _ = score_keys(score, project(query, params, 'query'), key, params.get('score', {}), step_inputs, ())
  if bias is not None:
    scores = scores + zero_masked(part(bias), mask).astype(scores.dtype)
  positions = (start + jnp.arange(reach)).astype(window.centre.dtype)
  weights = window.compute_weights(scores, mask, positions - window.centre)
  context = jnp.einsum('s,sv->v', weights, value.astype(weights.dtype)).astype(value.dtype)
  whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((size,), weights.dtype), weights, start, 0)
  return Attended(context, whole)


def _barred(memory: Memory, bias) -> Memory:
  """The memory masked where the bias is -inf, which the count of its positions must know."""
  return memory if bias is None else memory._replace(mask=memory.mask & ~jnp.isneginf(bias))
