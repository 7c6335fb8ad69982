"""Checkpoints of a run: `checkpoints/` holds the latest states, `best/` the best one so far.

Each is a folder named by its step, which orbax renames into place, so that it appears whole or not at all. Files are
written in threads while training continues. A checkpoint contains a checksum of each of its arrays, which is verified
whenever the array is read: tensorstore verifies its indices only. Resuming moves a latest checkpoint that cannot be
read to `damaged-STEP-1`, if there is an earlier one.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from attention_jax.errors import UserError
from attention_jax.training.digests import tree_checksums
from attention_jax.training.partition import fetch
from attention_jax.training.paths import absolute
from attention_jax.training.state import TrainState, is_finite

LATEST = 'checkpoints'
BEST = 'best'
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
DAMAGED = 'damaged'  # the name, with its step and a number, of a checkpoint that cannot be read


class DamagedCheckpointError(UserError):
  """A checkpoint that cannot be read, or whose values differ from their checksums.

  Attributes:
    damage: the first part of the message, without the remedy.
  """

  def __init__(self, damage: str, remedy: str):
    super().__init__(f'{damage}; {remedy}')
    self.damage = damage


class CheckpointRetention(NamedTuple):
  """Retention policy: keeps the last `keep` regular states, and the very last state.

  A state is regular if its step is a multiple of `every`. A state that an interruption saved in between is deleted when
  the next one is saved, so that an interrupted run ends with the same checkpoints as an uninterrupted one.

  Attributes:
    keep: number of regular states to keep.
    every: steps between regular states; 0 means that there are none.
    pinned: returns the step of a further state that is kept, or None.
  """

  keep: int
  every: int
  pinned: Callable[[], int | None]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Implements orbax's PreservationPolicy; `checkpoints` are in the order of their steps."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    regular = [step for step in steps if self.every and step % self.every == 0]
    kept = {*regular[-self.keep :], steps[-1], self.pinned()}
    return [step in kept for step in steps]


def make_writer(folder: epath.Path, retention: CheckpointRetention) -> ocp.CheckpointManager:
  """Returns the manager that reads and writes checkpoints.

  Args:
    folder: the folder of the checkpoints; created if it does not exist.
    retention: which checkpoints are kept.
  """
  # A thread that fails to create a folder would make the other threads wait for five minutes.
  async_options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
  options = ocp.CheckpointManagerOptions(
    create=True,
    preservation_policy=retention,
    cleanup_tmp_directories=True,
    async_options=async_options,
    multiprocessing_options=_multiprocessing_options(folder, alone=False),
  )
  return ocp.CheckpointManager(folder, options=options)


def make_reader(folder: epath.Path) -> ocp.CheckpointManager | None:
  """Returns a manager with which this process reads checkpoints on its own; None if there is no folder."""
  if not folder.is_dir():
    return None
  options = ocp.CheckpointManagerOptions(  # not read_only, of which orbax warns
    create=False,
    enable_async_checkpointing=False,
    multiprocessing_options=_multiprocessing_options(folder, alone=True),
  )
  return ocp.CheckpointManager(folder, options=options)


def _multiprocessing_options(folder: epath.Path, alone: bool) -> ocp.options.MultiprocessingOptions:
  """Returns which processes use a manager together, and a prefix that makes the names of its barriers unique."""
  prefix = f'{folder.parent.name}.{folder.name}'  # the checkpoints of several seeds are written at once
  if not alone or jax.process_count() == 1:
    return ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix)
  process = jax.process_index()
  return ocp.options.MultiprocessingOptions(
    primary_host=process, active_processes={process}, barrier_sync_key_prefix=f'{prefix}.{process}'
  )


class _Write(NamedTuple):
  """A checkpoint that is being written.

  Attributes:
    kind: LATEST or BEST.
    step: its step.
  """

  kind: str
  step: int


class Checkpoints:
  """The checkpoints of one run.

  At most one checkpoint is being written at a time, and every method that reads checkpoints waits for it. Errors of the
  threads that write are raised by the next call that waits.

  Args:
    folder: the run folder.
    keep: number of regular latest states to keep, see CheckpointRetention; of the best states, one is kept.
    every: steps between regular latest states.
    read_only: for programs that read a run, which may still be training: nothing is created or cleaned up.

  Attributes:
    pinned: step of a latest state that is kept, the last one before the first update that was not finite; None if there
      is no such update, 0 for the initial state.
  """

  def __init__(self, folder: epath.PathLike, keep: int = 2, every: int = 1, *, read_only: bool = False):
    self.folder = absolute(folder)
    self._read_only = read_only
    self.pinned: int | None = None
    self._write: _Write | None = None
    retentions = {
      LATEST: CheckpointRetention(keep, every, lambda: self.pinned),
      BEST: CheckpointRetention(1, 1, lambda: None),
    }
    self._managers = {
      kind: make_reader(self.folder / kind) if read_only else make_writer(self.folder / kind, retention)
      for kind, retention in retentions.items()
    }

  def latest(self, kind: str = LATEST) -> int | None:
    """Returns the last stored step of a kind (LATEST or BEST), or None."""
    self.wait()
    manager = self._managers[kind]
    return None if manager is None else manager.latest_step()

  def steps(self, kind: str = LATEST) -> list[int]:
    """Returns the stored steps of a kind in ascending order."""
    self.wait()
    manager = self._managers[kind]
    return [] if manager is None else sorted(manager.all_steps())

  def save(self, state: TrainState, host_values: Mapping[str, Any], kind: str = LATEST) -> None:
    """Starts to write `state` and `host_values` under the state's step; see `wait`.

    Waits for the previous checkpoint, so that a best state is on disk before a latest state that names it. Returns when
    the arrays of `state` may be donated.

    A LATEST state is not written if there is one of this step or a later one: the same run wrote it before an
    interruption. Before a BEST state is written, those of this step or a later one are deleted: their updates have been
    run again, perhaps on other data.

    Args:
      state: the state of one run.
      host_values: further values of the run that JSON can represent, such as the best evaluation so far.
      kind: LATEST or BEST.

    Raises:
      UserError: if the state is not finite, and is therefore not written, or if this or the previous checkpoint cannot
        be written.
    """
    self.wait()
    step = int(fetch(state.step))
    if not is_finite(state):
      raise UserError(f'the training state is not finite after step {step}; not saved, {self.describe()}')
    repeated = [stored for stored in self.steps(kind) if stored >= step]
    if repeated and kind == LATEST:
      return
    metadata = _as_json({'layout': _layout(state), 'host': dict(host_values), 'checksums': tree_checksums(state)})
    metadata['digest'] = _digest(metadata)
    # The next update may donate these arrays: orbax has copied those of accelerators when `save` returns, and jax does
    # not reuse memory of a CPU that is still being read.
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(state._asdict()), host=ocp.args.JsonSave(metadata))
    with self._saving_errors(kind, step):
      for stored in repeated:
        self._managers[kind].delete(stored)
      self._managers[kind].save(step, args=items, force=True)
      self._write = _Write(kind, step)

  def wait(self) -> None:
    """Waits until the last checkpoint is on disk.

    Raises:
      UserError: if it could not be written.
    """
    if self._write is None:
      return
    kind, step = self._write
    self._write = None
    with self._saving_errors(kind, step):
      self._managers[kind].wait_until_finished()

  def is_writing(self) -> bool:
    """Returns whether a checkpoint is being written: if not, `wait` returns, or raises its error, at once."""
    return self._write is not None and self._managers[self._write.kind].is_saving_in_progress()

  def resume(
    self, like: Callable[[], TrainState], log: Callable[[str], None] = print
  ) -> tuple[TrainState, dict[str, Any]] | None:
    """Reads the latest intact checkpoint of a run that is to be continued, and sets damaged ones aside.

    Args:
      like: returns the argument `like` of `restore`; not called if there is no checkpoint.
      log: called with a line for each checkpoint that is damaged.

    Returns:
      The state and its host values; None if the run has not saved any.

    Raises:
      UserError: if none can be read, or if they hold another model.
    """
    if self.latest() is None:
      return None
    shapes = like()
    while True:
      step = self.latest()
      try:
        return self.restore(shapes)
      except DamagedCheckpointError as error:
        if len(self.steps()) == 1:
          raise
        log(f'{error.damage}; moved to {self._set_aside(step)}; resuming from step {self.latest()}')

  def host_values(self, kind: str = LATEST) -> dict[str, Any] | None:
    """Returns the host values of the last checkpoint of a kind; None if there is none.

    Raises:
      DamagedCheckpointError, UserError: as `restore`.
    """
    return None if self.latest(kind) is None else self._read_metadata(kind, None)[1]['host']

  def restore(self, like: TrainState, kind: str = LATEST, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint.

    Args:
      like: a state, or jax.ShapeDtypeStructs with shardings, of the same shapes and dtypes.
      kind: LATEST or BEST.
      step: the step to read; None means the last one.

    Returns:
      The state and its host values.

    Raises:
      DamagedCheckpointError: if it cannot be read, or differs from its checksums.
      UserError: if there is no checkpoint, or if it has no checksums or holds another model.
    """
    step, metadata = self._read_metadata(kind, step)
    state = like._replace(**self._read_arrays(kind, step, metadata, like._asdict()))
    return state, metadata['host']

  def restore_field(self, field: str, like: Any, kind: str = LATEST, step: int | None = None) -> Any:
    """Reads one field of the state of a checkpoint, which need not contain the others.

    Args:
      field: a field of TrainState, such as 'params'.
      like: the value of this field in the argument `like` of `restore`.
      kind: LATEST or BEST.
      step: the step to read; None means the last one.

    Raises:
      DamagedCheckpointError, UserError: as `restore`.
    """
    step, metadata = self._read_metadata(kind, step)
    return self._read_arrays(kind, step, metadata, {field: like})[field]

  def describe(self) -> str:
    """Returns a clause that names the last checkpoint, for error messages."""
    step = self.latest()
    return f'the last good checkpoint is {self.folder / LATEST / str(step)}' if step else 'there is no checkpoint yet'

  def close(self) -> None:
    """Waits until the last checkpoint is on disk and ends the threads of the checkpoint managers.

    Raises:
      UserError: if it could not be written.
    """
    try:
      self.wait()
    finally:
      for manager in filter(None, self._managers.values()):
        manager.close()

  @contextlib.contextmanager
  def _saving_errors(self, kind: str, step: int) -> Iterator[None]:
    """Turns errors of saving into a UserError."""
    try:
      yield
    except Exception as error:  # a full disk, or a folder that another program has changed
      path = self.folder / kind / str(step)
      raise UserError(f'cannot save checkpoint {path}: {_reason(error)}; {self.describe()}') from error

  def _read_metadata(self, kind: str, step: int | None) -> tuple[int, dict[str, Any]]:
    """Returns the step of a checkpoint, and its layout, checksums and host values."""
    self.wait()
    step = self.latest(kind) if step is None else step
    if step is None:
      raise UserError(f'no checkpoint in {self.folder / kind}; expected a folder that a training run has saved to')
    metadata = self._read(kind, step, host=ocp.args.JsonRestore())
    if 'digest' not in metadata:
      raise UserError(
        f'checkpoint {self.folder / kind / str(step)} has no checksums; expected one that this version has saved'
      )
    if metadata.pop('digest') != _digest(metadata):
      raise self._damaged(kind, step, 'its metadata differ from their digest')
    return step, metadata

  def _read_arrays(self, kind: str, step: int, metadata: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of the state that `like` has, and compares their layout and their checksums."""
    stored = {name: array for name, array in metadata['layout'].items() if name.partition('/')[0] in like}
    if difference := _difference(stored, _layout(like)):
      path = self.folder / kind / str(step)
      raise UserError(
        f'checkpoint {path} holds another model: {difference}; expected the config that it was trained with'
      )
    restore_args = ocp.checkpoint_utils.construct_restore_args(like)
    fields = self._read(kind, step, state=ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=True))
    checksums = tree_checksums(fields)
    if changed := [name for name in stored if checksums[name] != metadata['checksums'][name]]:
      count = f'{len(changed)} of {len(checksums)} arrays'
      raise self._damaged(kind, step, f'{count} differ from their checksums, such as {changed[0]}')
    return fields

  def _read(self, kind: str, step: int, **item) -> Any:
    """Reads one item of a checkpoint; an error is a DamagedCheckpointError with the reason, unless memory ran out."""
    try:
      (value,) = self._managers[kind].restore(step, args=ocp.args.Composite(**item)).values()
      return value
    except Exception as error:  # orbax, tensorstore and json each raise their own kinds
      if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
        raise
      reason = _reason(error)
    raise self._damaged(kind, step, reason)

  def _damaged(self, kind: str, step: int, reason: str) -> DamagedCheckpointError:
    """Returns the error of a damaged checkpoint, with a remedy."""
    path = self.folder / kind / str(step)
    if self._read_only:
      other_kind, name = (LATEST, 'latest') if kind == BEST else (BEST, 'best')
      other_steps = sorted({*self.steps(LATEST), *self.steps(BEST)} - {step})
      names = [name] if self.steps(other_kind) else []
      names += map(str, other_steps)
      remedy = 'it is the only one; choose another folder'
      if names:
        remedy = f'others can be read by --checkpoint: {", ".join(names)}'
    else:
      remedy = f'choose another folder, or delete {self.folder / kind} to continue without it'
    return DamagedCheckpointError(f'checkpoint {path} cannot be read: {reason}', remedy)

  def _set_aside(self, step: int) -> epath.Path:
    """Moves a checkpoint out of the way; returns its new path."""
    paths = (self.folder / f'{DAMAGED}-{step}-{number}' for number in itertools.count(1))
    path = next(path for path in paths if not path.exists())
    if jax.process_index() == 0:
      (self.folder / LATEST / str(step)).rename(path)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('set_aside')
    self._managers[LATEST].reload()
    return path


def updates_made(folder: epath.PathLike) -> int:
  """Returns the last step of the checkpoints of a run; a killed run may have its best state after its latest one."""
  with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
    return max(checkpoints.latest(kind) or 0 for kind in (LATEST, BEST))


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
  """The values as they are read back from a file."""
  return json.loads(json.dumps(values))


def _digest(values: Mapping[str, Any]) -> str:
  return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def _reason(error: Exception) -> str:
  """The error of the disk, if there is one, or the beginning of the message, which may have many lines."""
  for code in DISK_ERRORS:
    if os.strerror(code) in str(error):
      return os.strerror(code)
  return ' '.join(str(error).split())[:160]


def _layout(state: TrainState | Mapping[str, Any]) -> dict[str, str]:
  """Returns the dtype and shape of every array by its path: {'params/dense/kernel': 'float32[3,4]', ...}."""
  layout = {}
  for path, x in jax.tree.leaves_with_path(state):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    layout[name] = f'{x.dtype}{list(x.shape)}'.replace(' ', '')
  return layout


def _difference(stored: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
  """Describes the first array that differs; orbax would silently cast some of these differences away."""
  for name in sorted(stored.keys() | expected.keys()):
    stored_array = stored.get(name, 'absent')
    expected_array = expected.get(name, 'absent')
    if stored_array != expected_array:
      return f'{name} is {stored_array} in the checkpoint, {expected_array} in this config'
  return None
