"""The files of --plugins, which are stored with a run. Opening the run requires the same files."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from etils import epath

from attention_jax.atomic import write_bytes
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.testing import check_alignment, check_score

PLUGIN_FILE = 'plugin_{}.py'  # of a run folder, with the number of the file from 1
# Tables, their rows before the files are executed, and the check of a row.
_CHECKS = ((SCORES, dict(SCORES), check_score), (ALIGNMENTS, dict(ALIGNMENTS), check_alignment))

_contents: list[bytes] = []  # of the files that this process has executed; their rows are in the tables of the process


def set_plugins(paths: Sequence[str]) -> None:
  """Declares the files that have added rows to the tables of this process."""
  _contents[:] = [Path(path).read_bytes() for path in paths]


def check_added_rows() -> None:
  """Checks quickly that scores and alignments of the files obey the contract of masks and weights.

  Raises:
    UserError: for the first law that one of them breaks.
  """
  if not _contents:
    return
  for table, initial_rows, check in _CHECKS:
    for name, row in table.items():
      if initial_rows.get(name) is not row:
        check(name, quick=True)


def store_plugins(folder: epath.Path) -> list[str]:
  """Stores the files of this process in a run folder; returns the names of the files that it wrote."""
  names = [PLUGIN_FILE.format(number) for number in range(1, len(_contents) + 1)]
  for name, content in zip(names, _contents, strict=True):
    write_bytes(folder / name, content)
  return names


def stored_plugins(folder: epath.Path) -> list[epath.Path]:
  """Returns the files of plug-ins in a run folder, in their order."""
  paths = (folder / PLUGIN_FILE.format(number) for number in itertools.count(1))
  return list(itertools.takewhile(lambda path: path.exists(), paths))


def check_plugins(folder: epath.Path) -> None:
  """Raises UserError if a run was trained with plug-ins, and this process has executed other ones or none.

  The stored files are never executed automatically: a run folder may come from another person.
  """
  paths = stored_plugins(folder)
  flag = f'--plugins={",".join(map(str, paths))}'
  if paths and not _contents:
    raise UserError(f'{folder} was trained with plug-ins; add {flag}')
  if paths and [path.read_bytes() for path in paths] != _contents:
    raise UserError(f'{folder} was trained with other plug-ins; use {flag}')
