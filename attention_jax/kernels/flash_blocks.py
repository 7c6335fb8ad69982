"""Blocks of queries and keys for implementation 'flash': sizes, classification by the mask, and order."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import vary_like
from attention_jax.kernels.sharding import shard_over_rows
from attention_jax.kernels.target import kernel_platform

BLOCK = 512  # maximum number of queries, and of keys, in a block
# Numbers of fully unmasked blocks of keys that one product may cover. With 64 features on two cores, products of 1024
# keys run at 1.2 times the rate of products of 512; the scores of 2048 keys do not fit in the L2 cache.
SPANS = (2, 1)

# One entry (order, count) per kind of `Blocks.kinds`. order [blocks of queries, spans] contains the first block of keys
# of every span; the spans that run come first. count [blocks of queries] is their number.
Schedule = list[tuple[jax.Array, jax.Array]]


def in_turn_on_cpus(fn: Callable) -> Callable:
  """Wraps a function so that its jax.vmap runs the rows one after the other on a CPU, and together elsewhere."""
  in_turn = sequential_vmap(fn)

  @functools.wraps(fn)
  def run(*args):
    return (in_turn if kernel_platform() == 'cpu' else fn)(*args)

  return run


class Blocks(NamedTuple):
  """Partition of T queries and S keys into blocks of equal size; the last block of each is padded.

  Attributes:
    num_query_blocks: number of blocks of queries.
    query_block: number of queries in a block.
    num_key_blocks: number of blocks of keys.
    key_block: number of keys in a block.
  """

  num_query_blocks: int
  query_block: int
  num_key_blocks: int
  key_block: int

  @classmethod
  def of(cls, steps: int, size: int) -> 'Blocks':
    """The partition of T = `steps` queries and S = `size` keys."""
    return cls(*_split_evenly(steps), *_split_evenly(size))

  def by_query(self, x: jax.Array) -> jax.Array:
    """Splits x [T, ...] into blocks, [blocks, query_block, ...], padded with zeros."""
    shape = (self.num_query_blocks, self.query_block)
    return self.pad_rows(x, shape[0] * shape[1]).reshape(*shape, *x.shape[1:])

  def pad_keys(self, x: jax.Array) -> jax.Array:
    """Pads [S, ...] with zeros to complete blocks."""
    return self.pad_rows(x, self.num_key_blocks * self.key_block)

  @staticmethod
  def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Pads the first axis with zeros."""
    return jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))

  def pad(self, x: jax.Array) -> jax.Array:
    """Pads [T or 1, S] with zeros or False to complete blocks; a first axis of length 1 is kept."""
    rows = 1 if x.shape[0] == 1 else self.num_query_blocks * self.query_block
    return self.pad_keys(self.pad_rows(x, rows).T).T

  def slice_keys(self, x: jax.Array, j, span: int, axis: int = 0) -> jax.Array:
    """Returns the keys of blocks j ... j + span - 1 of an array that has all keys along `axis`.

    Args:
      x: an array with all keys along `axis`, padded to complete blocks.
      j: index of the first block of keys.
      span: number of blocks.
      axis: the axis of the keys.
    """
    return jax.lax.dynamic_slice_in_dim(x, j * self.key_block, span * self.key_block, axis)

  def add_to_keys(self, x: jax.Array, j, terms: jax.Array) -> jax.Array:
    """Adds `terms` to consecutive keys of x, from the first key of block j on.

    Args:
      x: [S, ...], padded to complete blocks.
      j: index of the block of keys.
      terms: [n, ...], one for each of n keys.

    Returns:
      The sum, of the shape of x.
    """
    first = j * self.key_block
    terms = terms + jax.lax.dynamic_slice_in_dim(x, first, terms.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(x, terms, first, 0)

  def slice_block(self, x: jax.Array, i, j, span: int) -> jax.Array:
    """Returns blocks (i, j ... j + span - 1) [keys, query_block or 1] of a padded and transposed array [S, T or 1].

    Args:
      x: the array; its second axis has length 1 if all queries share it.
      i: index of the block of queries.
      j: index of the first block of keys.
      span: number of blocks of keys.
    """
    is_shared = x.shape[1] == 1
    rows = 1 if is_shared else self.query_block
    first_row = 0 if is_shared else i * self.query_block
    return jax.lax.dynamic_slice(x, (j * self.key_block, first_row), (span * self.key_block, rows))

  def classify_blocks(self, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Classifies the blocks of a padded mask [T or 1, S].

    Returns:
      live, full: bool [blocks of queries, blocks of keys]. A live block has an unmasked position, a full block no
      masked one.
    """
    rows = mask.reshape(1 if mask.shape[0] == 1 else self.num_query_blocks, -1, mask.shape[1])
    live = self._group_keys(rows.any(1)).any(-1)
    full = self._group_keys(rows.all(1)).all(-1)
    shape = (self.num_query_blocks, self.num_key_blocks)
    return jnp.broadcast_to(live, shape), jnp.broadcast_to(full, shape)

  def classify_structure(self, mask: Mask) -> tuple[jax.Array, jax.Array]:
    """Classifies the blocks of the mask of one sequence by its structure, without `remainder`.

    Args:
      mask: the mask; its segments are padded to complete blocks.

    Returns:
      live, full: as `classify_blocks`, but a block that is live may have no unmasked position.
    """
    first_query = jnp.arange(self.num_query_blocks)[:, None] * self.query_block
    first_query = first_query if mask.offset is None else first_query + mask.offset
    last_query = first_query + self.query_block - 1
    first_key = jnp.arange(self.num_key_blocks)[None] * self.key_block
    last_key = first_key + self.key_block - 1
    live = full = jnp.ones((self.num_query_blocks, self.num_key_blocks), bool)
    for band in mask.bands:
      live_band, full_band = band.classify((first_query, last_query), (first_key, last_key))
      live, full = live & live_band, full & full_band
    if mask.length is not None:
      live, full = live & (first_key < mask.length), full & (last_key < mask.length)
    if mask.query_segments is not None:
      queries = mask.query_segments.reshape(self.num_query_blocks, -1)
      keys = mask.key_segments.reshape(self.num_key_blocks, -1)
      lowest_query, highest_query = queries.min(1)[:, None], queries.max(1)[:, None]
      lowest_key, highest_key = keys.min(1)[None], keys.max(1)[None]
      live = live & (lowest_query <= highest_key) & (lowest_key <= highest_query)
      full = full & (lowest_query == highest_key) & (lowest_key == highest_query)
    return live, full

  def _group_keys(self, x: jax.Array) -> jax.Array:
    """[rows, S] -> [rows, blocks, key_block]."""
    return x.reshape(x.shape[0], self.num_key_blocks, -1)

  @property
  def kinds(self) -> list[tuple[int, bool]]:
    """(span, has_masked) in the order of computation: blocks of keys per step, and whether any may be partly masked."""
    return [*((span, False) for span in SPANS if span <= self.num_key_blocks), (1, True)]

  def schedule(self, live: jax.Array, full: jax.Array) -> Schedule:
    """Returns the blocks of each kind that run for each block of queries. Every live block runs once."""
    remaining = live
    schedule = []
    for span, has_masked in self.kinds:
      candidates = remaining if has_masked else remaining & full
      groups = self.num_key_blocks // span
      selected = candidates[:, : groups * span].reshape(-1, groups, span).all(-1)
      covered = jnp.pad(jnp.repeat(selected, span, axis=1), ((0, 0), (0, self.num_key_blocks - groups * span)))
      remaining = remaining & ~covered
      schedule.append((jnp.argsort(~selected, axis=1) * span, selected.sum(1)))
    return schedule

  def fold(self, step: Callable, schedule: Schedule, carry):
    """Folds step(span, has_masked, j, carry) over the scheduled blocks of keys, for one block of queries.

    Args:
      step: (span, has_masked, j, carry) -> carry, for the blocks of keys j ... j + span - 1; `has_masked` is whether
        they may contain masked positions.
      schedule: the entries of `Blocks.schedule` for one block of queries.
      carry: the carry before the first block.

    Returns:
      The carry after the last block.
    """
    for (span, has_masked), (order, count) in zip(self.kinds, schedule, strict=True):
      run = functools.partial(step, span, has_masked)
      if span == self.num_key_blocks:
        # Not a loop: its body would not depend on the index, and XLA would hoist and run it even if `count` is 0.
        carry = jax.lax.cond(count > 0, functools.partial(run, 0), lambda carry: carry, carry)
      else:
        carry = jax.lax.fori_loop(0, count, lambda n, carry, run=run, order=order: run(order[n], carry), carry)
    return carry


class BlockedInputs(NamedTuple):
  """Inputs of `flash.attention_context` that the sequences of a batch may share, prepared once for all of them.

  Attributes:
    structure: the mask without its array; masks the padding of keys.
    mask: the array of the mask, padded and transposed, [S, 1] or [S, T], or None. In [S, T] only the partly masked
      blocks are copied, because no other block is read.
    bias, factors: padded and transposed [S, T], or None.
    schedule: see Blocks.schedule.
  """

  structure: Mask
  mask: jax.Array | None
  bias: jax.Array | None
  factors: jax.Array | None
  schedule: Schedule

  @classmethod
  def of(cls, mask: Mask, bias, factors, blocks: Blocks, size: int) -> 'BlockedInputs':
    """Prepares the inputs of `flash.attention_context`.

    Args:
      mask, bias, factors: as in `flash.attention_context`.
      blocks: the partition of queries and keys.
      size: S.
    """
    length = mask.length
    if size < blocks.num_key_blocks * blocks.key_block:
      length = jnp.asarray(size) if length is None else jnp.minimum(length, size)
    queries, keys = mask.query_segments, mask.key_segments
    if queries is not None:
      queries = blocks.by_query(queries).reshape(-1)
      keys = blocks.pad_keys(keys)
    parts = {'length': length, 'query_segments': queries, 'key_segments': keys, 'remainder': None}
    structure = dataclasses.replace(mask, **parts)
    live, full = blocks.classify_structure(structure)
    transposed = None
    if mask.remainder is not None:
      array = blocks.pad(mask.remainder)
      live, full = (x & y for x, y in zip((live, full), blocks.classify_blocks(array), strict=True))
    schedule = blocks.schedule(live, full)
    if mask.remainder is not None:
      transposed = array.T if array.shape[0] == 1 else _transpose_partly_masked(array, *schedule[-1])
    bias, factors = (None if x is None else blocks.pad(x).T for x in (bias, factors))
    return cls(structure, transposed, bias, factors, schedule)

  def mask_block(self, blocks: Blocks, i, j, span: int) -> jax.Array:
    """Returns the mask [keys, query_block or 1] of blocks (i, j ... j + span - 1).

    Args:
      blocks: the partition of queries and keys.
      i: index of the block of queries.
      j: index of the first block of keys.
      span: number of blocks of keys.
    """
    array = True if self.mask is None else blocks.slice_block(self.mask, i, j, span)
    if self.structure.is_shared and self.structure.length is None:
      return array
    first_query, first_key = i * blocks.query_block, j * blocks.key_block
    return self.structure.block(first_query, blocks.query_block, first_key, span * blocks.key_block).T & array


@shard_over_rows
@in_turn_on_cpus
def _transpose_partly_masked(mask: jax.Array, order: jax.Array, count: jax.Array) -> jax.Array:
  """Transposes the blocks of a padded mask [T, S] that are read; the others become False.

  Args:
    mask: the mask.
    order, count: blocks of the last kind of a schedule.
  """
  query_block = mask.shape[0] // order.shape[0]
  key_block = mask.shape[1] // order.shape[1]

  def transpose_row(transposed, xs):
    i, order, count = xs

    def transpose_block(n, transposed):
      block = jax.lax.dynamic_slice(mask, (i * query_block, order[n] * key_block), (query_block, key_block))
      return jax.lax.dynamic_update_slice(transposed, block.T, (order[n] * key_block, i * query_block))

    return jax.lax.fori_loop(0, count, transpose_block, transposed), None

  start = vary_like(jnp.zeros(mask.shape[::-1], bool), mask, order, count)
  return jax.lax.scan(transpose_row, start, (jnp.arange(order.shape[0]), order, count))[0]


def _split_evenly(n: int) -> tuple[int, int]:
  """(number of blocks, size of a block) for n queries or keys, at most BLOCK to a block."""
  blocks = max(1, -(-n // BLOCK))
  return blocks, -(-n // blocks)
