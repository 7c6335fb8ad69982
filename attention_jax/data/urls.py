"""Files behind URLs, such as gs:// and s3://, which fsspec reads if the package of their file system is installed."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import BinaryIO

from attention_jax.errors import UserError


def is_url(path: str) -> bool:
  """Returns whether a path names a file system by a prefix such as 'gs://'."""
  return '://' in path


def copy_name(url: str) -> str:
  """Returns the name of the copy of a folder in a cache: readable, and unique by its digest."""
  url = url.rstrip('/')
  digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
  return f'{url.rpartition("/")[2]}-{digest}'


def read_url(path: str) -> bytes:
  """Returns the content of a file.

  Raises:
    UserError: if the file system is unknown or its package is not installed, and if the file cannot be read.
  """
  with report_url_errors(path), open_url(path) as file:
    return file.read()


def open_url(path: str) -> BinaryIO:
  """Opens a file for reading; its errors are those of its file system, see `report_url_errors`."""
  import fsspec

  return fsspec.open(path, 'rb').open()


@contextlib.contextmanager
def report_url_errors(path: str) -> Iterator[None]:
  """Turns every error of its block into a UserError that names the file; leaves UserErrors as they are."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:  # every file system raises its own kinds
    # For http, fsspec raises FileNotFoundError from whatever went wrong, such as a refused connection.
    reason = (error.__cause__ or error) if isinstance(error, FileNotFoundError) else error
    if isinstance(reason, FileNotFoundError):
      raise UserError(f'{path}: no such file') from None
    raise _unreadable_error(path, reason) from error


def _unreadable_error(path: str, reason: BaseException) -> UserError:
  return UserError(f'{path}: cannot be read ({" ".join(str(reason).split()) or type(reason).__name__})')


def url_exists(path: str) -> bool:
  """Returns whether there is such a file; False if its file system cannot be read."""
  import fsspec

  try:
    system, name = fsspec.url_to_fs(path)
    return system.exists(name)
  except Exception:  # `read_url` reports the reason
    return False


def list_url(path: str) -> list[str]:
  """Returns the names of the files and folders in a folder.

  Raises:
    UserError: if the file system or the folder cannot be read.
  """
  import fsspec

  try:
    system, name = fsspec.url_to_fs(path)
    return [entry.rstrip('/').rpartition('/')[2] for entry in system.ls(name, detail=False)]
  except Exception as error:  # every file system raises its own kinds
    raise _unreadable_error(path, error) from error
