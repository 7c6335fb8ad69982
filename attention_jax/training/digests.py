"""Digests of the files of a run folder and of its data, and checksums of the arrays of its checkpoints.

Digests of files, such as the config, are stored in digests.json and checked whenever the run is opened; those of the
data, by split, in data.json: resuming with other data is an error. Checksums of arrays are part of each checkpoint.
They are independent of how the arrays are sharded: each process adds up those of its own shards. The checksum of an
array is the sum of its elements, read as unsigned integers, each times an odd weight for every axis, modulo 2^64. One
changed element always changes it: an odd weight is invertible.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from attention_jax.atomic import write_text
from attention_jax.errors import UserError

FILE_DIGESTS = 'digests.json'
DATA_DIGESTS_FILE = 'data.json'
AXIS_STRIDE = np.uint64(2**40)  # more than the positions of an axis: no two axes have the same weights


def check_file_digests(folder: epath.PathLike) -> None:
  """Checks that files of a run folder are those that the run wrote.

  Args:
    folder: the run folder. Files without a stored digest are not checked.

  Raises:
    UserError: for a file that is missing, has changed or cannot be read.
  """
  folder = epath.Path(folder)
  changes = []
  for name, digest in _read(folder).items():
    path = folder / name
    try:
      if _digest(path) != digest:
        changes.append(f'{name} has changed')
    except FileNotFoundError:
      changes.append(f'{name} is missing')
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
      changes.append(f'{name} cannot be read ({getattr(error, "strerror", None) or error})')
  if changes:
    raise UserError(
      f'{folder} is not as the run stored it: {", ".join(changes)}; restore the files, or delete '
      f'{folder / FILE_DIGESTS} to use the files as they are'
    )


def digested_files(folder: epath.PathLike) -> list[str]:
  """Returns the names of the files of a run folder that have digests."""
  return list(_read(epath.Path(folder)))


def drop_file_digests(folder: epath.PathLike, names: Iterable[str] = ()) -> None:
  """Removes the digests of files before they are written, so that a killed writer leaves no wrong digests.

  Args:
    folder: the run folder.
    names: names of the files; if empty, all.
  """
  digests = _read(epath.Path(folder))
  dropped = set(names) or set(digests)
  _write(epath.Path(folder), {name: digest for name, digest in digests.items() if name not in dropped}, digests)


def add_file_digests(folder: epath.PathLike, names: Iterable[str]) -> None:
  """Stores digests of files as they are now.

  Args:
    folder: the run folder.
    names: names of files in it.
  """
  digests = _read(epath.Path(folder))
  _write(epath.Path(folder), digests | {name: _digest(epath.Path(folder) / name) for name in names}, digests)


def _digest(path: epath.Path) -> str:
  return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _read(folder: epath.Path) -> dict[str, str]:
  path = folder / FILE_DIGESTS
  try:
    return dict(json.loads(path.read_text()))
  except (FileNotFoundError, NotADirectoryError):
    return {}
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}; delete it to skip the check') from error


def _write(folder: epath.Path, digests: dict[str, str], before: dict[str, str]) -> None:
  if digests != before:
    write_text(folder / FILE_DIGESTS, json.dumps(digests, indent=2) + '\n')


def compute_digests(splits: Mapping[str, Any]) -> dict[str, str]:
  """Returns digests by split: 16 hexadecimal digits that cover all arrays of its tree, with their types and shapes."""
  return {name: _digest_of_arrays(tree) for name, tree in splits.items()}


def check_digests(folder: epath.PathLike, digests: Mapping[str, str], log: Callable[[str], None] = print) -> None:
  """Compares the digests of the current data with those that the run stored at its start.

  Stores nothing: the caller then stores the current digests with `store_digests`.

  Args:
    folder: the run folder.
    digests: digests of the current data.
    log: called with a line if the run stored no digests, so that nothing can be compared.

  Raises:
    UserError: if a split differs, or if the stored digests cannot be read.
  """
  path = epath.Path(folder) / DATA_DIGESTS_FILE
  if not path.exists():  # the run was killed before it stored them, or its version stored none
    log(f'{path} does not exist: cannot check that the data are unchanged; storing their digests now')
    return
  try:
    stored = json.loads(path.read_text())
    changed = [name for name in stored.keys() | digests.keys() if stored.get(name) != digests.get(name)]
  except (OSError, ValueError, AttributeError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error
  if changed:
    raise UserError(
      f'{folder} was trained on other data: {", ".join(sorted(changed))} (or the vocabulary) changed since; '
      f'restore the earlier data, choose another folder, or delete {path} to continue with the current data'
    )


def store_digests(folder: epath.PathLike, digests: Mapping[str, str]) -> None:
  """Writes the digests into a run folder; of several processes, only the first one writes."""
  if jax.process_index() == 0:
    write_text(epath.Path(folder) / DATA_DIGESTS_FILE, json.dumps(dict(digests), indent=2) + '\n')


def _digest_of_arrays(tree: Any) -> str:
  digest = hashlib.blake2b(digest_size=8)
  for leaf in jax.tree.leaves(tree):
    array = np.ascontiguousarray(leaf)  # at least one axis
    digest.update(f'{array.dtype.str}{array.shape}'.encode())
    digest.update(array.reshape(-1).view(np.uint8))  # bytes, because hashlib reads no bfloat16
  return digest.hexdigest()


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
