"""Attention as products q · k with a form of softmax, for kernels that take all sequences and heads at once."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from attention_jax.errors import UserError
from attention_jax.functional import attend as definition
from attention_jax.functional.attend import (
  Attended,
  Memory,
  Problem,
  bias_of_queries,
  bias_of_query,
  call_variant,
  score_terms,
  zero_masked_memory,
)
from attention_jax.functional.dense import clamp_to_finite
from attention_jax.functional.lifting import Axes, lift
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import accumulation_dtype, zero_masked
from attention_jax.functional.table import POSITIONS


class Products(NamedTuple):
  """Softmax of q kᵀ and a bias over unmasked positions, times v. Leading axes have length 1 where they are shared.

  Attributes:
    q: [..., T, D], multiplied by the scale of the alignment, of the type in which sums are computed.
    k: [..., S, D], with zeros where no query attends, likewise.
    v: [..., S, V], likewise.
    mask: the mask.
    bias: [..., T, S] or None, multiplied by the scale; -inf where it masks. For a bias that is a function of positions
      a Partial of (indices of queries [Q], positions of keys [K]) -> [Q, K], likewise.
    transform, sink: those of the alignment's SoftmaxTerms, with the leading axes.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  mask: Mask
  bias: jax.Array | Partial | None
  transform: Partial | None
  sink: jax.Array | None


def products_of(problem: Problem, axes: Axes) -> Products:
  """Reduces a problem whose score is a Product and whose alignment is a SoftmaxForm.

  Raises:
    UserError: for a temperature that is a number but not positive, and a transform that is not a Partial.
  """
  num_queries, size = problem.query.shape[-2], problem.memory.key.shape[-2]
  memory = zero_masked_memory(problem.memory, num_queries)
  params = {name: value for name, value in problem.params.items() if name != 'alignment'}

  # Queries have the positions of the mask, whose leaves would otherwise only add axes to q.
  takes_positions = problem.score.required_inputs & POSITIONS
  positions = Mask(offset=memory.mask.offset) if takes_positions else Mask()

  def terms(params, query, key, mask):
    return score_terms(problem._replace(params=params, query=query, memory=Memory(key, key, mask)))

  q = lift(lambda *operands: terms(*operands)[0], axes, params, problem.query, memory.key, positions)
  # Heads share the factor of a key unless the score has parameters of its own for each of them.
  width = params.pop('query', problem.query).shape[-1]
  no_query = jnp.zeros((*(1 for _ in axes), 1, width), problem.query.dtype)
  k = lift(lambda *operands: terms(*operands)[1], axes, params, no_query, memory.key, Mask())

  dtype = accumulation_dtype(q, k, memory.value)
  bias = problem.bias

  def softmax_terms(params, mask):
    counts = mask.dense(num_queries, size).sum(-1).astype(dtype)
    terms, _ = call_variant(problem.alignment.form.fn, (counts,), params, {}, ())
    if not isinstance(terms.transform, Partial | None):
      raise UserError(
        f'attend: the transform of an alignment must be a jax.tree_util.Partial or None, got {terms.transform}'
      )
    terms = terms._replace(scale=jnp.broadcast_to(terms.scale, (num_queries,)))
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), terms)

  counted, offset = memory.mask, Mask(offset=memory.mask.offset)
  if callable(bias):  # computed here for the counts alone, which most alignments do not use
    array = lift(lambda f, mask: bias_of_queries(f, mask.query_positions(num_queries), size), axes, bias, offset)
    counted = counted & ~jnp.isneginf(array)
  elif bias is not None:
    counted = counted & ~jnp.isneginf(bias)
  scale, transform, sink = lift(softmax_terms, axes, problem.params.get('alignment', {}), counted)
  if callable(bias):
    bias = Partial(functools.partial(_scaled_bias, size), bias, scale, offset)
  scale = scale[..., None]
  if bias is not None and not callable(bias):
    scaled = clamp_to_finite(zero_masked(bias, ~jnp.isneginf(bias)).astype(dtype)) * scale
    bias = jnp.where(jnp.isneginf(bias), -jnp.inf, clamp_to_finite(scaled))  # the scale may be 0
  return Products(q.astype(dtype) * scale, k.astype(dtype), memory.value, memory.mask, bias, transform, sink)


def _scaled_bias(
  size: int, bias: Partial, scale: jax.Array, offset: Mask, queries: jax.Array, keys: jax.Array
) -> jax.Array:
  """The scaled bias [Q, K] of one sequence that a function of positions computes, -inf where it masks.

  Args:
    size: S.
    bias: the function.
    scale: factor of the scores of each query, [T].
    offset: a mask with the offset of the queries.
    queries, keys: indices of queries [Q] and of keys [K]; those that are padding have the bias of the last one.
  """
  queries, keys = jnp.minimum(queries, scale.shape[0] - 1), jnp.minimum(keys, size - 1)
  first = 0 if offset.offset is None else offset.offset
  values = jax.vmap(lambda position: bias_of_query(bias, position, keys))(first + queries)
  scales = scale[queries][:, None]
  is_allowed = ~jnp.isneginf(values)
  scaled = clamp_to_finite(zero_masked(values, is_allowed).astype(scale.dtype)) * scales
  return jnp.where(is_allowed, clamp_to_finite(scaled), -jnp.inf)


def beyond_contexts(problem: Problem) -> str:
  """Returns the reason why a kernel that computes contexts with biases that are arrays does not suffice, or ''."""
  if callable(problem.bias):
    return 'the bias is a function of positions'
  return 'the kernel does not return the log of the sum' if problem.return_log_sum else ''


def merge_axes(products: Products, axes: Axes) -> tuple[Products, Callable[[jax.Array], jax.Array]]:
  """Merges the leading axes into two: B sequences, and their heads, which have the same mask.

  Returns:
    q [B, N, T, D], k [B, G, S, D] and v [B, G, S, V], where N / G successive heads share keys and values; the mask,
    whose leaves have an axis B; bias [B, N, T, S]; and sink [B, N]; but not the transform. B may be 1 where sequences
    share an array, and N for a bias that heads share. And a function that splits the axes of a context [B, N, T, V].
  """
  rank = len(axes)
  # The innermost axes along which all have the same mask are heads. An axis of a mesh is one of sequences.
  is_head = [not axes[i].get('spmd_axis_name') and _is_shared(products.mask, i) for i in range(rank)]
  first_head = rank - next((i for i, head in enumerate(reversed(is_head)) if not head), rank)
  products = products._replace(transform=None)
  shape = jnp.broadcast_shapes(*(x.shape[:rank] for x in jax.tree.leaves(products)))
  sequences, heads = shape[:first_head], shape[first_head:]
  keys = jnp.broadcast_shapes(products.k.shape[first_head:rank], products.v.shape[first_head:rank])
  # Heads after the last axis along which keys differ share them.
  keys_used = max((i + 1 for i, n in enumerate(keys) if n != 1), default=0)
  groups = (*heads[:keys_used], *(1 for _ in heads[keys_used:]))

  def merge(x: jax.Array | None, head_shape: tuple[int, ...], is_optional: bool = False) -> jax.Array | None:
    if x is None:
      return None
    own_sequences, own_heads, core = x.shape[:first_head], x.shape[first_head:rank], x.shape[rank:]
    batch = sequences if math.prod(own_sequences) > 1 else own_sequences
    head_shape = own_heads if is_optional and math.prod(own_heads) == 1 else head_shape
    return jnp.broadcast_to(x, (*batch, *head_shape, *core)).reshape(math.prod(batch), math.prod(head_shape), *core)

  merged = Products(
    q=merge(products.q, heads),
    k=merge(products.k, groups),
    v=merge(products.v, groups),
    mask=jax.tree.map(lambda x: merge(x, x.shape[first_head:rank])[:, 0], products.mask),
    bias=merge(products.bias, heads, is_optional=True),
    transform=None,
    sink=merge(products.sink, heads),
  )
  return merged, lambda context: context.reshape(*shape, *context.shape[2:])


def _is_shared(mask: Mask, axis: int) -> bool:
  return all(x.shape[axis] == 1 for x in jax.tree.leaves(mask))


def with_weights(problem: Problem, axes: Axes, context: jax.Array) -> Attended:
  """Returns the context of a kernel, with weights by the definition if they are requested.

  Args:
    problem, axes: as for `attend_batch` of an implementation.
    context: the context with all leading axes.
  """
  if not problem.return_weights:
    return Attended(context, None)
  return Attended(context, definition.attend_batch(problem, axes).weights)
