"""Attention as products q · k with a form of softmax, for kernels that take all sequences and heads at once."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Memory, Problem, call_variant, score_terms, zero_masked_memory
from attention_jax.functional.lifting import Axes, lift
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import accumulation_dtype


class Products(NamedTuple):
  """Softmax of q kᵀ and a bias over unmasked positions, times v. Leading axes have length 1 where they are shared.

  Attributes:
    q: [..., T, D], multiplied by the scale of the alignment; of the type of the inputs, as k and v.
    k: [..., S, D], with zeros where no query attends.
    v: [..., S, V], likewise.
    mask: the mask.
    bias: [..., T, S] or None; -inf where it masks.
    sink: the sink of the alignment's SoftmaxTerms, [...], or None.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  mask: Mask
  bias: jax.Array | None
  sink: jax.Array | None


def products_of(problem: Problem, axes: Axes) -> Products:
  """Reduces a problem whose score is a Product and whose alignment is a SoftmaxForm; its transform is not applied."""
  num_queries, size = problem.query.shape[-2], problem.memory.key.shape[-2]
  memory = zero_masked_memory(problem.memory, num_queries)
  params = {name: value for name, value in problem.params.items() if name != 'alignment'}

  def terms(params, query, key):
    return score_terms(problem._replace(params=params, query=query, memory=Memory(key, key, Mask())))

  q = lift(lambda *operands: terms(*operands)[0], axes, params, problem.query, memory.key)
  # Heads share the factor of a key unless the score has parameters of its own for each of them.
  width = params.pop('query', problem.query).shape[-1]
  no_query = jnp.zeros((*(1 for _ in axes), 1, width), problem.query.dtype)
  k = lift(lambda *operands: terms(*operands)[1], axes, params, no_query, memory.key)

  def scale_and_sink(params, mask):
    count = mask.dense(num_queries, size).sum(-1).astype(jnp.float32)
    softmax_terms, _ = call_variant(problem.alignment.form.fn, (count,), params, {}, ())
    return jnp.broadcast_to(softmax_terms.scale, (num_queries,)), softmax_terms.sink

  scale, sink = lift(scale_and_sink, axes, problem.params.get('alignment', {}), problem.memory.mask)
  dtype = accumulation_dtype(q, k)
  scaled = q.astype(dtype) * scale[..., None].astype(dtype)
  # A score may compute its factors in float32; kernels take them in the type of the inputs.
  kernel_dtype = jnp.result_type(problem.query, memory.key, memory.value)
  scaled, k, value = (x.astype(kernel_dtype) for x in (scaled, k, memory.value))
  return Products(scaled, k, value, memory.mask, problem.bias, sink)


def over_sequences(kernel: Callable[[Products], jax.Array], products: Products, axes: Axes) -> jax.Array:
  """Calls a kernel for each sequence, with all heads that have the same mask.

  Args:
    kernel: takes q [N, T, D], k [G, S, D] and v [G, S, V], where N / G successive heads share keys and values, the mask
      of one sequence, bias [N, T, S] or [1, T, S], and sink [N]. Returns the context [N, T, V].
    products: the operands.
    axes: their leading axes.

  Returns:
    The context with all leading axes.
  """
  rank = len(axes)
  # The innermost axes along which all have the same mask are heads. An axis with options, such as a mesh's, is not.
  is_head = [not axes[i].get('spmd_axis_name') and _is_shared(products.mask, i) for i in range(rank)]
  first_head = rank - next((i for i, head in enumerate(reversed(is_head)) if not head), rank)
  head_shape = jnp.broadcast_shapes(*(x.shape[first_head:rank] for x in products[:3]))
  keys_shape = _shape_of_keys(products, head_shape, first_head, rank)

  def call(products: Products) -> jax.Array:
    def merge(x, shape):
      shape = shape or tuple(x.shape[: len(head_shape)])
      return jnp.broadcast_to(x, (*shape, *x.shape[len(head_shape) :])).reshape(-1, *x.shape[len(head_shape) :])

    mask = jax.tree.map(lambda x: x.reshape(x.shape[len(head_shape) :]), products.mask)
    bias = products.bias
    if bias is not None:
      bias = merge(bias, head_shape if math.prod(bias.shape[: len(head_shape)]) > 1 else ())
    sink = None if products.sink is None else merge(products.sink, head_shape)
    merged = Products(
      merge(products.q, head_shape), merge(products.k, keys_shape), merge(products.v, keys_shape), mask, bias, sink
    )
    context = kernel(merged)
    return context.reshape(*head_shape, *context.shape[1:])

  return lift(call, axes[:first_head], products)


def _is_shared(mask: Mask, axis: int) -> bool:
  return all(x.shape[axis] == 1 for x in jax.tree.leaves(mask))


def _shape_of_keys(products: Products, head_shape: tuple[int, ...], first: int, rank: int) -> tuple[int, ...]:
  """The axes of heads of keys and values: those after the last one that they do not share are groups of heads."""
  shape = jnp.broadcast_shapes(products.k.shape[first:rank], products.v.shape[first:rank])
  used = max((i + 1 for i, n in enumerate(shape) if n != 1), default=0)
  return (*head_shape[:used], *(1 for _ in head_shape[used:]))


def with_weights(problem: Problem, axes: Axes, context: jax.Array) -> Attended:
  """The context of a kernel, with weights by the definition if they are requested."""
  if not problem.return_weights:
    return Attended(context, None)
  return Attended(context, definition.attend_batch(problem, axes).weights)
