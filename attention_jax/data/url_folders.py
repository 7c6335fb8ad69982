"""Local copies of folders behind URLs, for data sets whose readers need local files."""

import contextlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path

from attention_jax.atomic import write_atomic, write_text
from attention_jax.data.files import cache_folder
from attention_jax.data.text import format_count
from attention_jax.data.urls import copy_name, is_url
from attention_jax.errors import UserError

VERSIONS = '.versions.json'  # in a copy: the version of each file when it was downloaded


def local_copy(folder: str, part: str = '') -> str:
  """Returns `folder` itself if it is a path, or the path of its copy in the cache if it is a URL.

  Only files that are new or have changed since the last call are downloaded; over http, changes are not detected.

  Args:
    folder: a path, or the URL of a folder.
    part: the only subfolder to copy, to the same place below the returned path; '' for the whole folder.

  Raises:
    UserError: if the folder behind a URL cannot be read or holds no files, or if its copy cannot be written.
  """
  if not is_url(folder):
    return folder
  import filelock

  url = folder.rstrip('/')
  copy = Path(cache_folder('data')) / copy_name(url)
  try:
    (copy / part).mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(copy.with_name(f'{copy.name}.lock')):  # of several processes, one downloads
      _update(f'{url}/{part}'.rstrip('/'), copy / part)
  except UserError:
    raise
  except Exception as error:  # each file system raises exceptions of its own
    reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())[:200] or type(error).__name__
    raise UserError(f'cannot copy {folder} to {copy}: {reason}') from error
  return str(copy)


def _update(url: str, copy: Path) -> None:
  """Downloads files that are new or have another version than in the copy, and deletes copies of those removed."""
  import fsspec

  system, root = fsspec.url_to_fs(url)
  paths = {posixpath.relpath(path, root): path for path in system.find(root)}
  if not paths:
    raise UserError(f'{url} holds no files; expected a data set')
  for name in paths:
    if '..' in name.split('/'):
      raise UserError(f'{url} lists {name!r}; expected only files below the folder')
  # Digests of the properties that the file system reports, such as size, tag and time; over http, of the URL alone.
  versions = {name: system.ukey(path) for name, path in paths.items()}
  stored = _read_versions(copy)
  if deleted := stored.keys() - versions.keys():
    for name in deleted:
      (copy / name).unlink(missing_ok=True)
      with contextlib.suppress(OSError):  # of a folder that is not empty
        os.removedirs((copy / name).parent)
      del stored[name]
    write_text(copy / VERSIONS, json.dumps(stored) + '\n')
  changed = [name for name in paths if stored.get(name) != versions[name] or not (copy / name).is_file()]
  if not changed:
    return
  sizes = {name: system.size(paths[name]) for name in changed}
  with _show_progress(f'{format_count(len(changed), "file")} of {url}', sum(sizes.values()), copy) as advance:
    for name in changed:
      (copy / name).parent.mkdir(parents=True, exist_ok=True)
      with write_atomic(copy / name) as temporary:
        system.get_file(paths[name], str(temporary))
      stored[name] = versions[name]
      write_text(copy / VERSIONS, json.dumps(stored) + '\n')  # a killed download continues after this file
      advance(sizes[name])


@contextlib.contextmanager
def _show_progress(description: str, size: int, copy: Path) -> Iterator[Callable[[int], None]]:
  """Shows how much is downloaded; yields a function that takes the number of new bytes."""
  import rich.console
  import rich.progress

  console = rich.console.Console(stderr=True, highlight=False)
  console.print(f'downloading {description} ({size / 2**20:,.1f} MiB) to {copy}', soft_wrap=True, markup=False)
  columns = (
    rich.progress.BarColumn(),
    rich.progress.DownloadColumn(),
    rich.progress.TransferSpeedColumn(),
    rich.progress.TimeRemainingColumn(),
  )
  with rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
    task = progress.add_task('download', total=size)
    yield lambda new_bytes: progress.advance(task, new_bytes)


def _read_versions(copy: Path) -> dict[str, str]:
  """The versions of the files of a copy; none if they cannot be read, so that all are downloaded again."""
  try:
    return dict(json.loads((copy / VERSIONS).read_text('utf-8')))
  except (OSError, ValueError, TypeError):
    return {}
