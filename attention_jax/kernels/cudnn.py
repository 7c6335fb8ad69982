"""Implementation 'cudnn': products q · k with softmax by NVIDIA's cuDNN kernel, called through jax.nn.

Of a Mask the kernel takes causal bands, with or without a limit on the left, and lengths. The other parts become a
dense mask, which jax adds to the bias. The kernel computes in bfloat16 or float16 with float32 sums. It differs from
the definition in five ways:

- Queries, keys and values must have one width, a multiple of 8, and with a bias or a dense mask even lengths: they are
  padded with zeros. Padded positions are masked, padded queries and features are cut off.
- A query whose positions are all masked gets uniform weights: its context is set to zeros.
- float16 ends at 65504: where q or k may exceed it, powers of two are moved from one factor to the other.
- The bias has the type of the operands, and jax adds -2^41 (bfloat16) or -2^15 (float16) to it at masked positions: a
  bias is clipped to half of that, LARGEST_BIAS.
- The kernel returns no weights: they and the gradient of the bias are computed by the formula, in float32. XLA removes
  this computation where neither is used.

The kernel is called once for all sequences and heads, and heads that share keys and values read one copy. The backward
pass recomputes the context.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Attended, Problem
from attention_jax.functional.dense import clamp_to_finite, differs_from_softmax, softmax
from attention_jax.functional.lifting import Axes
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import zero_masked
from attention_jax.functional.table import Row
from attention_jax.kernels import flash
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.products import beyond_contexts, merge_axes, products_of, with_weights
from attention_jax.kernels.symbolic import require_fixed_sizes
from attention_jax.kernels.target import kernel_platform, replaced_for_counting

KERNEL = 'cudnn'  # argument `implementation` of jax.nn.dot_product_attention; tests set it to 'xla'
TYPES = ('bfloat16', 'float16')
MAX_WIDTH = 128  # features that every GPU since Ampere supports
WIDTH_MULTIPLE = 8  # the number of features must be a multiple of this
LARGEST_BIAS = {'bfloat16': 2.0**40, 'float16': 2.0**14}


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported on this machine, or ''."""
  if alignment.dropout:
    return 'the kernel samples dropout by itself, which cannot be compared with the definition'
  if reason := differs_from_softmax(alignment.fn):
    return reason
  if reason := flash.unsupported_reason(score, alignment):
    return reason
  return '' if kernel_platform() == 'gpu' else f'needs an NVIDIA GPU, got platform {kernel_platform()}'


def unsupported_inputs(problem: Problem) -> str:
  """Returns the reason why a problem with these inputs is not supported, or ''."""
  if reason := beyond_contexts(problem):
    return reason
  value = problem.memory.value
  types = [x.dtype.name for x in (problem.query, problem.memory.key, value)]
  if len(set(types)) > 1 or types[0] not in TYPES:
    return f'query, key and value must all be {" or all ".join(TYPES)}, got {", ".join(types)}'
  axes = ({},) * (problem.query.ndim - 2)
  k = jax.eval_shape(lambda: products_of(problem, axes).k)
  width = max(k.shape[-1], value.shape[-1])  # a score may project keys to another width
  if width > MAX_WIDTH:
    return f'features must be at most {MAX_WIDTH}, got {width}'
  return ''


@replaced_for_counting
def attend_batch(problem: Problem, axes: Axes) -> Attended:
  """Attends with all queries of all sequences by one call of the cuDNN kernel.

  Raises:
    UserError: if queries, keys and values do not have one of TYPES in common; if values, or the factors of the score's
      product, have more than MAX_WIDTH features; for a bias of positions, the log of the sum and symbolic sizes.
  """
  require_fixed_sizes('cudnn', problem)
  if reason := unsupported_inputs(problem):
    raise UserError(f"implementation 'cudnn': {reason}; use 'flash'")
  products, split_axes = merge_axes(products_of(problem, axes), axes)
  dtype = problem.memory.value.dtype
  q, k = _balance(products.q, products.k) if dtype == jnp.float16 else products[:2]
  operands = (q.astype(dtype), k.astype(dtype), products.v, products.mask, products.bias)
  context = attended_context(*reverse_mode_only('cudnn', operands))
  return with_weights(problem, axes, split_axes(context))


def _balance(q, k) -> tuple[jax.Array, jax.Array]:
  """Returns factors of the same products that float16 can hold, if the product of the largest entries can be.

  A feature with numbers near the end of float16 in q or k gets a power of two that makes both equally large.
  """
  largest_q, largest_k = (jax.lax.stop_gradient(jnp.abs(x).reshape(-1, x.shape[-1]).max(0)) for x in (q, k))
  is_large = jnp.maximum(largest_q, largest_k) > 2.0**15
  ratio = jnp.where(is_large & (largest_q > 0) & (largest_k > 0), largest_k / largest_q, 1.0)
  scale = jnp.exp2(jnp.round(jnp.log2(ratio) / 2))
  scale = scale.reshape(*(1 for _ in range(q.ndim - 1)), -1)
  return q * scale, k / scale


@jax.custom_vjp
def attended_context(q, k, v, mask: Mask, bias) -> jax.Array:
  """softmax(q kᵀ + bias) v over unmasked positions, 0 where all positions are masked.

  Args:
    q: [B, N, T, D], of one of TYPES.
    k: [B, G, S, D], of the same type; B of q, k and v may be 1.
    v: [B, G, S, V], of the same type.
    mask: its leaves have an axis B, which may be 1.
    bias: [B, N, T, S], where B and N may be 1, or None.

  Returns:
    [B, N, T, V] of the type of v.
  """
  return _call_kernel(q, k, v, mask, bias)


def _attended_context_fwd(*operands):
  return attended_context(*operands), operands


def _attended_context_bwd(operands, g):
  q, k, v, mask, bias = operands
  _, vjp = jax.vjp(lambda q, k, v: _call_kernel(q, k, v, mask, bias), q, k, v)
  return *vjp(g), None, None if bias is None else _bias_gradient(q, k, v, mask, bias, g)


attended_context.defvjp(_attended_context_fwd, _attended_context_bwd)


def _bias_gradient(q, k, v, mask: Mask, bias, g) -> jax.Array:
  """The gradient of the bias by the formula, in the type of the bias."""
  shared = q.shape[1] // k.shape[1]
  q, k, v, g = (x.astype(bias.dtype) for x in (q, jnp.repeat(k, shared, 1), jnp.repeat(v, shared, 1), g))

  def context(bias):
    scores = jnp.einsum('bntd,bnsd->bnts', q, jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))) + bias
    allowed = jnp.broadcast_to(_dense(mask, bias, q.shape[2], k.shape[2]), scores.shape)
    weights = jnp.vectorize(softmax, signature='(s),(s)->(s)')(scores, allowed)
    return jnp.einsum('bnts,bnsv->bntv', weights, jnp.broadcast_to(v, (q.shape[0], *v.shape[1:])))

  _, vjp = jax.vjp(context, bias)
  return vjp(g)[0]


class _KernelMask(NamedTuple):
  """The parts of a mask that the kernel takes.

  Attributes:
    options: further arguments of jax.nn.dot_product_attention.
    rest: the other parts.
  """

  options: dict[str, Any]
  rest: Mask


def _split_mask(mask: Mask) -> _KernelMask:
  """Separates a causal band and lengths from the rest of a mask."""
  options: dict[str, Any] = {}
  native = [band for band in mask.bands if band.right == 0 and not band.sinks and mask.offset is None][:1]
  for band in native:
    options['is_causal'] = True
    if band.left is not None:
      options['local_window_size'] = (band.left, 0)
  if mask.length is not None:
    # The kernel is not called for empty memories: their contexts are set to zero.
    options['key_value_seq_lengths'] = jnp.maximum(mask.length, 1).astype(jnp.int32)
  bands = tuple(band for band in mask.bands if band not in native)
  return _KernelMask(options, dataclasses.replace(mask, bands=bands, length=None))


def _dense(mask: Mask, bias, num_queries: int, size: int) -> jax.Array:
  """The mask as an array with axes B and N, without the positions where the bias is -inf."""
  dense = mask.dense(num_queries, size)
  dense = dense[:, None] if dense.ndim == 3 else dense[None, None]
  return dense if bias is None else dense & ~jnp.isneginf(bias)


def _call_kernel(q, k, v, mask: Mask, bias) -> jax.Array:
  """Calls the kernel, with operands padded to sizes that it accepts. Arguments: see `attended_context`."""
  num_queries, size = q.shape[2], k.shape[2]
  batch = max(x.shape[0] for x in jax.tree.leaves((q, k, v, mask, bias)))
  width = -(-max(q.shape[-1], v.shape[-1]) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
  options, rest = _split_mask(mask)
  is_dense = bias is not None or bool(rest.bands or jax.tree.leaves(rest))
  extra = 2 if is_dense else 1  # lengths are a multiple of this

  def pad_lengths(x):
    """Pads x [B, N or 1, T, S]."""
    return jnp.pad(x, [(0, 0), (0, 0), *((0, -n % extra) for n in x.shape[2:])])

  def pad_operand(x):
    """Pads x [B, N, length, features] and returns it as [B, length, N, width]."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % extra), (0, width - x.shape[3]))).swapaxes(1, 2)
    return jnp.broadcast_to(x, (batch, *x.shape[1:]))

  if 'key_value_seq_lengths' in options:
    options['key_value_seq_lengths'] = jnp.broadcast_to(options['key_value_seq_lengths'], (batch,))
  dense = padded_bias = None
  if is_dense:
    dense = pad_lengths(_dense(rest, bias, num_queries, size))
  if bias is not None:
    limit = LARGEST_BIAS[v.dtype.name]
    finite = clamp_to_finite(zero_masked(bias, ~jnp.isneginf(bias)))
    padded_bias = pad_lengths(jnp.clip(finite, -limit, limit).astype(v.dtype))
  context = jax.nn.dot_product_attention(
    *(pad_operand(x) for x in (q, k, v)), padded_bias, dense, scale=1.0, implementation=KERNEL, **options
  )
  context = context.swapaxes(1, 2)[:, :, :num_queries, : v.shape[3]]
  if bias is None:
    has_position = mask.any_key(num_queries, size)
    has_position = has_position.reshape(-1, 1, has_position.shape[-1])
  else:
    has_position = _dense(mask, bias, num_queries, size).any(-1)
  return zero_masked(context, has_position).astype(v.dtype)
