"""A run folder behind a URL, such as gs://bucket/run, with a working copy on this machine.

Programs read and write the working copy. Behind the URL, `objects/` has the contents of its files, named by their
digests, and `manifest.json` names the files of the last state. The manifest is written last, so that another machine
finds a whole state whenever this one is lost. Files other than checkpoints are also copied under their own names, for
people and for TensorBoard.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attention_jax.atomic import is_unfinished, write_atomic, write_text
from attention_jax.errors import UserError
from attention_jax.training.checkpoint import BEST, DAMAGED, LATEST
from attention_jax.training.remote_files import RemoteFiles
from attention_jax.training.remote_lock import LostLockError

MANIFEST = 'manifest.json'
OBJECTS = 'objects'
STATE = '.remote.json'  # in the working copy: the manifest of the last synchronisation
NEXT_STATE = '.remote.next.json'  # in the working copy: the manifest of an upload, while it may be interrupted
REPEATED = 'uploading again after the next checkpoint'
ATTEMPTS = 3  # a state may be replaced while it is read
UNFINISHED_CHECKPOINT = 'orbax-checkpoint-tmp'
Files = dict[str, str]  # name below the folder -> digest


class RemoteFolder:
  """The state behind a URL and a working copy of it.

  Args:
    url: the folder, which need not exist.
    local: the folder of the working copy, which need not exist.

  Raises:
    UserError: if the URL names no folder, if the file system is unknown, or if its package is not installed.
  """

  def __init__(self, url: str, local: Path):
    self.files = RemoteFiles(url)
    self.local = local
    self._digests: dict[tuple, str] = {}  # digests of files by (inode, size, time of the last change)

  @property
  def url(self) -> str:
    """The URL, without a slash at its end."""
    return self.files.url

  def pull(self, log: Callable[[str], None], read_only: bool = False) -> bool:
    """Updates the working copy to the last uploaded state, unless it is current.

    If the state differs from that of the last synchronisation, and so does the working copy, the copy is moved aside
    first: it has changes that were not uploaded, or its last download was interrupted.

    Args:
      log: called with a line if files are downloaded or moved aside.
      read_only: whether the working copy is only read; a newer state then overwrites local changes.

    Returns:
      Whether there is a state.

    Raises:
      UserError: if the state cannot be read.
    """
    for attempt in range(ATTEMPTS):
      manifest = self._manifest()
      synced = self._local_manifest()
      if not manifest:
        (self.local / STATE).unlink(missing_ok=True)
        return False
      if synced.get('id') == manifest['id']:
        return True
      if self._local_manifest(NEXT_STATE).get('id') == manifest['id']:  # this machine uploaded it, but was killed
        if not read_only:
          self._finish_push(synced.get('files', {}), manifest['files'])
        return True
      try:
        self._replace_copy(manifest, synced, log, read_only)
        return True
      except UserError:
        if attempt == ATTEMPTS - 1 or self._manifest() == manifest:
          raise
    raise AssertionError('the last attempt returns or raises')

  def push(self, folder: Path) -> None:
    """Uploads a state, and commits it by writing its manifest. Uploads nothing if the state has not changed.

    Args:
      folder: the working copy, or a snapshot of it.

    Raises:
      UserError: if a file cannot be written or removed. The remote state is then the old or the new one, as a whole.
    """
    before: Files = self._local_manifest().get('files', {})
    unfinished = self._local_manifest(NEXT_STATE)
    if unfinished and unfinished['id'] == (self._manifest() or {}).get('id'):  # it failed after its commit
      self._finish_push(before, unfinished['files'])
      before = unfinished['files']
    files = self._digests_of(folder)
    if files == before:
      return
    stored = set(before.values())
    for name, digest in files.items():
      if digest not in stored:
        self.files.upload(folder / name, f'{OBJECTS}/{digest}')
        stored.add(digest)
    # Before the commit, so that the next upload repeats what fails here.
    for name in before.keys() | files.keys():
      if before.get(name) != files.get(name) and not _is_checkpoint_file(name):
        self._update_named_copy(folder, name, name in files)
    manifest = {'id': uuid.uuid4().hex, 'files': files}
    write_text(self.local / NEXT_STATE, json.dumps(manifest) + '\n')
    self.files.write_json(MANIFEST, manifest)
    self._finish_push(before, files)

  def push_outputs(self, before: Files) -> list[str]:
    """Uploads the files, such as pictures, that a program has written into a working copy opened for reading.

    Files of the state are not uploaded, even if they have changed.

    Args:
      before: `digests()` before the program ran.

    Returns:
      The names of the files.
    """
    synced = self._local_manifest().get('files', {})
    names = [name for name, digest in self.digests().items() if name not in synced and before.get(name) != digest]
    for name in names:
      self.files.upload(self.local / name, name)
    return names

  def digests(self) -> Files:
    """Returns the names of the files of the working copy and their digests."""
    return self._digests_of(self.local)

  def snapshot(self, folder: Path) -> None:
    """Copies the working copy as it is now to `folder`; files of checkpoints are hard links."""
    for name in _names_in(self.local):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      copy = os.link if _is_checkpoint_file(name) else shutil.copyfile
      copy(self.local / name, folder / name)

  def remove_remains(self) -> None:
    """Removes snapshots and objects that killed or failed uploads have left; only for the process that has the lock.

    Raises:
      UserError: if objects cannot be listed or removed.
    """
    for snapshot in self.local.parent.glob(f'.{glob.escape(self.local.name)}.*'):
      shutil.rmtree(snapshot, ignore_errors=True)
    if manifest := self._manifest():
      for digest in set(self.files.names(OBJECTS)) - set(manifest['files'].values()):
        self.files.remove(f'{OBJECTS}/{digest}')

  def _finish_push(self, before: Files, files: Files) -> None:
    """Removes the objects that were replaced, and marks the working copy as uploaded."""
    for digest in set(before.values()) - set(files.values()):
      self.files.remove(f'{OBJECTS}/{digest}')
    (self.local / NEXT_STATE).replace(self.local / STATE)

  def _update_named_copy(self, folder: Path, name: str, exists: bool) -> None:
    """Uploads a file under its own name, or removes it there if it does not exist any more."""
    if exists:
      self.files.upload(folder / name, name)
    else:
      self.files.remove(name)

  def _replace_copy(
    self, manifest: Mapping[str, Any], synced: Mapping[str, Any], log: Callable[[str], None], read_only: bool
  ) -> None:
    """Downloads the files that differ from a manifest, and removes those that it does not name."""
    current = self.digests()
    if not read_only and current != synced.get('files', {}):
      path = self._move_aside()
      log(
        f'{self.url} has a newer state, and the working copy has changes or is an incomplete download; the copy is '
        f'moved to {path}'
      )
      current = {}
    (self.local / STATE).unlink(missing_ok=True)  # until the copy is complete
    changed = [name for name, digest in manifest['files'].items() if current.get(name) != digest]
    log(f'downloading {len(changed)} files of {self.url} to {self.local}')
    for name in changed:
      self._download(name, manifest['files'][name])
    for name in current.keys() - manifest['files'].keys():
      (self.local / name).unlink()
    for path in self.local.rglob('*'):
      if is_unfinished(path) and _is_checkpoint_file(path.relative_to(self.local).as_posix()):
        path.unlink()  # of a killed download; its folder would look like a checkpoint
    _remove_empty_folders(self.local)
    write_text(self.local / STATE, json.dumps(manifest) + '\n')

  def _download(self, name: str, digest: str) -> None:
    path = self.local / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomic(path) as temporary:
      self.files.download(f'{OBJECTS}/{digest}', temporary)
      if self._digest(temporary) != digest:
        raise UserError(f'{self.url}/{OBJECTS}/{digest}, the content of {name}, has changed since it was written')

  def _move_aside(self) -> Path:
    paths = (self.local.with_name(f'{self.local.name}-aside-{number}') for number in itertools.count(1))
    path = next(path for path in paths if not path.exists())
    self.local.rename(path)
    self.local.mkdir()
    return path

  def _manifest(self) -> dict[str, Any] | None:
    manifest = self.files.read_json(MANIFEST)
    if manifest is not None and not (isinstance(manifest.get('id'), str) and _are_files(manifest.get('files'))):
      raise UserError(f"{self.url}/{MANIFEST} is not the list of files of a run; expected 'id' and 'files' in it")
    return manifest

  def _local_manifest(self, name: str = STATE) -> dict[str, Any]:
    """The manifest of the last synchronisation, or that of the file NEXT_STATE; {} if there is none."""
    path = self.local / name
    try:
      return dict(json.loads(path.read_text('utf-8')))
    except FileNotFoundError:
      return {}
    except (OSError, ValueError, TypeError) as error:
      raise UserError(f'cannot read {path}: {error}; delete {self.local} to download it again') from error

  def _digests_of(self, folder: Path) -> Files:
    return {name: self._digest(folder / name) for name in _names_in(folder)}

  def _digest(self, path: Path) -> str:
    status = path.stat()
    key = (status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in self._digests:
      with open(path, 'rb') as file:
        self._digests[key] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return self._digests[key]


class Uploader:
  """Uploads the working copy of a folder in a thread.

  As a context manager, it first removes what earlier uploads have left. At the end it waits for the last upload; after
  an error, it also uploads the state at the error.

  Args:
    folder: the folder.
    check: raises LostLockError if this process has lost the lock, or UserError if it cannot read the lock.
    log: called with a line if the lock cannot be read or an upload in the thread fails, which is repeated after the
      next checkpoint, and if the upload of the state at an error fails.
  """

  def __init__(self, folder: RemoteFolder, check: Callable[[], None], log: Callable[[str], None]):
    self._folder = folder
    self._check = check
    self._log = log
    self._thread: threading.Thread | None = None
    self._has_failed = False  # whether `finish` has raised an error

  def __enter__(self) -> 'Uploader':
    self._folder.remove_remains()
    return self

  def __call__(self) -> None:
    """Waits for the previous upload, then uploads the current state in a thread; call it between two updates.

    Raises:
      LostLockError: if this process has lost the lock of the folder.
    """
    self._wait()
    try:
      self._check()
    except LostLockError:
      raise
    except UserError as error:  # the network: the check after the next checkpoint finds a lock that was lost meanwhile
      self._log(f'{error}; {REPEATED}')
      return
    snapshot = self._folder.local.with_name(f'.{self._folder.local.name}.{uuid.uuid4().hex}')
    self._folder.snapshot(snapshot)
    self._thread = threading.Thread(target=self._upload, args=[snapshot], name='upload')
    self._thread.start()

  def finish(self) -> None:
    """Uploads the current state, and waits for it.

    Raises:
      UserError: if it cannot be uploaded, or if this process has lost the lock of the folder.
    """
    self._wait()
    self._has_failed = True  # reset below if nothing is raised
    try:
      self._check()
      self._folder.push(self._folder.local)
    except LostLockError:
      raise
    except UserError as error:
      raise UserError(
        f'{error}; {self._folder.local} has all files of the run; rerun the same command to upload them'
      ) from error
    self._has_failed = False

  def __exit__(self, kind, error, traceback) -> None:
    self._wait()
    if error is None or self._has_failed:
      return
    try:
      self.finish()
    except UserError as failure:
      self._log(str(failure))

  def _upload(self, snapshot: Path) -> None:
    try:
      self._folder.push(snapshot)
    except UserError as error:
      self._log(f'{error}; {REPEATED}')
    finally:
      shutil.rmtree(snapshot, ignore_errors=True)

  def _wait(self) -> None:
    if self._thread:
      self._thread.join()


def _names_in(folder: Path) -> list[str]:
  """The names of the files of a run below its folder, without locks, local manifests and what is unfinished."""
  names = []
  for path in sorted(folder.rglob('*')):
    name = path.relative_to(folder).as_posix()
    if path.is_file() and not _is_temporary(path) and UNFINISHED_CHECKPOINT not in name:
      names.append(name)
  return names


def _is_temporary(path: Path) -> bool:
  return path.name in ('.lock', STATE, NEXT_STATE) or is_unfinished(path)


def _is_checkpoint_file(name: str) -> bool:
  return not {LATEST, BEST, DAMAGED}.isdisjoint(name.split('/')[:-1])


def _are_files(value: Any) -> bool:
  """Whether a value of a manifest names files, all of them below the folder."""
  return isinstance(value, dict) and all(
    isinstance(digest, str) and digest.isalnum() and '..' not in name.split('/') and not name.startswith('/')
    for name, digest in value.items()
  )


def _remove_empty_folders(folder: Path) -> None:
  for path in sorted((path for path in folder.rglob('*') if path.is_dir()), reverse=True):
    with contextlib.suppress(OSError):  # not empty
      path.rmdir()
