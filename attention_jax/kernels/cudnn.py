"""Implementation 'cudnn': products q · k with softmax by NVIDIA's own kernel, as jax.nn offers it, under our contract.

It computes in bfloat16 or float16 with float32 sums, takes one width for queries, keys and values and even numbers of
them, and gives uniform weights to a query that may look nowhere: widths and lengths are filled up with zeros that are
masked, and such a query gets the zeros it is owed. It has no weights to give: where they are asked for, they are made
by the formula, in float32, beside it, and so is the gradient of a bias, which the kernel has for one sequence alone.
Where nobody uses them, the compiler leaves them out.

The kernel is called once for a whole batch: axes over which this is mapped (vmap) become sequences where each has a
mask of its own, and heads where they share it. For the gradient the context is computed a second time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attention_jax.errors import UserError
from attention_jax.functional.attend import Attended, Memory
from attention_jax.functional.masking import zero_masked
from attention_jax.functional.table import Row
from attention_jax.kernels import flash
from attention_jax.kernels.pallas_additive import kernel_platform

KERNEL = 'cudnn'  # of jax.nn.dot_product_attention; tests put 'xla' here
TYPES = ('bfloat16', 'float16')
WIDEST, STEP = 128, 8  # of features: what every GPU since Ampere takes, and what it must be a multiple of


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Why this pair cannot be computed so, here; '' if it can."""
  if alignment.dropout:
    return 'the kernel draws what it drops by itself, and could not be held against the definition'
  if reason := flash.unsupported_reason(score, alignment):
    return reason
  return '' if kernel_platform() == 'gpu' else f'needs an NVIDIA GPU, this machine has {kernel_platform()}'


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
  """As functional.attend.

  Raises: UserError where queries, keys and values are not all of one of TYPES, and for more than WIDEST features.
  """
  dtype = memory.value.dtype
  if wrong := [x.dtype for x in (query, memory.key, memory.value) if x.dtype != dtype or x.dtype.name not in TYPES]:
    raise UserError(f"implementation 'cudnn' computes in {' or '.join(TYPES)}, got {wrong[0]}; possible: 'flash'")

  q, k, v, mask, bias = flash.operands(score, alignment, params, query, memory, bias)
  width = max(q.shape[-1], v.shape[-1])
  if width > WIDEST:
    raise UserError(f"implementation 'cudnn' takes at most {WIDEST} features, got {width}; possible: 'flash'")
  shown = jnp.broadcast_to(mask, (q.shape[0], k.shape[0]))
  context = attended(*(x.astype(dtype) for x in (q, k, v)), shown, bias)
  return Attended(context, flash.softmax_weights(q, k, mask, bias) if return_weights else None)


@jax.custom_vjp
def attended(q, k, v, mask, bias) -> jax.Array:
  """softmax(q kᵀ + bias) v [T, V] over what the mask shows, 0 where it shows nothing; in the type of v.

  Args: q [T, D], k [S, D], v [S, V] of one of TYPES; mask [T, S]; bias float32 [T, S] or None.
  """
  return _forward(*_alone((q, k, v, mask, bias)))[0, 0]


def _saved(*given):
  return attended(*given), given


def _gradients(given, slope):
  dq, dk, dv, dbias = jax.tree.map(lambda x: x[0, 0], _backward(*_alone((*given, slope))))
  return dq, dk, dv, None, dbias


attended.defvjp(_saved, _gradients)


def _alone(given):
  """With axes B and N of one sequence and one head."""
  return jax.tree.map(lambda x: x[None, None], given)


def _batched(fn: Callable) -> Callable:
  """fn of arrays [B, N, ...], the fourth of which, the mask, is [B, 1, ...], such that to map it is to call it once."""
  mapped = custom_vmap(fn)

  @mapped.def_vmap
  def rule(size, axes, *given):
    mask = axes[3]
    into = 0 if mask else 1  # sequences, or heads that share their mask

    def fold(x, has_axis):
      x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
      x = jnp.moveaxis(x, 0, into)
      return x.reshape(*x.shape[:into], -1, *x.shape[into + 2 :])

    folded = [
      x if i == 3 and not mask else jax.tree.map(lambda x, has_axis=has_axis: fold(x, has_axis), x)
      for i, (x, has_axis) in enumerate(zip(given, axes, strict=True))
    ]
    split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:into], size, -1, *x.shape[into + 1 :]), into, 0)
    found = jax.tree.map(split, mapped(*folded))
    return found, jax.tree.map(lambda x: True, found)

  return mapped


@_batched
def _forward(q, k, v, mask, bias):
  """q [B, N, T, D], k [B, N, S, D], v [B, N, S, V], mask [B, 1, T, S], bias [B, N, T, S] or None -> [B, N, T, V]."""
  return _by_kernel(q, k, v, mask, bias)


@_batched
def _backward(q, k, v, mask, bias, slope):
  """The gradients of q, k, v and bias, from that of the context [B, N, T, V]."""
  _, pull = jax.vjp(lambda q, k, v: _by_kernel(q, k, v, mask, bias), q, k, v)
  return *pull(slope), None if bias is None else _slope_of_bias(q, k, v, mask, bias, slope)


def _slope_of_bias(q, k, v, mask, bias, slope) -> jax.Array:
  """By the formula, in the type of the bias."""
  q, k, v, slope = (x.astype(bias.dtype) for x in (q, k, v, slope))
  one = jax.vmap(jax.vmap(lambda q, k, v, mask, bias: flash.softmax_weights(q, k, mask, bias) @ v, (0, 0, 0, None, 0)))
  _, pull = jax.vjp(lambda bias: one(q, k, v, mask[:, 0], bias), bias)
  return pull(slope)[0]


def _by_kernel(q, k, v, mask, bias) -> jax.Array:
  """As `_forward`."""
  width = -(-max(q.shape[-1], v.shape[-1]) // STEP) * STEP
  even = lambda x: jnp.pad(x, [(0, 0), (0, 0), *((0, size % 2) for size in x.shape[2:])])
  grown = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[2] % 2), (0, width - x.shape[3]))).swapaxes(1, 2)
  near = None if bias is None else even(bias.astype(v.dtype))
  context = jax.nn.dot_product_attention(
    *(grown(x) for x in (q, k, v)), near, even(mask), scale=1.0, implementation=KERNEL
  )
  context = context.swapaxes(1, 2)[:, :, : q.shape[2], : v.shape[3]]
  return zero_masked(context, mask.any(-1)).astype(v.dtype)
