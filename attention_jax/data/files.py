"""Lines of a text file, plain or .gz, with one clear error for everything that can be wrong with it."""

import difflib
import gzip
import os
import zipfile
import zlib

import numpy as np

from attention_jax.errors import UserError

BYTE_ORDER_MARK = '\ufeff'


def read_lines(path: str) -> list[str]:
  """The lines of a UTF-8 file, split at '\\n' only. A byte order mark and the '\\r' of CRLF line ends are stripped.

  Raises: UserError when the file is missing, a directory, unreadable, empty, not UTF-8, or not the gzip it says it is.
  """
  return split_lines(_read_bytes(path), path)


def split_lines(data: bytes, path: str) -> list[str]:
  """The lines of `data` as `read_lines` gives them; `path` is what errors call it."""
  try:
    text = data.decode('utf-8')
  except UnicodeDecodeError as error:
    line = data.count(b'\n', 0, error.start) + 1
    column = error.start - data.rfind(b'\n', 0, error.start)
    raise invalid_utf8_error(path, line, column, data[error.start]) from None
  text = text.removeprefix(BYTE_ORDER_MARK)
  if not text:
    raise empty_file_error(path)
  # Not str.splitlines: it also splits at characters that occur inside sentences, such as U+2028 or U+0085.
  lines = text.removesuffix('\n').split('\n')
  return [line.removesuffix('\r') for line in lines] if '\r' in text else lines


def invalid_utf8_error(path: str, line: int, column: int, byte: int) -> UserError:
  """The error of a byte that is no UTF-8, by its place in the file, counted from 1."""
  what = f'byte 0x{byte:02x}, number {column} of the line'
  return UserError(f'{path}:{line}: not UTF-8 ({what}); convert the file to UTF-8')


def empty_file_error(path: str) -> UserError:
  """The error of a file without any text."""
  return UserError(f'{path}: the file is empty')


def read_arrays(path: str) -> dict[str, np.ndarray]:
  """The arrays of an .npz file by their names. Raises: UserError for one that is not whole, or holds objects."""
  try:
    with open(path, 'rb') as raw, np.load(raw) as file:
      return {name: file[name] for name in file}
  except FileNotFoundError:
    raise UserError(f'{path}: no such file{_nearest(path)}') from None
  except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
    raise UserError(f'{path}: not an .npz file of numbers that can be read ({error})') from error


def cache_folder(name: str) -> str:
  """Where what can be made again is kept between runs: a folder of this user's cache."""
  home = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  return os.path.join(home, 'attention_jax', name)


def _read_bytes(path: str) -> bytes:
  try:
    with open(os.path.expanduser(path), 'rb') as file:
      data = file.read()
    return gzip.decompress(data) if path.endswith('.gz') else data
  except FileNotFoundError:
    raise UserError(f'{path}: no such file{_nearest(path)}') from None
  except IsADirectoryError:
    raise UserError(f'{path}: is a directory, expected a file') from None
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise UserError(f'{path}: not a whole gzip file ({error})') from None
  except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
    raise UserError(f'{path!r}: cannot be read ({getattr(error, "strerror", None) or error})') from None


def _nearest(path: str) -> str:
  folder, name = os.path.split(path)
  if not os.path.isdir(folder or '.'):
    return f" (there is no folder '{folder}')"
  near = difflib.get_close_matches(name, os.listdir(folder or '.'), n=1)
  return f" (did you mean '{os.path.join(folder, near[0])}'?)" if near else ''
