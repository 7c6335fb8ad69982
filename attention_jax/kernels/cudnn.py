"""Implementation 'cudnn': products q · k with softmax by NVIDIA's cuDNN kernel, called through jax.nn.

The kernel computes in bfloat16 or float16 with float32 sums. It differs from the definition in five ways:

- Queries, keys and values must have one width, a multiple of 8, and even lengths: they are padded with zeros. Padded
  positions are masked, padded queries and features are cut off.
- A query whose positions are all masked gets uniform weights: its context is set to zeros.
- float16 ends at 65504: where q or k may exceed it, powers of two are moved from one factor to the other.
- The bias has the type of the operands, and jax adds -2^41 (bfloat16) or -2^15 (float16) to it at masked positions: a
  bias is clipped to half of that, LARGEST_BIAS.
- The kernel returns no weights: they and the gradient of the bias are computed by the formula, in float32. XLA removes
  this computation where neither is used.

The kernel is called once for a whole batch: vmap merges a mapped axis into the kernel's axis of sequences if the mask
varies along it, else into that of heads. The backward pass recomputes the context.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attention_jax.errors import UserError
from attention_jax.functional.attend import Attended, Problem, lifted, score_terms
from attention_jax.functional.dense import softmax, strip_options
from attention_jax.functional.masking import zero_masked
from attention_jax.functional.table import Row
from attention_jax.kernels import flash
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.symbolic import require_fixed_sizes
from attention_jax.kernels.target import kernel_platform, replaced_for_counting

KERNEL = 'cudnn'  # argument `implementation` of jax.nn.dot_product_attention; tests set it to 'xla'
TYPES = ('bfloat16', 'float16')
MAX_WIDTH = 128  # features that every GPU since Ampere supports
WIDTH_MULTIPLE = 8  # the number of features must be a multiple of this
LARGEST_BIAS = {'bfloat16': 2.0**40, 'float16': 2.0**14}
MASK_INDEX = 3  # index of the mask among the arguments of a batched function


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported on this machine, or ''."""
  if alignment.dropout:
    return 'the kernel samples dropout by itself, which cannot be compared with the definition'
  if strip_options(alignment.fn) is not softmax:
    return 'the alignment is not softmax or has an edit'
  if reason := flash.unsupported_reason(score, alignment):
    return reason
  return '' if kernel_platform() == 'gpu' else f'needs an NVIDIA GPU, got platform {kernel_platform()}'


def unsupported_inputs(problem: Problem) -> str:
  """Returns the reason why arrays of these dtypes and widths are not supported, or ''."""
  value = problem.memory.value
  types = [x.dtype.name for x in (problem.query, problem.memory.key, value)]
  if len(set(types)) > 1 or types[0] not in TYPES:
    return f'query, key and value must all be {" or all ".join(TYPES)}, got {", ".join(types)}'
  _, k = jax.eval_shape(lambda: score_terms(problem))
  width = max(k.shape[-1], value.shape[-1])  # a score may project keys to another width
  if width > MAX_WIDTH:
    return f'features must be at most {MAX_WIDTH}, got {width}'
  return ''


@replaced_for_counting
def attend(problem: Problem) -> Attended:
  """Attends with the cuDNN kernel.

  Raises:
    UserError: if queries, keys and values do not have one of TYPES in common; if values, or the factors of the score's
      product, have more than MAX_WIDTH features; and for symbolic sizes.
  """
  require_fixed_sizes('cudnn', problem)
  if reason := unsupported_inputs(problem):
    raise UserError(f"implementation 'cudnn': {reason}; use 'flash'")
  dtype = problem.memory.value.dtype
  q, k, v, mask, bias, *_ = flash.operands(problem)
  full_mask = jnp.broadcast_to(mask, (q.shape[0], k.shape[0]))
  factors = _balance(q, k) if dtype == jnp.float16 else (q, k)
  inputs = (*(x.astype(dtype) for x in (*factors, v)), full_mask, bias)
  context = attended_context(*reverse_mode_only('cudnn', inputs))
  return Attended(context, flash.softmax_weights(q, k, mask, bias) if problem.return_weights else None)


attend_batch = lifted(attend)


def _balance(q, k) -> tuple[jax.Array, jax.Array]:
  """Returns factors of the same products that float16 can hold, if the product of the largest entries can be.

  A feature with numbers near the end of float16 in q or k gets a power of two that makes both equally large.
  """
  largest_q, largest_k = (jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=0)) for x in (q, k))
  is_large = jnp.maximum(largest_q, largest_k) > 2.0**15
  ratio = jnp.where(is_large & (largest_q > 0) & (largest_k > 0), largest_k / largest_q, 1.0)
  scale = jnp.exp2(jnp.round(jnp.log2(ratio) / 2))[None]
  return q * scale, k / scale


@jax.custom_vjp
def attended_context(q, k, v, mask, bias) -> jax.Array:
  """softmax(q kᵀ + bias) v over unmasked positions, 0 where all positions are masked.

  Args:
    q: [T, D], of one of TYPES.
    k: [S, D], of the same type.
    v: [S, V], of the same type.
    mask: [T, S].
    bias: float32 [T, S] or None.

  Returns:
    [T, V] of the type of v.
  """
  return _forward(*_add_batch_axes((q, k, v, mask, bias)))[0, 0]


def _attended_context_fwd(*operands):
  return attended_context(*operands), operands


def _attended_context_bwd(operands, g):
  gradients = _backward(*_add_batch_axes((*operands, g)))
  dq, dk, dv, dbias = jax.tree.map(lambda x: x[0, 0], gradients)
  return dq, dk, dv, None, dbias


attended_context.defvjp(_attended_context_fwd, _attended_context_bwd)


def _add_batch_axes(tree):
  """Adds axes B and N, for one sequence and one head."""
  return jax.tree.map(lambda x: x[None, None], tree)


def _batched(fn: Callable) -> Callable:
  """Wraps a function of arrays [B, N, ...] so that vmap enlarges B or N, and calls the function once.

  The argument at MASK_INDEX is the mask [B, 1, ...]. A mapped axis is merged into B if the mask is mapped, else into N.
  """
  batched_fn = custom_vmap(fn)

  @batched_fn.def_vmap
  def rule(size, is_mapped, *args):
    has_mapped_mask = is_mapped[MASK_INDEX]
    axis = 0 if has_mapped_mask else 1

    def merge(x, is_mapped):
      x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
      x = jnp.moveaxis(x, 0, axis)
      return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def split(x):
      x = x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])
      return jnp.moveaxis(x, axis, 0)

    merged = []
    for i, (arg, arg_is_mapped) in enumerate(zip(args, is_mapped, strict=True)):
      is_shared_mask = i == MASK_INDEX and not has_mapped_mask
      merged.append(arg if is_shared_mask else _map_with(merge, arg, arg_is_mapped))
    results = jax.tree.map(split, batched_fn(*merged))
    return results, jax.tree.map(lambda x: True, results)

  return batched_fn


def _map_with(fn: Callable, tree, constant):
  """Maps fn(leaf, constant) over the leaves of a tree; the tree None stays None."""
  return jax.tree.map(lambda x: fn(x, constant), tree)


@_batched
def _forward(q, k, v, mask, bias):
  """Returns the context [B, N, T, V].

  Args:
    q, k, v: [B, N, T, D], [B, N, S, D] and [B, N, S, V].
    mask: [B, 1, T, S].
    bias: [B, N, T, S] or None.
  """
  return _call_kernel(q, k, v, mask, bias)


@_batched
def _backward(q, k, v, mask, bias, g):
  """The gradients of q, k, v and bias, from that of the context, g [B, N, T, V]."""
  _, vjp = jax.vjp(lambda q, k, v: _call_kernel(q, k, v, mask, bias), q, k, v)
  return *vjp(g), None if bias is None else _bias_gradient(q, k, v, mask, bias, g)


def _bias_gradient(q, k, v, mask, bias, g) -> jax.Array:
  """The gradient of the bias by the formula, in the type of the bias."""
  q, k, v, g = (x.astype(bias.dtype) for x in (q, k, v, g))

  def context(q, k, v, mask, bias):
    return flash.softmax_weights(q, k, mask, bias) @ v

  over_heads = jax.vmap(context, (0, 0, 0, None, 0))
  over_sequences = jax.vmap(over_heads)
  _, vjp = jax.vjp(lambda bias: over_sequences(q, k, v, mask[:, 0], bias), bias)
  return vjp(g)[0]


def _call_kernel(q, k, v, mask, bias) -> jax.Array:
  """Calls the kernel, with operands padded to sizes that it accepts. Same shapes as `_forward`."""
  width = -(-max(q.shape[-1], v.shape[-1]) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE

  def pad_lengths(x):
    """Pads x [B, N or 1, T, S] to even T and S."""
    return jnp.pad(x, [(0, 0), (0, 0), *((0, size % 2) for size in x.shape[2:])])

  def pad_operand(x):
    """Pads x [B, N, length, features] and returns it as [B, even length, N, width]."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[2] % 2), (0, width - x.shape[3]))).swapaxes(1, 2)

  limit = LARGEST_BIAS[v.dtype.name]
  padded_bias = None if bias is None else pad_lengths(jnp.clip(bias, -limit, limit).astype(v.dtype))
  context = jax.nn.dot_product_attention(
    *(pad_operand(x) for x in (q, k, v)), padded_bias, pad_lengths(mask), scale=1.0, implementation=KERNEL
  )
  context = context.swapaxes(1, 2)[:, :, : q.shape[2], : v.shape[3]]
  return zero_masked(context, mask.any(-1)).astype(v.dtype)
