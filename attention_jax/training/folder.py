"""The run folder: it belongs to one config, which is stored in it and compared when the run is resumed.

One process at a time trains in it. On a file system it holds a lock; in a bucket, which has no locks, the latest
process to start owns the run, and an earlier one stops at its next checkpoint.
"""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import filelock
import jax
from etils import epath
from flax.traverse_util import flatten_dict

from attention_jax.atomic import is_unfinished, write_text
from attention_jax.errors import UserError, report_write_errors
from attention_jax.specs import parse
from attention_jax.training.partition import MESH_FIELDS
from attention_jax.training.paths import BUCKETS, absolute, is_in_bucket
from attention_jax.training.peers import fail_together

CONFIG = 'config.json'
LOCK = '.lock'  # an empty file, locked by the process that trains
OWNER = 'owner.json'  # in a bucket: the process that trains
FillDefaults = Callable[[dict[str, Any]], dict[str, Any]]

# Fields that may differ when a run is resumed, beside those of the group `evaluation`. They change how long it runs,
# what it writes, its devices, and whether it stops at an update that is not finite; they do not change updates that are
# finite.
# (Exceptions: training.steps changes a schedule that ends with the run, such as 'cosine', unless its spec sets `steps`.
# Other devices may round sums differently.)
MUTABLE_FIELDS = frozenset(
  {
    'data.max_left_out',
    'training.steps',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep',
    'training.on_nonfinite',
    *MESH_FIELDS,
  }
)
# Fields of `evaluation` that may not, because they are options of the metric that decides which state is best.
METRIC_FIELDS = frozenset({'evaluation.metrics', 'evaluation.group_references', 'evaluation.unlinked_targets'})


def prepare_folder(folder: epath.PathLike, config: Mapping[str, Any], fill_defaults: FillDefaults = dict) -> epath.Path:
  """Makes `folder` the folder of a new or resumed run, and stores the config in it.

  Args:
    folder: the run folder; created if it does not exist.
    config: the config of the run, plain JSON values.
    fill_defaults: stored config -> the same config, with defaults for fields that did not exist when it was stored.

  Returns:
    The absolute path of the folder.

  Raises:
    UserError: if the folder cannot be used, or if it holds a config that differs in a field that may not change
      (the message lists them), or files but no config. Its content is then unchanged.
  """
  folder = absolute(folder)
  with fail_together():
    if jax.process_index() == 0:
      _store_config(folder, _as_stored(config), fill_defaults)
  return folder


def check_folder(folder: epath.PathLike, config: Mapping[str, Any], fill_defaults: FillDefaults = dict) -> bool:
  """Returns whether `folder` is the folder of a run with this config, except for fields that may change.

  Changes nothing.

  Args:
    folder: the run folder, which need not exist.
    config: as for `prepare_folder`.
    fill_defaults: as for `prepare_folder`.

  Raises:
    UserError: as `prepare_folder`.
  """
  folder = absolute(folder)
  return folder.is_dir() and _check_config(folder, _as_stored(config), fill_defaults) is not None


@contextlib.contextmanager
def own_folder(folder: epath.Path, log: Callable[[str], None]) -> Iterator[Callable[[], None]]:
  """Makes process 0 the one that trains in `folder`: by its lock, or in a bucket by an object that names the owner.

  Args:
    folder: the run folder; created if it does not exist.
    log: called with a line if the folder cannot be locked, for example because the file system has no locks. A folder
      that this process may not write to is neither locked nor reported.

  Yields:
    A function that raises UserError if another process has become the owner since; called before each checkpoint.

  Raises:
    UserError: if another process holds the lock.
  """
  if is_in_bucket(folder):
    with report_write_errors(folder / OWNER):
      check_owner = take_over(folder) if jax.process_index() == 0 else _stay
    yield check_owner
    return
  lock = filelock.FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
  with contextlib.suppress(OSError):  # prepare_folder reports the error
    folder.mkdir(parents=True, exist_ok=True)
  try:
    if jax.process_index() == 0 and os.access(folder, os.W_OK):
      lock.acquire()
  except filelock.Timeout as error:
    raise UserError(f'another process is training in {folder}; choose another folder') from error
  except (NotImplementedError, OSError) as error:
    log(f'cannot lock {folder} ({error}): another process that trains in it would not be detected')
  try:
    yield _stay
  finally:
    lock.release()


def _stay() -> None:
  """The owner of a folder with a lock stays the same."""


def take_over(folder: epath.Path) -> Callable[[], None]:
  """Makes this process the owner of a run in a bucket; returns a function that raises UserError once it is no more.

  Of processes that start at the same time, each overwrites the object of the one before: it is written on the condition
  that its generation is that which was read.
  """
  from google.api_core.exceptions import NotFound, PreconditionFailed
  from google.cloud import storage

  bucket, _, path = os.fspath(folder / OWNER).removeprefix(BUCKETS).partition('/')
  blob = storage.Client().bucket(bucket).blob(path)
  owner = {'id': secrets.token_hex(8), 'host': socket.gethostname(), 'process': os.getpid()}
  while True:
    try:
      blob.reload()
      generation = blob.generation
    except NotFound:
      generation = 0
    try:
      blob.upload_from_string(json.dumps(owner), if_generation_match=generation)
      break
    except PreconditionFailed:
      continue

  def check() -> None:
    try:
      current = json.loads((folder / OWNER).read_text())
    except Exception as error:  # gcsfs raises errors of its own
      raise UserError(f'cannot read {folder / OWNER}: {" ".join(str(error).split())}') from error
    if current != owner:
      raise UserError(
        f'process {current["process"]} on {current["host"]} has taken over {folder}; this one stops before its next '
        'checkpoint'
      )

  return check


def read_config(folder: epath.PathLike) -> dict[str, Any]:
  """Returns the config that a run folder holds.

  Raises:
    UserError: if there is none, or if it cannot be read or is not a JSON object.
  """
  path = absolute(folder) / CONFIG
  try:
    config = json.loads(path.read_text())
  except FileNotFoundError as error:
    raise UserError(f'{folder} holds no {CONFIG}; expected the folder of a training run') from error
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error
  if not isinstance(config, dict):
    raise UserError(f'{path} must be an object with the groups of a config, got {str(config)[:80]}')
  return config


def _as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config as it is read back from a file: tuples become lists."""
  return json.loads(json.dumps(config))


def _store_config(folder: epath.Path, config: dict[str, Any], fill_defaults: FillDefaults) -> None:
  """Creates the folder and writes the config, unless the same config is stored already."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if _check_config(folder, config, fill_defaults) != config:
      write_text(folder / CONFIG, json.dumps(config, indent=2) + '\n')
  except OSError as error:
    raise UserError(f'cannot use {folder} as the folder of a run: {error.strerror}') from error


def _check_config(folder: epath.Path, config: dict[str, Any], fill_defaults: FillDefaults) -> dict[str, Any] | None:
  """Compares `config` with the stored config; returns the stored one, or None if the folder is empty."""
  try:
    names = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, OWNER) and not is_unfinished(path))
  except FileNotFoundError:  # a folder of a bucket exists as soon as it has a file
    names = []
  except OSError as error:
    raise UserError(f'cannot use {folder} as the folder of a run: {error.strerror}') from error
  if CONFIG in names:
    stored = _as_stored(fill_defaults(read_config(folder)))
    _compare(folder, stored, config)
    return stored
  if names:
    examples = ', '.join(names[:3]) + (', ...' if len(names) > 3 else '')
    raise UserError(f'{folder} holds files ({examples}) but no {CONFIG}; choose an empty or new folder')
  return None


def _compare(folder: epath.Path, stored: dict[str, Any], config: dict[str, Any]) -> None:
  """Raises UserError if the configs differ in a field that must not change."""
  stored_fields = _fields(stored)
  fields = _fields(config)
  differences = []
  for name in sorted(stored_fields.keys() | fields.keys()):
    before = stored_fields.get(name, 'absent')
    now = fields.get(name, 'absent')
    if before != now and not _may_change(name):
      differences.append(f'{name} is {before} in its {CONFIG}, {now} in this config')
  if differences:
    raise UserError(
      f'{folder} holds another config: {"; ".join(differences)}; use that config, or another folder, in which '
      f'config.initial_run={str(folder)!r} starts from the best parameters of this run and, with '
      'config.initial_state=True, continues its optimiser and its step'
    )


def _may_change(name: str) -> bool:
  return name in MUTABLE_FIELDS or (name.startswith('evaluation.') and name not in METRIC_FIELDS)


def _fields(config: dict[str, Any]) -> dict[str, str]:
  """Returns the fields by dotted name as JSON: {'a': {'b': 1}} -> {'a.b': '1'}; an empty group is a value.

  Of evaluation.metrics, it has the one that training.select names.
  """
  flat = flatten_dict(config, is_leaf=lambda path, group: path and not group, sep='.')
  if 'evaluation.metrics' in flat:
    specs = map(str, flat['evaluation.metrics'])
    flat['evaluation.metrics'] = [spec for spec in specs if parse(spec)[0] == flat.get('training.select')]
  return {name: json.dumps(value, ensure_ascii=False) for name, value in flat.items()}
