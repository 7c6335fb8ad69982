"""Weights as safetensors files: parameters with the names of docs/interop.md.

The name of a parameter is its path in the tree of flax, with dots: 'decoder.cell.attention.query_kernel.kernel'.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.atomic import write_bytes
from attention_jax.errors import UserError

SUFFIX = '.safetensors'
MAX_NAMES = 3  # names in a message


def flatten_names(params: Any) -> dict[str, Any]:
  """Returns the leaves of a tree of dictionaries by name."""
  leaves, _ = jax.tree.flatten_with_path(params)
  return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}


def unflatten_names(weights: Mapping[str, Any], like: Any, source: str = 'weights') -> Any:
  """Returns the tree of `like` with the arrays of `weights`.

  Args:
    weights: arrays by name.
    like: a tree of arrays or shapes.
    source: name of the file, for errors.

  Raises:
    UserError: for names that are missing or unknown, and for other shapes than those of `like`.
  """
  expected = flatten_names(like)
  if missing := sorted(expected.keys() - weights.keys()):
    raise UserError(f'{source}: {len(missing)} of {len(expected)} weights are missing: {abbreviate_names(missing)}')
  if unknown := sorted(weights.keys() - expected.keys()):
    raise UserError(f'{source}: {len(unknown)} names are not of this model: {abbreviate_names(unknown)}')
  for name, leaf in expected.items():
    if weights[name].shape != leaf.shape:
      raise UserError(f'{source}: {name} must be {list(leaf.shape)}, got {list(weights[name].shape)}')
  return jax.tree.map(lambda leaf, name: weights[name], like, _names_tree(like))


def abbreviate_names(names: Sequence[str]) -> str:
  """Returns the first names, separated by commas, for a message."""
  listed = ', '.join(names[:MAX_NAMES])
  return f'{listed}, ...' if len(names) > MAX_NAMES else listed


def check_suffix(path: str) -> str:
  """Returns the path. Raises UserError unless it ends with SUFFIX."""
  if not path.endswith(SUFFIX):
    raise UserError(f'{path} must end with {SUFFIX}')
  return path


def save_weights(params: Any, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
  """Writes parameters to a safetensors file.

  Args:
    params: a tree of dictionaries of arrays.
    path: the file.
    metadata: strings that are stored beside them.

  Raises:
    UserError: if safetensors is not installed.
  """
  # Not np.ascontiguousarray, which turns an array of shape () into one of shape (1,).
  arrays = {name: np.asarray(leaf, order='C') for name, leaf in flatten_names(params).items()}
  write_bytes(path, _library().save(arrays, metadata=dict(metadata or {})))


def load_weights(path: str | Path, like: Any) -> Any:
  """Reads parameters from a safetensors file.

  Args:
    path: the file.
    like: a tree of arrays or shapes, whose names and shapes the file must have; its dtypes are those of the result.

  Returns:
    The parameters.

  Raises:
    UserError: if safetensors is not installed, and if the file cannot be read or does not fit; the message names the
      first weights that do not.
  """
  params = unflatten_names(read_arrays(path), like, str(path))
  return jax.tree.map(lambda leaf, array: jnp.asarray(array, leaf.dtype), like, params)


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
  """Returns all arrays of a safetensors file by name. Raises UserError if it cannot be read, or without safetensors."""
  with _open(path) as file:
    return file.get_tensors()


def read_metadata(path: str | Path) -> dict[str, str]:
  """Returns the metadata of a safetensors file. Raises UserError if it cannot be read, or without safetensors."""
  with _open(path) as file:
    return file.metadata() or {}


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[Any]:
  """Opens a safetensors file; '~' stands for the home folder."""
  _library()
  import safetensors

  path = Path(path).expanduser()
  try:
    # `open` raises the errors of files that cannot be opened: those of safe_open have no `strerror`. safe_open reads
    # bfloat16, which safetensors.numpy.load does not.
    with path.open('rb'), safetensors.safe_open(path, 'numpy') as file:
      yield file
  except OSError as error:
    raise UserError(f'{path}: cannot be read ({error.strerror})') from None
  except Exception as error:  # the library raises exceptions of its own for damaged files
    raise UserError(f'{path}: not a safetensors file, or damaged ({error})') from None


def _library():
  try:
    import safetensors.numpy
  except ImportError:
    raise UserError(
      "reading and writing weights needs the package safetensors; expected pip install 'attention_jax[interop]'"
    ) from None
  return safetensors.numpy


def _names_tree(like: Any) -> Any:
  """The tree of `like` with the name of each leaf in its place."""
  return jax.tree.unflatten(jax.tree.structure(like), list(flatten_names(like)))
