"""Checkpoints of a run: `checkpoints/` holds the latest states, `best/` the best one so far.

Each is a folder named by its step, which orbax renames into place, so that it appears whole or not at all. Saving is
synchronous, because the training step donates its state. A checkpoint that cannot be read is never deleted.
"""

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from attention_jax.errors import UserError
from attention_jax.training.state import TrainState, is_finite

LATEST = 'checkpoints'
BEST = 'best'


class CheckpointRetention(NamedTuple):
  """Retention policy of the latest states: the last `keep` regular ones, and the very last state.

  A state is regular if its step is a multiple of `every`. States that interruptions saved in between are deleted by the
  next regular one, so that an interrupted run ends with the same checkpoints as an uninterrupted one.

  Attributes:
    keep: number of regular states to keep.
    every: steps between regular states; 0 means that there are none.
  """

  keep: int
  every: int

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """Implements orbax's PreservationPolicy; `checkpoints` are in the order of their steps."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    regular = [step for step in steps if self.every and step % self.every == 0]
    return [step in regular[-self.keep :] or step == steps[-1] for step in steps]


class Checkpoints:
  """The checkpoints of one run.

  Args:
    folder: the run folder.
    keep: number of regular latest states to keep, see CheckpointRetention; of the best states, one is kept.
    every: steps between regular latest states.
    read_only: for programs that read a run, which may still be training: nothing is created or cleaned up.
  """

  def __init__(self, folder: str | Path, keep: int = 2, every: int = 1, read_only: bool = False):
    self.folder = Path(folder).absolute()
    self._read_only = read_only
    self._managers = {
      LATEST: self._make_manager(LATEST, CheckpointRetention(keep, every)),
      BEST: self._make_manager(BEST, CheckpointRetention(keep=1, every=1)),
    }

  def latest(self, kind: str = LATEST) -> int | None:
    """Returns the last stored step of a kind (LATEST or BEST), or None."""
    manager = self._managers[kind]
    return None if manager is None else manager.latest_step()

  def steps(self, kind: str = LATEST) -> list[int]:
    """Returns the stored steps of a kind in ascending order."""
    manager = self._managers[kind]
    return [] if manager is None else sorted(manager.all_steps())

  def save(self, state: TrainState, host: Mapping[str, Any], kind: str = LATEST) -> None:
    """Writes `state` and `host` under the state's step.

    A LATEST state of this step or a later one is not overwritten: the same run wrote it before an interruption. BEST
    states of this step or a later one are deleted first: their updates have been run again, perhaps on other data.

    Args:
      state: the state of one run, or of several side by side, which are all at the same step.
      host: further values of the run, as JSON.
      kind: LATEST or BEST.

    Raises:
      UserError: if the state is not finite; such a state is never written.
    """
    step = int(np.max(state.step))
    if not is_finite(state):
      raise UserError(f'the parameters are not finite after step {step}; not saved, {self.describe()}')
    repeated = [stored for stored in self.steps(kind) if stored >= step]
    if repeated and kind == LATEST:
      return
    values = {'layout': _layout(state), 'host': dict(host)}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), host=ocp.args.JsonSave(values))
    with _errors_only():
      for stored in repeated:
        self._managers[kind].delete(stored)
      self._managers[kind].save(step, args=items, force=True)

  def restore(self, like: TrainState, kind: str = LATEST, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint.

    Args:
      like: a state, or jax.ShapeDtypeStructs (jax.eval_shape) with shardings, of the same shapes and dtypes.
      kind: LATEST or BEST.
      step: the step to read; None means the last one.

    Returns:
      The state and its host values.

    Raises:
      UserError: if there is no checkpoint, if it cannot be read, or if it holds another model.
    """
    step = self.latest(kind) if step is None else step
    if step is None:
      raise UserError(f'no checkpoint in {self.folder / kind}; expected a folder that a training run has saved to')
    with _errors_only():
      host = self._read(kind, step, host=ocp.args.JsonRestore())
      if difference := _difference(host['layout'], _layout(like)):
        path = self.folder / kind / str(step)
        raise UserError(
          f'checkpoint {path} holds another model: {difference}; expected the config that it was trained with'
        )
      arrays = self._read(kind, step, state=ocp.args.StandardRestore(like._asdict()))
      return like._replace(**arrays), host['host']

  def describe(self) -> str:
    """Returns a clause that names the last checkpoint, for error messages."""
    step = self.latest()
    return f'the last good checkpoint is {self.folder / LATEST / str(step)}' if step else 'there is no checkpoint yet'

  def close(self) -> None:
    """Ends the threads of the checkpoint managers."""
    for manager in filter(None, self._managers.values()):
      manager.close()

  def _read(self, kind: str, step: int, **item) -> Any:
    """Reads one item of a checkpoint; raises UserError with the reason and a remedy."""
    try:
      with _hide_aborted_read_messages():
        (value,) = self._managers[kind].restore(step, args=ocp.args.Composite(**item)).values()
        return value
    except Exception as error:  # orbax, tensorstore and json each raise their own kinds
      reason = ' '.join(str(error).split())[:160]
    earlier = [stored for stored in self.steps(kind) if stored < step]
    if earlier:
      remedy = f'move it away to resume from step {max(earlier)}'
    elif kind == LATEST:
      remedy = 'move it away to start from scratch'
    else:
      remedy = 'move it away to continue without it'
    raise UserError(f'cannot read checkpoint {self.folder / kind / str(step)}: {reason}; {remedy}')

  def _make_manager(self, kind: str, retention: CheckpointRetention) -> ocp.CheckpointManager | None:
    """Returns orbax's manager of one kind; None if a read-only run has no such folder."""
    if self._read_only and not (self.folder / kind).is_dir():
      return None
    access = {'preservation_policy': retention}
    if self._read_only:
      access = {'save_interval_steps': 0, 'read_only': True, 'create': False}
    options = ocp.CheckpointManagerOptions(
      enable_async_checkpointing=False, cleanup_tmp_directories=not self._read_only, **access
    )
    with _errors_only():
      return ocp.CheckpointManager(self.folder / kind, options=options)


def _layout(state: TrainState) -> dict[str, str]:
  """{'params/dense/kernel': 'float32[3,4]', ...}"""
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


@contextlib.contextmanager
def _hide_aborted_read_messages() -> Iterator[None]:
  """Hides the messages of aborted reads: when one array cannot be read, orbax aborts the reads of all others.

  Some of them end later, on threads of tensorstore. After a failure the hook that ignores them therefore stays.
  """
  previous_hook = sys.unraisablehook
  asyncio_log = logging.getLogger('asyncio')

  def hook(unraisable):
    if not any(words in str(unraisable.exc_value) for words in ('Event loop is closed', 'reading array index')):
      previous_hook(unraisable)

  sys.unraisablehook = hook
  asyncio_log.disabled = True
  try:
    yield
    sys.unraisablehook = previous_hook
  except Exception:
    gc.collect()
    raise
  finally:
    asyncio_log.disabled = False


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
  """Silences orbax's notes about its own options, which do not concern a user."""
  verbosity = absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.ERROR)
  try:
    yield
  finally:
    absl_logging.set_verbosity(verbosity)
