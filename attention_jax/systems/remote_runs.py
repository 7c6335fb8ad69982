"""Run folders behind URLs: the working copies in which runs are trained and read."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import jax

from attention_jax.data.files import cache_folder
from attention_jax.errors import UserError
from attention_jax.training.paths import is_url, run_path
from attention_jax.training.remote_folder import RemoteFolder, Uploader
from attention_jax.training.remote_lock import RemoteLock

Log = Callable[[str], None]
# URL -> the run folder that this process reads, and the digests of its files when it was opened.
_OPENED: dict[str, tuple[RemoteFolder, dict[str, str]]] = {}


@contextlib.contextmanager
def training_folder(folder: str | Path, log: Log) -> Iterator[tuple[Path, Callable[[], None]]]:
  """Opens a run folder for training: for a URL its working copy, which is uploaded while the run trains.

  Args:
    folder: the run folder, or a URL that fsspec can write to.
    log: called with lines about downloads and uploads.

  Yields:
    The folder to train in, and what to call after each checkpoint.

  Raises:
    UserError: for a folder that cannot be used, one in which another process trains, and a URL with several processes.
  """
  if not is_url(str(folder)):
    yield run_path(folder), _do_nothing
    return
  if jax.process_count() > 1:
    raise UserError(
      f'{folder}: several processes cannot train behind a URL; expected a folder of a file system that they share'
    )
  remote = RemoteFolder(str(folder), _working_copy(str(folder), 'train'))
  remote.local.mkdir(parents=True, exist_ok=True)
  log(f'{remote.url} is trained in {remote.local} and uploaded after each checkpoint')
  with RemoteLock(remote.files, log) as lock:
    remote.pull(log)
    with Uploader(remote, lock.check, log) as upload:
      yield remote.local, upload
  log(f'uploaded to {remote.url}')


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
  """Uploads the pictures and pages that this process has added to the run folders that it reads."""
  for remote, before in _OPENED.values():
    for name in remote.push_outputs(before):
      log(f'uploaded to {remote.url}/{name}')


def _working_copy(url: str, purpose: str) -> Path:
  """The folder of a working copy in the cache of the user; the name is readable, and unique by its digest."""
  url = url.rstrip('/')
  digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
  return Path(cache_folder('runs')) / f'{url.rpartition("/")[2]}-{digest}' / purpose


def _do_nothing(*_) -> None:
  """Does nothing: the upload of a local folder, or the log of a program whose output other programs read."""
