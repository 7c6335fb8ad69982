"""The call of jax's splash kernel for the heads of one sequence; see splash.py, which imports it when it is used.

jax's module of the kernel loads packages that `import attention_jax` must not need.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from attention_jax.functional.mask import Band
from attention_jax.functional.masking import zero_masked
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.products import Products
from attention_jax.kernels.sharding import shard_over_rows
from attention_jax.kernels.target import INTERPRET, kernel_platform

BLOCK = 128  # T and S must be multiples of this
MAX_BLOCK = 512  # queries and positions of a block
MASKED_SEGMENT = np.int32(-(2**31))  # of positions that no query may attend to


def attend_heads(cap: float | None, products: Products) -> jax.Array:
  """Returns the contexts [N, T, V] of the heads of one sequence.

  Args:
    cap: the soft cap of scores, or None.
    products: the operands of one sequence, see `products.merge_axes`.
  """
  q, k, v, mask, _, _, sink = products
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
