"""Implementation 'splash': products q · k with softmax by the kernel of that name for TPUs, which ships with jax.

It never stores an array [T, S], and skips blocks of bands that are masked. Of a Mask it takes everything but an array
that differs between queries, and an offset: bands are computed in the kernel, lengths and shared arrays are segments.
It differs from the definition in two ways:

- T and S must be multiples of 128: padded queries are cut off, padded positions are a segment of their own.
- A query whose positions are all masked gets the mean of values: its context is set to zero.

Heads that share keys and values read one copy. If weights are requested, they are computed by the definition.
"""

import functools
import inspect

import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.attend import Attended, Problem
from attention_jax.functional.dense import capped_softmax, scalable_softmax, sink_softmax, softmax, strip_options
from attention_jax.functional.lifting import Axes, lift
from attention_jax.functional.table import Product, Row
from attention_jax.kernels.products import beyond_contexts, merge_axes, products_of, with_weights
from attention_jax.kernels.symbolic import require_fixed_sizes
from attention_jax.kernels.target import INTERPRET, kernel_platform, replaced_for_counting

ALIGNMENTS = (softmax, sink_softmax, scalable_softmax, capped_softmax)


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns the reason why this pair is not supported on this machine, or ''."""
  if not isinstance(score.form, Product):
    return 'the score is not a product q . k with q depending on the query alone and k on the key alone'
  if alignment.dropout:
    return 'the kernel has no dropout on weights'
  if strip_options(alignment.fn) not in ALIGNMENTS:
    return 'the alignment is not softmax, with a cap or a sink or neither, or it has an edit'
  if not isinstance(_cap(alignment), float | int | None):
    return 'the cap of the alignment must be a number'
  return '' if kernel_platform() in ('tpu', INTERPRET) else f'needs a TPU, got platform {kernel_platform()}'


def unsupported_inputs(problem: Problem) -> str:
  """Returns the reason why a problem with these inputs is not supported, or ''."""
  mask = problem.memory.mask
  num_queries, size = problem.query.shape[-2], problem.memory.key.shape[-2]
  if problem.bias is not None:
    return 'the kernel takes no bias'
  if reason := beyond_contexts(problem):
    return reason
  if mask.remainder is not None and mask.remainder.shape[-2] != 1:
    return 'the mask must not be an array that differs between queries; expected a Mask of bands, lengths and segments'
  if mask.bands and mask.offset is not None:
    return 'the queries must start at position 0, got a Mask with an offset'
  if any(band.left is not None and num_queries - 1 - band.left >= size for band in mask.bands):
    return f'{num_queries} queries are too many for {size} positions and a window: the last ones would have none'
  if jnp.result_type(problem.query, problem.memory.value) == jnp.float64:
    return 'inputs must be at most float32, got float64'
  return '' if num_queries else 'there must be at least one query'


@replaced_for_counting
def attend_batch(problem: Problem, axes: Axes) -> Attended:
  """Attends with all queries of all sequences.

  Raises:
    UserError: for a bias, float64, symbolic sizes and masks that the kernel does not support.
  """
  from attention_jax.kernels.splash_kernel import attend_heads

  require_fixed_sizes('splash', problem)
  if reason := unsupported_inputs(problem):
    raise UserError(f"implementation 'splash': {reason}; or use 'xla'")
  products, split_axes = merge_axes(products_of(problem, axes), axes)
  dtype = jnp.result_type(problem.query, problem.memory.key, problem.memory.value)
  products = products._replace(**{name: getattr(products, name).astype(dtype) for name in ('q', 'k', 'v')})
  context = lift(functools.partial(attend_heads, _cap(problem.alignment)), axes[:1] or ({},), products)
  return with_weights(problem, axes, split_axes(context).astype(problem.memory.value.dtype))


def _cap(alignment: Row) -> float | None:
  """The cap of scores, if the alignment has one, else None."""
  options = inspect.signature(alignment.fn).parameters
  return options['cap'].default if 'cap' in options else None
