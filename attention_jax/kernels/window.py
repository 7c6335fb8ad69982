"""Implementation 'window': local alignments that read only the positions inside their window.

For each query, at most 2 D + 1 positions of the memory are sliced out, scored, weighted and summed, where D
(`Window.reach`) is the greatest distance from the centre of the window: the cost of the scores and the context does not
grow with the memory. Weights [S], where requested and always in `attend_step`, are zeros with the weights of the window
inserted.
"""

import jax
import jax.numpy as jnp

from attention_jax.functional.attend import (
  Attended,
  Carry,
  Memory,
  Problem,
  bias_of_queries,
  call_variant,
  init_carry,
  lifted,
  project,
  score_keys,
  zero_masked_memory,
)
from attention_jax.functional.local import unmasked_extent
from attention_jax.functional.masking import accumulation_dtype, zero_masked
from attention_jax.functional.table import LocalWindow, Row
from attention_jax.kernels.symbolic import require_fixed_sizes


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported, or ''."""
  if not isinstance(alignment.form, LocalWindow) or alignment.at_test or alignment.dropout:
    return 'the alignment is not local_m or local_p, or dropout or an edit changes its weights'
  if not score.is_pointwise:
    return 'the score of a position may depend on more than the query and the key of that position'
  return ''


def attend_step(
  score: Row,
  alignment: Row,
  params,
  carry: Carry,
  query,
  memory: Memory,
  *,
  bias=None,
  rng=None,
  deterministic=True,
  query_position=None,
) -> tuple[Carry, Attended]:
  """Attends with one query. Same arguments as `functional.attend.attend_step`."""
  memory = _mask_infinite_bias(memory, bias)
  extent = unmasked_extent(memory.mask)
  attended = _attend_window(score, alignment, params, carry, query, memory, extent, bias)
  weights = attended.weights.astype(carry.previous.dtype)
  return carry._replace(previous=weights, coverage=carry.coverage + weights, step=carry.step + 1), attended


def attend(problem: Problem) -> Attended:
  """Attends with all queries at once: the window of a query depends on no other query, so that nothing is scanned."""
  require_fixed_sizes('window', problem)
  score, alignment, params, query, memory, bias, *_ = problem
  steps = query.shape[0]
  size = memory.key.shape[0]
  bias = bias_of_queries(bias, problem.query_positions, size) if callable(bias) else bias
  mask = memory.mask.dense(1 if memory.mask.is_shared else steps, size)
  mask = mask[0] if memory.mask.is_shared else mask
  memory = _mask_infinite_bias(zero_masked_memory(memory, steps)._replace(mask=mask), bias)
  carry = init_carry(score, alignment, size, accumulation_dtype(query, memory.key))
  extents = tuple(jnp.broadcast_to(x, (steps,)) for x in unmasked_extent(memory.mask))

  def attend_one(step, query, mask, bias, extent):
    step_memory = memory._replace(mask=mask)
    return _attend_window(score, alignment, params, carry._replace(step=step), query, step_memory, extent, bias)

  mask_axis = 0 if memory.mask.ndim == 2 else None
  bias_axis = None if bias is None else 0
  attend_each = jax.vmap(attend_one, in_axes=(0, 0, mask_axis, bias_axis, 0))
  attended = attend_each(jnp.arange(steps, dtype=jnp.int32), query, memory.mask, bias, extents)
  return attended if problem.return_weights else attended._replace(weights=None)


attend_batch = lifted(attend)


def _attend_window(score: Row, alignment: Row, params, carry: Carry, query, memory: Memory, extent, bias) -> Attended:
  """Attends with one query to its window; `extent` is that of the unmasked positions of the whole memory."""
  size = memory.key.shape[0]
  step_inputs = {'query': query, 'step': carry.step}
  window, _ = call_variant(alignment.form.fn, extent, params.get('alignment', {}), step_inputs, ())
  width = min(2 * window.reach + 1, size)
  first = jnp.ceil(window.centre - window.reach).astype(jnp.int32)
  start = jnp.clip(first, 0, size - width)

  def slice_window(x):
    return jax.lax.dynamic_slice_in_dim(x, start, width)

  key, value, mask, *_ = jax.tree.map(slice_window, memory)
  scores, _ = score_keys(score, project(query, params, 'query'), key, params.get('score', {}), step_inputs, ())
  if bias is not None:
    scores = scores + zero_masked(slice_window(bias), mask).astype(scores.dtype)
  positions = (start + jnp.arange(width)).astype(window.centre.dtype)
  weights = window.compute_weights(scores, mask, positions - window.centre)
  context = jnp.einsum('s,sv->v', weights, value.astype(weights.dtype)).astype(value.dtype)
  all_weights = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((size,), weights.dtype), weights, start, 0)
  return Attended(context, all_weights)


def _mask_infinite_bias(memory: Memory, bias) -> Memory:
  """Masks positions where the bias is -inf: the extent of the unmasked positions depends on them."""
  return memory if bias is None else memory._replace(mask=memory.mask & ~jnp.isneginf(bias))
