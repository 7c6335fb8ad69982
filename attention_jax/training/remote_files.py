"""Files behind a URL, such as gs://bucket/run, accessed through fsspec. Every failure is a UserError of one line."""

import contextlib
import json
import posixpath
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attention_jax.errors import UserError


class RemoteFiles:
  """The files below a URL.

  Args:
    url: the folder; it need not exist.

  Attributes:
    url: the folder, without a slash at its end.

  Raises:
    UserError: if the URL names no folder, if the file system is unknown, or if its package is not installed.
  """

  def __init__(self, url: str):
    import fsspec

    self.url = url.rstrip('/')
    if '://' not in self.url:  # which fsspec would take for a local path
      raise UserError(f'{url!r} names no folder; expected a URL such as gs://bucket/run')
    try:
      self._system, self._root = fsspec.url_to_fs(self.url)
    except Exception as error:  # every file system raises its own kinds
      raise UserError(f'{self.url}: {_reason(error)}') from error

  def read_json(self, name: str) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is no such file."""
    with self._errors('read', name):
      try:
        self._system.invalidate_cache()  # listings that fsspec caches lack what other machines wrote
        return dict(json.loads(self._system.cat_file(self._path(name))))
      except FileNotFoundError:
        return None

  def write_json(self, name: str, value: dict[str, Any]) -> None:
    """Writes a JSON file under a temporary name and then moves it, so that the file appears whole."""
    temporary = self._path(f'{name}.{uuid.uuid4().hex}')
    with self._errors('write', name):
      self._make_parent(temporary)
      self._system.pipe_file(temporary, (json.dumps(value, indent=1) + '\n').encode())
      self._system.mv(temporary, self._path(name))

  def upload(self, path: Path, name: str) -> None:
    """Copies a file of this machine."""
    with self._errors('write', name):
      self._make_parent(self._path(name))
      self._system.put_file(str(path), self._path(name))

  def download(self, name: str, path: Path) -> None:
    """Copies a file to this machine."""
    with self._errors('read', name):
      self._system.get_file(self._path(name), str(path))

  def remove(self, name: str) -> None:
    """Removes a file, if there is one."""
    with self._errors('remove', name), contextlib.suppress(FileNotFoundError):
      self._system.rm_file(self._path(name))

  def names(self, folder: str) -> list[str]:
    """Returns the names of the files in a folder; none if there is no such folder."""
    with self._errors('read', folder):
      self._system.invalidate_cache()
      return [posixpath.basename(path) for path in self._system.find(self._path(folder))]

  def _path(self, name: str) -> str:
    return posixpath.join(self._root, name)

  def _make_parent(self, path: str) -> None:
    """Makes the folder of a file; object stores have none and ignore the call."""
    self._system.makedirs(posixpath.dirname(path), exist_ok=True)

  @contextlib.contextmanager
  def _errors(self, action: str, name: str) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # every file system raises its own kinds
      raise UserError(f'cannot {action} {self.url}/{name}: {_reason(error)}') from error


def _reason(error: Exception) -> str:
  return ' '.join(str(error).split())[:200] or type(error).__name__
