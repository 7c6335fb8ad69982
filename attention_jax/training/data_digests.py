"""Digests of the data of a run, by split: resuming with other data is an error."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.atomic import write_text
from attention_jax.errors import UserError

DATA_DIGESTS_FILE = 'data.json'


def compute_digests(splits: Mapping[str, Any]) -> dict[str, str]:
  """Returns digests by split: 16 hexadecimal digits that cover all arrays of its tree, with their types and shapes."""
  return {name: _digest(tree) for name, tree in splits.items()}


def check_digests(folder: str | Path, digests: Mapping[str, str], log: Callable[[str], None] = print) -> None:
  """Compares the digests of the current data with those that the run stored at its start.

  Stores nothing: the caller then stores the current digests with `store_digests`.

  Args:
    folder: the run folder.
    digests: digests of the current data.
    log: called with a line if the run stored no digests, so that nothing can be compared.

  Raises:
    UserError: if a split differs, or if the stored digests cannot be read.
  """
  path = Path(folder) / DATA_DIGESTS_FILE
  if not path.is_file():  # the run was killed before it stored them, or its version stored none
    log(f'{path} does not exist: cannot check that the data are unchanged; storing their digests now')
    return
  try:
    stored = json.loads(path.read_text('utf-8'))
    changed = [name for name in stored.keys() | digests.keys() if stored.get(name) != digests.get(name)]
  except (OSError, ValueError, AttributeError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error
  if changed:
    raise UserError(
      f'{folder} was trained on other data: {", ".join(sorted(changed))} (or the vocabulary) changed since; '
      f'restore the earlier data, choose another folder, or delete {path} to continue with the current data'
    )


def store_digests(folder: str | Path, digests: Mapping[str, str]) -> None:
  """Writes the digests into a run folder; of several processes, only the first one writes."""
  if jax.process_index() == 0:
    write_text(Path(folder) / DATA_DIGESTS_FILE, json.dumps(dict(digests), indent=2) + '\n')


def _digest(tree: Any) -> str:
  digest = hashlib.blake2b(digest_size=8)
  for leaf in jax.tree.leaves(tree):
    array = np.ascontiguousarray(leaf)  # at least one axis
    digest.update(f'{array.dtype.str}{array.shape}'.encode())
    digest.update(array.reshape(-1).view(np.uint8))  # bytes, because hashlib reads no bfloat16
  return digest.hexdigest()
