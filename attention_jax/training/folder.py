"""The folder of a run: it belongs to one config, which is stored in it and compared when the run is resumed."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import jax
from jax.experimental import multihost_utils

from attention_jax.errors import UserError

CONFIG = 'config.json'
LOCK = '.lock'  # an empty file, held by the process that trains
Complete = Callable[[dict[str, Any]], dict[str, Any]]

# What may differ when a run is resumed: these change how long it goes on and what it writes, not where it goes.
# (A schedule that ends with the run, such as 'cosine', does follow training.steps, unless its spec says its own.)
MUTABLE_FIELDS = frozenset(
  {
    'training.steps',
    'training.patience',
    'training.log_every',
    'training.checkpoint_every',
    'training.keep',
  }
)


def prepare_folder(folder: str | Path, config: Mapping[str, Any], complete: Complete = dict) -> Path:
  """Makes `folder` the folder of a run with this config (plain JSON values), new or resumed; returns its path.

  Args: complete, a stored config -> the same with the fields that there were none of when it was stored.
  Raises: UserError when it holds another config (the differing fields are listed) or files but no config. Then
    nothing in it has been touched.
  """
  folder = Path(folder).absolute()
  config = json.loads(json.dumps(config))  # as it will be read back: tuples are lists
  if jax.process_index() == 0:
    _prepare(folder, config, complete)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('prepare_folder')
  return folder


def check_folder(folder: str | Path, config: Mapping[str, Any], complete: Complete = dict) -> bool:
  """Whether `folder` is that of a run with this config already. Touches nothing; raises as `prepare_folder` does."""
  folder = Path(folder).absolute()
  return folder.is_dir() and _check(folder, json.loads(json.dumps(config)), complete) is not None


@contextlib.contextmanager
def lock_folder(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
  """Nobody else trains in `folder` meanwhile, which is made if need be; the system lets go of it when the process ends.

  Args: log, is told where the file system knows no locks. Raises: UserError when somebody else does.
  """
  lock = filelock.FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
  with contextlib.suppress(OSError):  # prepare_folder says what is wrong with it
    folder.mkdir(parents=True, exist_ok=True)
  try:
    if jax.process_index() == 0 and os.access(folder, os.W_OK):
      lock.acquire()
  except filelock.Timeout as error:
    raise UserError(f'{folder} is being trained in by another process; possible: another folder') from error
  except (NotImplementedError, OSError) as error:
    log(f'{folder} cannot be locked ({error}): another process that trains in it would not be noticed')
  try:
    yield
  finally:
    lock.release()


def read_config(folder: str | Path) -> dict[str, Any]:
  """The config stored in a run's folder. Raises UserError when there is none or it is not JSON."""
  path = Path(folder).absolute() / CONFIG
  try:
    return json.loads(path.read_text('utf-8'))
  except FileNotFoundError as error:
    raise UserError(f'{folder} holds no {CONFIG}; possible: the folder of a training run') from error
  except (OSError, ValueError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error


def _prepare(folder: Path, config: dict[str, Any], complete: Complete) -> None:
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if _check(folder, config, complete) != config:
      _temporary(folder).write_text(json.dumps(config, indent=2) + '\n', 'utf-8')
      os.replace(_temporary(folder), folder / CONFIG)
  except OSError as error:
    raise UserError(f'cannot use {folder} as the folder of a run: {error.strerror}') from error


def _check(folder: Path, config: dict[str, Any], complete: Complete) -> dict[str, Any] | None:
  """The config stored in `folder`, None where there is nothing."""
  try:
    present = sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, _temporary(folder).name))
  except OSError as error:
    raise UserError(f'cannot use {folder} as the folder of a run: {error.strerror}') from error
  if CONFIG in present:
    stored = json.loads(json.dumps(complete(read_config(folder))))
    _compare(folder, _flat(stored), _flat(config))
    return stored
  if present:
    names = ', '.join(present[:3]) + (', ...' if len(present) > 3 else '')
    raise UserError(f'{folder} holds files ({names}) but no {CONFIG}; possible: an empty or new folder')
  return None


def _temporary(folder: Path) -> Path:
  return folder / f'.{CONFIG}.part'


def _compare(folder: Path, stored: dict[str, Any], given: dict[str, Any]) -> None:
  show = lambda fields, name: json.dumps(fields[name], ensure_ascii=False) if name in fields else 'absent'
  differing = [
    f'{name} is {show(stored, name)} there, {show(given, name)} given'
    for name in sorted(stored.keys() | given.keys())
    if show(stored, name) != show(given, name) and name not in MUTABLE_FIELDS
  ]
  if differing:
    raise UserError(f'{folder} holds another config: {"; ".join(differing)}; possible: that config or another folder')


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': 1}} -> {'a.b': 1}."""
  flat = {}
  for name, value in config.items():
    nested = isinstance(value, dict) and value
    flat |= _flat(value, f'{prefix}{name}.') if nested else {f'{prefix}{name}': value}
  return flat
