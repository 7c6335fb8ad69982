"""Checksums of arrays, independent of how the arrays are sharded: each process adds up those of its own shards.

The checksum of an array is the sum of its elements, read as unsigned integers, each times an odd weight for every axis,
modulo 2^64. One changed element always changes it: an odd weight is invertible.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

AXIS_STRIDE = np.uint64(2**40)  # more than the positions of an axis: no two axes have the same weights


def tree_checksums(tree: Any) -> dict[str, str]:
  """Returns the checksum of every array of a tree, 16 hexadecimal digits by the path of the array.

  Args:
    tree: a tree of arrays; jax.Arrays may be sharded over several processes, which must then all call this function.
  """
  arrays = jax.tree.leaves_with_path(tree)
  names = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in arrays]
  sums = np.array([_checksum_of_local_shards(array) for _, array in arrays], np.uint64)
  is_local = [not isinstance(array, jax.Array) or array.is_fully_addressable for _, array in arrays]
  if not all(is_local):
    parts = multihost_utils.process_allgather(sums.view(np.uint32))  # jax has no 64-bit integers by default
    totals = np.ascontiguousarray(parts).view(np.uint64).sum(axis=0)
    sums = np.where(is_local, sums, totals)
  return {name: f'{total:016x}' for name, total in zip(names, sums.tolist(), strict=True)}


def _checksum_of_local_shards(array: jax.Array | np.ndarray) -> np.uint64:
  """The part of a checksum that comes from the shards of this process; of replicated shards, one counts."""
  if not isinstance(array, jax.Array):
    return _checksum(array, [0] * array.ndim)
  with np.errstate(over='ignore'):
    return sum(
      (
        _checksum(np.asarray(shard.data), [bounds.start or 0 for bounds in shard.index])
        for shard in array.addressable_shards
        if shard.replica_id == 0
      ),
      start=np.uint64(0),
    )


def _checksum(values: np.ndarray, starts: list[int]) -> np.uint64:
  """The part of a checksum that comes from one shard.

  Args:
    values: the elements of the shard.
    starts: position of its first element along each axis of the array.
  """
  # A scalar gets an axis of one position, whose weight is 1.
  total = np.ascontiguousarray(values).reshape(values.shape or (1,)).view(f'u{values.itemsize}')
  for axis in reversed(range(total.ndim)):
    start = starts[axis] if starts else 0
    total = np.einsum('...s,s->...', total, _weights(axis, start, start + total.shape[axis]))
  return np.uint64(total)


def _weights(axis: int, start: int, stop: int) -> np.ndarray:
  """Odd weights of the positions `start` to `stop` - 1 of an axis, uint64: SplitMix64 (Steele et al., 2014)."""
  z = (np.arange(start, stop, dtype=np.uint64) + np.uint64(axis) * AXIS_STRIDE) * np.uint64(0x9E3779B97F4A7C15)
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return (z ^ (z >> np.uint64(31))) | np.uint64(1)
