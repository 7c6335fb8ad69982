"""Atomic writes: a file or folder appears whole or not at all, even if the process is killed. JSON for them."""

import contextlib
import errno
import io
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIX = '.part'  # suffix of unfinished files, whose names begin with a dot


@contextlib.contextmanager
def write_atomic(path: str | os.PathLike) -> Iterator[Path]:
  """Yields a temporary path beside `path`, and renames it onto `path` when the block succeeds.

  The name is unique, so that several processes may write the same file: the last rename wins. When the block fails, the
  temporary file is removed and `path` is left as it was.

  Args:
    path: the file to write; its folder must exist. An object of a bucket, which appears whole, is copied from the
      temporary file.
  """
  if '://' in os.fspath(path):
    from etils import epath  # of an extra

    with tempfile.TemporaryDirectory() as folder:
      temporary = Path(folder, os.path.basename(path))
      yield temporary
      epath.Path(path).write_bytes(temporary.read_bytes())
    return
  path = Path(path)
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}{SUFFIX}')
  try:
    yield temporary
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def write_folder_atomic(path: str | Path) -> Iterator[Path]:
  """Yields a new empty folder beside `path`, and renames it to `path` when the block succeeds.

  When the block fails, the folder is removed with everything in it.

  Args:
    path: the folder to write; its parent is created if necessary.

  Raises:
    FileExistsError: if `path` exists at the start.
    OSError: if the folder cannot be written.
  """
  path = Path(path).absolute()
  if path.exists():
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}{SUFFIX}')
  try:
    temporary.mkdir()
    yield temporary
    temporary.rename(path)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes UTF-8 text atomically."""
  write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
  """Writes bytes atomically."""
  with write_atomic(path) as temporary:
    temporary.write_bytes(data)


def write_all(file: io.RawIOBase, data: bytes) -> None:
  """Writes bytes to an unbuffered file, whose `write` may write only a part, as on a disk that is nearly full."""
  rest = memoryview(data)
  while rest:
    rest = rest[file.write(rest) :]


def to_json(value: Any, **options: Any) -> str:
  """Returns JSON that every parser reads: NaN and infinities, which JSON lacks, are null.

  Args:
    value: the value.
    **options: those of json.dumps.
  """
  try:
    return json.dumps(value, allow_nan=False, **options)
  except ValueError:
    finite = json.loads(json.dumps(value, **options), parse_constant=lambda _: None)
    return json.dumps(finite, allow_nan=False, **options)


def null_as_nan(record: dict[str, Any]) -> dict[str, Any]:
  """Returns a record of numbers that `to_json` wrote, with NaN for null; the `object_hook` of json.loads."""
  return {name: math.nan if value is None else value for name, value in record.items()}


def is_unfinished(path: Any) -> bool:
  """Returns whether a path is a temporary one of a `write_atomic` that was killed, or that still writes."""
  return path.name.startswith('.') and path.name.endswith(SUFFIX)
