"""Run folders behind URLs: the working copies in which runs are trained and read."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import filelock
import jax

from attention_jax.data.files import cache_folder
from attention_jax.data.urls import copy_name
from attention_jax.errors import UserError
from attention_jax.training import peers
from attention_jax.training.paths import is_url, run_path
from attention_jax.training.remote_folder import RemoteFolder, Uploader
from attention_jax.training.remote_lock import RemoteLock

Log = Callable[[str], None]
# URL -> the run folder that this process reads, and the digests of its files when it was opened.
_OPENED: dict[str, tuple[RemoteFolder, dict[str, str]]] = {}


def _do_nothing(*_) -> None:
  """Does nothing; stands for an upload or a synchronisation that is not needed, and for a log that is not printed."""


class TrainingFolder(NamedTuple):
  """A folder in which a run is trained.

  Attributes:
    path: the folder on this machine.
    shared: whether all processes use this folder. Otherwise each has a working copy of its own.
    after_save: to be called after each checkpoint.
    synchronize: to be called by every process after training; each can then read the files of process 0 in `path`.
  """

  path: Path
  shared: bool = True
  after_save: Callable[[], None] = _do_nothing
  synchronize: Callable[[], None] = _do_nothing


@contextlib.contextmanager
def training_folder(folder: str | Path, log: Log) -> Iterator[TrainingFolder]:
  """Opens a run folder for training: for a URL its working copy, which is uploaded while the run trains.

  For a URL, the first of several processes writes and uploads, and the others download. Every process must enter and
  leave the context at the same point.

  Args:
    folder: the run folder, or a URL that fsspec can write to.
    log: called with lines about the lock of a URL, downloads and uploads.

  Raises:
    UserError: in every process: on entering, for a folder that cannot be used, and for a URL that another training
      command has locked; on leaving, if the last upload fails.
  """
  if not is_url(str(folder)):
    with peers.fail_together():
      path = run_path(folder)
    yield TrainingFolder(path)
    return
  with contextlib.ExitStack() as stack:
    uploader = None
    with peers.fail_together():
      remote = RemoteFolder(str(folder), _working_copy(str(folder), _training_copy_name()))
      remote.local.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        log(f'{remote.url} is trained in {remote.local} and uploaded after each checkpoint')
        lock = stack.enter_context(RemoteLock(remote.files, log))
        remote.pull(log)
        uploader = stack.enter_context(Uploader(remote, lock.check, log))
    is_alone = jax.process_count() == 1
    synchronize = _do_nothing if is_alone else functools.partial(_synchronize, remote, uploader)
    synchronize()  # an interrupted run may have files in the first process that it did not upload
    yield TrainingFolder(remote.local, is_alone, uploader or _do_nothing, synchronize)
    with peers.fail_together():
      if uploader:
        uploader.finish()
  log(f'uploaded to {remote.url}')


def _synchronize(remote: RemoteFolder, uploader: Uploader | None) -> None:
  """Uploads the files of the first process, which the others then download."""
  with peers.fail_together():
    if uploader:
      uploader.finish()
  with peers.fail_together():
    if not uploader and not remote.pull(_do_nothing, read_only=True):
      shutil.rmtree(remote.local)  # its files are those of an earlier run behind the same URL
      remote.local.mkdir()


def _training_copy_name() -> str:
  """The name of the working copy of this process, for training."""
  return f'train_{jax.process_index()}' if jax.process_index() else 'train'


def reading_folder(url: str) -> Path:
  """Returns a copy of a run folder behind a URL, for programs that read it.

  Raises:
    UserError: if there is no run, or if it cannot be read.
  """
  remote = RemoteFolder(url, _working_copy(url, 'read'))
  remote.local.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(remote.local.with_name('read.lock')):
    if not remote.pull(_do_nothing, read_only=True):
      raise UserError(f'{url} holds no run; expected the URL of a training run')
  _OPENED.setdefault(remote.url, (remote, remote.digests()))
  return remote.local


def upload_outputs(log: Log) -> None:
  """Uploads files, such as pictures, that were added to the run folders, or rewritten, since this process opened them.

  Files of the uploaded run itself are left out, see RemoteFolder.push_outputs.
  """
  for remote, before in _OPENED.values():
    for name in remote.push_outputs(before):
      log(f'uploaded to {remote.url}/{name}')


def _working_copy(url: str, name: str) -> Path:
  """The folder of a working copy in the cache of the user."""
  return Path(cache_folder('runs')) / copy_name(url) / name
