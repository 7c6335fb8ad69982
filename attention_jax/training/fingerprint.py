"""The data that a run began with, as digests in its folder: what goes on is to go on with the same."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.errors import UserError

STORED = 'data.json'


def compute_digests(splits: Mapping[str, Any]) -> dict[str, str]:
  """{split: 16 digits, of all arrays of its tree, their types and shapes}."""
  return {name: _digest(tree) for name, tree in splits.items()}


def check_digests(folder: str | Path, found: Mapping[str, str], log: Callable[[str], None] = print) -> None:
  """Raises: UserError where the run in this folder began with other splits than those found now.

  Args: log, is told where that cannot be known.
  """
  path = Path(folder).expanduser() / STORED
  if not path.is_file():  # killed before it had one, or of a version that stored none
    log(f'no {path}: whether the data are those that this run was begun with cannot be known; from now on it can')
    return
  try:
    stored = json.loads(path.read_text('utf-8'))
    other = [name for name in stored.keys() | found.keys() if stored.get(name) != found.get(name)]
  except (OSError, ValueError, AttributeError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error
  if other:
    raise UserError(
      f'{folder} was begun with other data: {", ".join(sorted(other))} (or the vocabulary) changed since; '
      f'possible: the data of then, another folder, or to delete {path} and go on with those of now'
    )


def store_digests(folder: str | Path, found: Mapping[str, str]) -> None:
  """Of the first process alone."""
  if jax.process_index() == 0:
    path = Path(folder) / STORED
    part = path.with_name(f'{STORED}.part')
    part.write_text(json.dumps(dict(found), indent=2) + '\n', 'utf-8')
    os.replace(part, path)


def _digest(tree: Any) -> str:
  digest = hashlib.blake2b(digest_size=8)
  for leaf in jax.tree.leaves(tree):
    array = np.ascontiguousarray(leaf)
    digest.update(f'{array.dtype.str}{array.shape}'.encode())
    digest.update(array.data if array.size else b'')
  return digest.hexdigest()
