"""Digests of files of a run folder, such as the config: stored in digests.json, checked whenever the run is opened."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from attention_jax.atomic import write_text
from attention_jax.errors import UserError

FILE_DIGESTS = 'digests.json'


def check_file_digests(folder: str | Path) -> None:
  """Checks that files of a run folder are those that the run wrote.

  Args:
    folder: the run folder. Files without a stored digest are not checked.

  Raises:
    UserError: for a file that is missing, has changed or cannot be read.
  """
  folder = Path(folder)
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


def digested_files(folder: str | Path) -> list[str]:
  """Returns the names of the files of a run folder that have digests."""
  return list(_read(Path(folder)))


def drop_file_digests(folder: str | Path, names: Iterable[str] = ()) -> None:
  """Removes the digests of files before they are written, so that a killed writer leaves no wrong digests.

  Args:
    folder: the run folder.
    names: names of the files; if empty, all.
  """
  digests = _read(Path(folder))
  dropped = set(names) or set(digests)
  _write(Path(folder), {name: digest for name, digest in digests.items() if name not in dropped}, digests)


def add_file_digests(folder: str | Path, names: Iterable[str]) -> None:
  """Stores digests of files as they are now.

  Args:
    folder: the run folder.
    names: names of files in it.
  """
  digests = _read(Path(folder))
  _write(Path(folder), digests | {name: _digest(Path(folder) / name) for name in names}, digests)


def _digest(path: Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read(folder: Path) -> dict[str, str]:
  path = folder / FILE_DIGESTS
  try:
    return dict(json.loads(path.read_text('utf-8')))
  except (FileNotFoundError, NotADirectoryError):
    return {}
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}; delete it to skip the check') from error


def _write(folder: Path, digests: dict[str, str], before: dict[str, str]) -> None:
  if digests != before:
    write_text(folder / FILE_DIGESTS, json.dumps(digests, indent=2) + '\n')
