"""Implementation 'cudnn': products q · k with softmax by NVIDIA's own kernel, as jax.nn offers it, under our contract.

It computes in bfloat16 or float16 with float32 sums, takes one width for queries, keys and values and even numbers of
them, and gives uniform weights to a query that may look nowhere: widths and lengths are filled up with zeros that are
masked, and such a query gets the zeros it is owed. It has no weights to give: where they are asked for, they are made
by the formula, in float32, beside it. Where nobody uses them, the compiler leaves them out.
"""

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Attended, Memory
from attention_jax.functional.masking import masked
from attention_jax.functional.table import Row
from attention_jax.kernels import flash
from attention_jax.kernels.pallas_additive import here

KERNEL = 'cudnn'  # of jax.nn.dot_product_attention; tests put 'xla' here
TYPES = ('bfloat16', 'float16')
WIDEST, STEP = 128, 8  # of features: what every GPU since Ampere takes, and what it must be a multiple of


def refuse(score: Row, alignment: Row) -> str:
  """Why this pair cannot be computed so, here; '' if it can."""
  if alignment.dropout:
    return 'the kernel draws what it drops by itself, and could not be held against the definition'
  if reason := flash.refuse(score, alignment):
    return reason
  return '' if here() == 'gpu' else f'needs an NVIDIA GPU, this machine has {here()}'


def attend(
  score: Row, alignment: Row, params, query, memory: Memory, *, bias=None, rng=None, deterministic=True,
  return_weights=True,
) -> Attended:  # fmt: skip
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
  mask = jnp.broadcast_to(mask, (q.shape[0], k.shape[0]))
  even = lambda x: jnp.pad(x, [(0, size % 2) for size in x.shape])
  grown = lambda x: jnp.pad(x, ((0, x.shape[0] % 2), (0, -(-width // STEP) * STEP - x.shape[-1])))
  parts = (grown(x.astype(dtype))[None, :, None] for x in (q, k, v))
  near = None if bias is None else even(bias.astype(dtype))[None, None]
  context = jax.nn.dot_product_attention(*parts, near, even(mask)[None, None], scale=1.0, implementation=KERNEL)
  context = masked(context[0, : q.shape[0], 0, : v.shape[-1]], mask.any(-1)).astype(dtype)
  if not return_weights:
    return Attended(context, None)
  return Attended(context, flash.weights_of(q, k, mask, bias))
