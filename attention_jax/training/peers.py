"""Processes that train together: checks that inputs agree, raises an error of one process in all, and shares work.

Functions that communicate are trivial in a program of one process; otherwise every process must call them at the same
point.
"""

import contextlib
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from attention_jax.errors import UserError
from attention_jax.training.partition import fetch
from attention_jax.training.threads import map_in_threads, program_threads
from attention_jax.training.watch import Watch, unwatched

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain')  # those on which an update depends
MAX_SHOWN = 60  # characters of a value in an error

Batch = TypeVar('Batch')


def exchange(text: str) -> list[str]:
  """Returns the texts of all processes, by their index."""
  return [data.tobytes().decode() for data in gather(np.frombuffer(text.encode(), np.uint8))]


def gather(tree: Any) -> list[Any]:
  """Returns the trees of all processes, by their index.

  Args:
    tree: a tree of numpy arrays. Its structure, dtypes and ranks are the same in every process; sizes may differ.
  """
  if jax.process_count() == 1:
    return [tree]
  arrays, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
  data = np.frombuffer(b''.join(array.tobytes() for array in arrays), np.uint8)
  header = np.array([data.size, *itertools.chain.from_iterable(array.shape for array in arrays)], np.int32)
  headers = multihost_utils.process_allgather(header)
  padded = np.pad(data, (0, int(headers[:, 0].max()) + 1 - data.size))  # + 1: not empty, even if all arrays are
  rows = multihost_utils.process_allgather(padded)
  return [
    structure.unflatten(_unpack(row, sizes.tolist(), arrays)) for row, sizes in zip(rows, headers[:, 1:], strict=True)
  ]


def _unpack(row: np.ndarray, sizes: Sequence[int], like: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
  """Yields the arrays of one process from their bytes, with the ranks and dtypes of those of `like`."""
  offset = 0
  for array in like:
    shape = sizes[: array.ndim]
    sizes = sizes[array.ndim :]
    count = math.prod(shape)
    yield np.frombuffer(row, array.dtype, count, offset).reshape(shape)
    offset += count * array.dtype.itemsize


def map_batches(
  fn: Callable[[Batch], Any], batches: Iterable[Batch], watch: Watch = unwatched, mesh: Mesh | None = None
) -> Iterator[tuple[Batch, Any]]:
  """Yields each batch with fn(batch), in order; every process computes its share, and yields the results of all.

  With N processes, process i computes batches i, i + N, ...; the results of N batches are exchanged at a time, so that
  memory does not grow with their number. A batch is computed as a whole by one process, with the same numbers as in a
  program of one process. On a single CPU device, several batches are computed at the same time, see `program_threads`.
  On a mesh of the devices of several processes, all compute each batch together.

  Args:
    fn: returns a tree of arrays, whose structure, dtypes and ranks are the same for every batch. Several threads may
      call it at the same time, see `map_in_threads`.
    batches: the same in every process.
    watch: called before each group of batches is read, at the same points in every process; what it raises ends the
      iteration.
    mesh: the mesh on which `fn` computes; by default one of this process's devices.
  """
  total = operator.length_hint(batches, 0)
  if mesh is not None and mesh.is_multi_process:
    yield from _map_together(fn, batches, watch, total)
    return
  done = 0

  def read_groups():
    remaining = iter(batches)
    while group := list(itertools.islice(remaining, jax.process_count())):
      watch(done, total)
      yield group

  def compute_share(group):
    # A process without a batch of its own repeats the last one.
    return group, jax.device_get(fn(group[min(jax.process_index(), len(group) - 1)]))

  for group, results in map_in_threads(compute_share, read_groups(), program_threads()):
    yield from zip(group, gather(results)[: len(group)], strict=True)
    done += len(group)


def _map_together(
  fn: Callable[[Batch], Any], batches: Iterable[Batch], watch: Watch, total: int
) -> Iterator[tuple[Batch, Any]]:
  """`map_batches` on a mesh of several processes."""
  for done, batch in enumerate(batches):
    watch(done, total)
    yield batch, fetch(fn(batch))


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """Context manager after which all processes continue, or all raise the UserError of the first one that failed."""
  local_error = None
  try:
    yield
  except UserError as error:
    local_error = error
  errors = exchange('\n'.join(local_error.lines) if local_error else '')
  failed = [index for index, error in enumerate(errors) if error]
  if local_error and set(errors) == {errors[0]}:
    raise local_error  # the same one everywhere
  if failed:
    raise UserError(f'process {failed[0]} of {len(errors)}: {errors[failed[0]]}') from local_error


def check_agreement(values: Mapping[str, str]) -> None:
  """Checks that all processes have the same values.

  Args:
    values: a text for each thing that must be the same, by name.

  Raises:
    UserError: in every process, naming the first value that differs.
  """
  if jax.process_count() == 1:
    return
  digests = exchange(_digest('\n'.join(f'{name} = {value}' for name, value in sorted(values.items()))))
  process = next((index for index, digest in enumerate(digests) if digest != digests[0]), None)
  if process is None:
    return
  shown = exchange(json.dumps({name: _shorten(value) for name, value in values.items()}))
  first = json.loads(shown[0])
  other = json.loads(shown[process])
  name = next(name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name))
  raise UserError(
    f'{name} is {first.get(name, "absent")} in process 0, {other.get(name, "absent")} in process {process}; '
    'all processes need the same command, packages and data'
  )


def package_versions() -> dict[str, str]:
  """Returns the versions of those PACKAGES that are installed, by names such as 'the version of jax'."""
  versions = {}
  for name in PACKAGES:
    with contextlib.suppress(metadata.PackageNotFoundError):
      versions[f'the version of {name}'] = metadata.version(name)
  return versions


def copy_from_first(folder: Path) -> None:
  """Copies the files in `folder` of process 0 to `folder` of every other process; subfolders are not copied."""
  names = exchange('\n'.join(sorted(path.name for path in folder.iterdir() if path.is_file())))[0]
  for name in filter(None, names.split('\n')):
    path = folder / name
    data = np.frombuffer(path.read_bytes() if jax.process_index() == 0 else b'', np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.asarray(data.size)))
    content = multihost_utils.broadcast_one_to_all(data if jax.process_index() == 0 else np.zeros(size, np.uint8))
    path.write_bytes(np.asarray(content).tobytes())


def _shorten(value: str) -> str:
  """Replaces the end of a long value by a digest of the whole."""
  return value if len(value) <= MAX_SHOWN else f'{value[:MAX_SHOWN]}... (digest {_digest(value)})'


def _digest(text: str) -> str:
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
