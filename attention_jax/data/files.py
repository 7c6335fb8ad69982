"""Reads lines of text files and arrays of .npz files, with one clear error for everything that can be wrong."""

import codecs
import contextlib
import difflib
import gzip
import io
import json
import os
import stat
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from attention_jax.data.urls import is_url, read_url
from attention_jax.errors import UserError

BYTE_ORDER_MARK = '\ufeff'


def read_lines(path: str) -> list[str]:
  """Returns the lines of a UTF-8 file, plain or .gz, on a disk or behind a URL, split at '\\n' only.

  A byte order mark and a '\\r' at the end of a line are stripped.

  Raises:
    UserError: if the file is missing, a directory, a pipe or a device, unreadable, empty, not UTF-8, or named .gz but
      not a gzip file.
  """
  return split_lines(read_bytes(path), path)


def split_lines(data: bytes, path: str, first: int = 1) -> list[str]:
  """Returns the lines of `data` as `read_lines` does.

  Args:
    data: the whole file, or whole lines of it.
    path: its name in errors.
    first: number of the first line; only line 1 has a byte order mark.
  """
  try:
    text = data.decode('utf-8')
  except UnicodeDecodeError as error:
    line = data.count(b'\n', 0, error.start) + first
    column = error.start - data.rfind(b'\n', 0, error.start)
    raise invalid_utf8_error(path, line, column, data[error.start]) from None
  if first == 1:
    text = text.removeprefix(BYTE_ORDER_MARK)
  if not text:
    raise empty_file_error(path)
  # Not str.splitlines: it also splits at characters that occur inside sentences, such as U+2028 or U+0085.
  lines = text.removesuffix('\n').split('\n')
  return [line.removesuffix('\r') for line in lines] if '\r' in text else lines


def parse_object(line: str, where: str) -> dict[str, Any]:
  """Returns the JSON object of a line. Raises UserError, which names `where`, for anything else."""
  if not line.strip():
    raise UserError(f'{where}: expected a JSON object, got a blank line')
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{where}: invalid JSON ({error})') from None
  if not isinstance(row, dict):
    raise UserError(f'{where}: expected a JSON object, got {line[:40]!r}')
  return row


def read_json(path: str, is_optional: bool = False) -> dict[str, Any]:
  """Returns the JSON object of a file, {} if there is no such file and it is optional.

  Raises:
    UserError: as `read_lines` does, and for anything but a JSON object.
  """
  if is_optional and not os.path.exists(path):
    return {}
  return parse_object('\n'.join(read_lines(path)), path)


def invalid_utf8_error(path: str, line: int, column: int, byte: int) -> UserError:
  """Returns the error of a byte that is not UTF-8, at a line and a byte of that line, both counted from 1.

  Args:
    path: the file.
    line: number of the line.
    column: number of the byte in the line.
    byte: value of the byte, from 0 to 255.
  """
  position = f'byte 0x{byte:02x}, number {column} of the line'
  return UserError(f'{path}:{line}: not UTF-8 ({position}); convert the file to UTF-8')


def empty_file_error(path: str) -> UserError:
  """Returns the error of a file without any text."""
  return UserError(f'{path}: the file is empty')


class ArrayFile(Mapping[str, np.ndarray]):
  """The arrays of an .npz file, on a disk or behind a URL, by name; each is read when it is used.

  A file behind a URL is first read into memory.

  Raises:
    UserError: if the file cannot be read, is not an .npz file, or contains Python objects.
  """

  def __init__(self, path: str):
    self._path = path
    with self._report_errors(), contextlib.ExitStack() as stack:
      self._file = np.load(stack.enter_context(open_file(path)))
      if not isinstance(self._file, np.lib.npyio.NpzFile):
        raise TypeError('a single array')
      weakref.finalize(self, stack.pop_all().close)

  def __contains__(self, name: object) -> bool:  # without reading the array
    return name in self._file.files

  def __iter__(self) -> Iterator[str]:
    return iter(self._file.files)

  def __len__(self) -> int:
    return len(self._file.files)

  def __getitem__(self, name: str) -> np.ndarray:
    with self._report_errors():
      return self._file[name]

  @contextlib.contextmanager
  def _report_errors(self) -> Iterator[None]:
    try:
      yield
    except FileNotFoundError:
      raise _missing_file_error(self._path) from None
    except UserError:
      raise
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
      raise UserError(f'{self._path}: cannot be read as an .npz file of numbers ({error})') from error


def read_arrays(path: str) -> dict[str, np.ndarray]:
  """Returns all arrays of an .npz file; see ArrayFile."""
  return dict(ArrayFile(path))


def open_file(path: str) -> BinaryIO:
  """Opens a file for reading, on a disk or behind a URL; a file behind a URL is first read into memory.

  Raises:
    OSError: if it cannot be read.
    ValueError: for a NUL character in the path.
    UserError: for a pipe or a device, and for a URL that cannot be read.
  """
  if is_url(path):
    return io.BytesIO(read_url(path))
  path = os.path.expanduser(path)
  check_regular_file(path)
  return open(path, 'rb')


def join_path(folder: str, path: str) -> str:
  """Returns the path of a file of a task: below `folder`, unless it is absolute, begins with '~', or is a URL."""
  return path if is_url(path) else os.path.join(folder, os.path.expanduser(path))


def check_regular_file(path: str) -> None:
  """Raises UserError for a pipe or a device, whose content may never end; opening the path finds other mistakes.

  Raises:
    OSError: if there is no such file.
  """
  mode = os.stat(path).st_mode
  if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
    raise UserError(f'{path}: is a pipe or a device, expected a file')


def cache_folder(name: str) -> str:
  """Returns the folder of `name` in the cache of the user, for data that can be computed or downloaded again."""
  home = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  return os.path.join(home, 'attention_jax', name)


def iter_raw_lines(path: str) -> Iterator[bytes]:
  """Yields the lines of a file, plain or .gz, as bytes without their ends.

  A file on a disk may be larger than memory. A byte order mark is stripped.

  Raises:
    UserError: as `read_lines` does, except for the encoding.
  """
  with report_read_errors(path), open_file(path) as raw, gzip.open(raw) if path.endswith('.gz') else raw as file:
    for number, line in enumerate(strip_line_ends(file, path), 1):
      yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def strip_line_ends(file: Iterable[bytes], path: str) -> Iterator[bytes]:
  """Yields the lines of an open file without their ends, the first with its byte order mark.

  Args:
    file: the file, opened for reading bytes.
    path: its path, for errors.

  Raises:
    UserError: if the file is empty or consists of a byte order mark.
  """
  number = 0
  for number, line in enumerate(file, 1):
    if number == 1 and line == codecs.BOM_UTF8:  # without a line end, it is the only line
      raise empty_file_error(path)
    yield line.removesuffix(b'\n').removesuffix(b'\r')
  if not number:
    raise empty_file_error(path)


def read_bytes(path: str) -> bytes:
  """Returns the content of a file, plain or .gz, on a disk or behind a URL.

  Raises:
    UserError: as `read_lines` does, except for the encoding and an empty file.
  """
  with report_read_errors(path), open_file(path) as file:
    data = file.read()
    return gzip.decompress(data) if path.endswith('.gz') else data


@contextlib.contextmanager
def report_read_errors(path: str) -> Iterator[None]:
  """Turns errors of reading a file into UserErrors."""
  try:
    yield
  except FileNotFoundError:
    raise _missing_file_error(path) from None
  except IsADirectoryError:
    raise UserError(f'{path}: is a directory, expected a file') from None
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise UserError(f'{path}: not a whole gzip file ({error})') from None
  except UserError:
    raise
  except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
    raise UserError(f'{path!r}: cannot be read ({getattr(error, "strerror", None) or error})') from None


def _missing_file_error(path: str) -> UserError:
  """The error of a missing file, with the nearest name in its folder."""
  folder, name = os.path.split(path)
  local_folder = os.path.expanduser(folder) or '.'
  if not os.path.isdir(local_folder):
    return UserError(f"{path}: no such file (there is no folder '{folder}')")
  names = []
  with contextlib.suppress(OSError):  # a folder may be accessible without permission to list it
    names = os.listdir(local_folder)
  nearest = difflib.get_close_matches(name, names, n=1)
  hint = f" (did you mean '{os.path.join(folder, nearest[0])}'?)" if nearest else ''
  return UserError(f'{path}: no such file{hint}')
