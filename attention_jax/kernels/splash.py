"""Implementation 'splash': products q · k with softmax by the kernel of that name for TPUs, which ships with jax.

It never stores an array [T, S], and skips blocks of bands that are masked. Of a Mask it takes everything but an array
that differs between queries, and an offset: bands are computed in the kernel, lengths and shared arrays are segments.
It differs from the definition in two ways:

- T and S must be multiples of BLOCK: padded queries are cut off, padded positions are a segment of their own.
- A query whose positions are all masked gets the mean of values: its context is set to zero.

Heads that share keys and values read one copy. If weights are requested, they are computed by the definition.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from attention_jax.errors import UserError
from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Problem
from attention_jax.functional.dense import capped_softmax, scalable_softmax, sink_softmax, softmax, strip_options
from attention_jax.functional.lifting import Axes, lift
from attention_jax.functional.mask import Band
from attention_jax.functional.masking import zero_masked
from attention_jax.functional.table import Product, Row
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.products import Products, merge_axes, products_of, with_weights
from attention_jax.kernels.sharding import shard_over_rows
from attention_jax.kernels.symbolic import require_fixed_sizes
from attention_jax.kernels.target import INTERPRET, kernel_platform, replaced_for_counting

ALIGNMENTS = (softmax, sink_softmax, scalable_softmax, capped_softmax)
BLOCK = 128  # T and S must be multiples of this
MAX_BLOCK = 512  # queries and positions of a block
MASKED_SEGMENT = np.int32(-(2**31))  # of positions that no query may attend to


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
  if mask.remainder is not None and mask.remainder.shape[-2] != 1:
    return 'the mask must not be an array that differs between queries; expected a Mask of bands, lengths and segments'
  if mask.bands and mask.offset is not None:
    return 'the queries must start at position 0, got a Mask with an offset'
  if any(band.left is not None and num_queries - 1 - band.left >= size for band in mask.bands):
    return f'{num_queries} queries are too many for {size} positions and a window: the last ones would have none'
  if jnp.result_type(problem.query, problem.memory.value) == jnp.float64:
    return 'inputs must be at most float32, got float64'
  return '' if num_queries else 'there must be at least one query'


@replaced_for_counting(definition.attend_batch)
def attend_batch(problem: Problem, axes: Axes) -> Attended:
  """Attends with all queries of all sequences.

  Raises:
    UserError: for a bias, float64, symbolic sizes and masks that the kernel does not support.
  """
  require_fixed_sizes('splash', problem)
  if reason := unsupported_inputs(problem):
    raise UserError(f"implementation 'splash': {reason}; or use 'xla'")
  products, split_axes = merge_axes(products_of(problem, axes), axes)
  dtype = jnp.result_type(problem.query, problem.memory.key, problem.memory.value)
  products = products._replace(**{name: getattr(products, name).astype(dtype) for name in ('q', 'k', 'v')})
  context = lift(functools.partial(_attend, _cap(problem.alignment)), axes[:1] or ({},), products)
  return with_weights(problem, axes, split_axes(context).astype(problem.memory.value.dtype))


def _cap(alignment: Row) -> float | None:
  """The cap of `capped_softmax`; None for the other alignments."""
  if strip_options(alignment.fn) is not capped_softmax:
    return None
  return getattr(alignment.fn, 'keywords', {}).get('cap', 50.0)


def _attend(cap: float | None, products: Products) -> jax.Array:
  """Attends with the heads of one sequence; see `products.merge_axes`."""
  q, k, v, mask, _, sink = products
  num_queries, size = q.shape[1], k.shape[1]
  width = -(-max(q.shape[-1], v.shape[-1]) // BLOCK) * BLOCK
  rows, columns = (-(-n // BLOCK) * BLOCK for n in (num_queries, size))

  def pad(x, length):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, width - x.shape[2])))

  segments = None
  query_ids = jnp.zeros(num_queries, jnp.int32) if mask.query_segments is None else mask.query_segments
  if not (mask.length is None and mask.remainder is None and mask.query_segments is None and size == columns):
    key_ids = jnp.zeros(size, jnp.int32) if mask.key_segments is None else mask.key_segments
    key_ids = jnp.where(mask.any_query(None, size), key_ids, MASKED_SEGMENT)
    key_ids = jnp.pad(key_ids, (0, columns - size), constant_values=MASKED_SEGMENT)
    segments = kernels.SegmentIds(jnp.pad(query_ids, (0, rows - num_queries)), key_ids)
  inputs = reverse_mode_only('splash', (pad(q, rows), pad(k, columns), pad(v, columns), sink))
  static = (mask.bands, num_queries, cap, kernel_platform() == INTERPRET)
  context = shard_over_rows(functools.partial(_call_kernel, *static))(*inputs, segments)
  context = context[:, :num_queries, : v.shape[-1]]
  has_position = mask.any_key(num_queries, size)
  return zero_masked(context.swapaxes(0, 1), has_position).swapaxes(0, 1)


def _call_kernel(bands: tuple[Band, ...], num_queries: int, cap: float | None, interpret: bool, *operands) -> jax.Array:
  q, k, v, sink, segments = operands
  heads, rows, _ = q.shape
  columns = k.shape[1]
  band_mask = _BandMask((rows, columns), bands, num_queries) if bands else masks.FullMask((rows, columns))
  block_q, block_kv = (math.gcd(n, MAX_BLOCK) for n in (rows, columns))
  sizes = {'q': block_q, 'kv': block_kv}
  blocks = kernels.BlockSizes(
    **{f'block_{name}{part}': sizes[name] for name in sizes for part in ('', '_dkv', '_dq')},
    block_kv_compute=block_kv,
    block_kv_dkv_compute=block_kv,
  )
  options = {'block_sizes': blocks, 'attn_logits_soft_cap': cap, 'interpret': interpret}
  kernel = kernels.make_splash_mha(masks.MultiHeadMask([band_mask] * heads), head_shards=1, q_seq_shards=1, **options)
  return kernel(q, k, v, segment_ids=segments, sinks=None if sink is None else sink.astype(jnp.float32))


class _BandMask(masks._ComputableMask):  # which the kernel computes from positions, instead of reading it
  """The bands of a Mask. Padded queries may attend to everything, so that none of them is without positions."""

  def __init__(self, shape: tuple[int, int], bands: tuple[Band, ...], num_queries: int):
    def function(queries, positions):
      parts = [band.dense(queries, positions) for band in bands]
      return functools.reduce(lambda x, y: x & y, parts) | (queries >= num_queries)

    super().__init__(shape, function)
    self._key = (shape, bands, num_queries)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _BandMask) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)
