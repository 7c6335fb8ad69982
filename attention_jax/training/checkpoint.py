"""Checkpoints of a run: `checkpoints/` holds the latest states, `best/` the best one so far.

Each is a folder named by its step that appears whole or not at all (orbax renames it into place). Saving waits for the
disk: the training step donates its state, so nobody may still be reading it afterwards. Nothing here ever deletes a
checkpoint that cannot be read.
"""

import contextlib
import gc
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from attention_jax.errors import UserError
from attention_jax.training.state import TrainState, is_finite

LATEST, BEST = 'checkpoints', 'best'


class CheckpointRetention(NamedTuple):
  """Which of the latest states stay: the last `keep` of every so many steps, and the very last.

  A run that was interrupted in between keeps the same ones as a run that was not, once it is past the next of them.
  """

  keep: int
  every: int

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    """As orbax asks for it, the last of the checkpoints last."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    regular = [step for step in steps if self.every and step % self.every == 0]
    return [step in regular[-self.keep :] or step == steps[-1] for step in steps]


class Checkpoints:
  """The checkpoints of one run.

  Args:
    folder: the run's folder.
    keep, every: which of the latest states stay, see CheckpointRetention; of the best there is one.
    read_only: for programs that look at a run, which may be going on: nothing is created or cleaned up.
  """

  def __init__(self, folder: str | Path, keep: int = 2, every: int = 1, read_only: bool = False):
    self.folder = Path(folder).absolute()
    self._read_only = read_only
    self._managers = {LATEST: self._manager(LATEST, keep, every), BEST: self._manager(BEST, 1, 1)}

  def latest(self, kind: str = LATEST) -> int | None:
    """The last step that is kept, or None."""
    manager = self._managers[kind]
    return None if manager is None else manager.latest_step()

  def steps(self, kind: str = LATEST) -> list[int]:
    """The steps that are kept, the last one last."""
    manager = self._managers[kind]
    return [] if manager is None else sorted(manager.all_steps())

  def save(self, state: TrainState, host: Mapping[str, Any], kind: str = LATEST) -> None:
    """Writes `state` and `host` (what else the run must remember, as JSON) under the state's step.

    A latest step that is there already came from this same run before it was interrupted; it stays. Best ones that are
    there of this step or later are of updates that have been made anew since, of other data perhaps; they go.
    Raises: UserError when the state is not finite; such a state is never written.
    """
    step = int(np.max(state.step))  # runs side by side are all at one step
    if not is_finite(state):
      raise UserError(f'the parameters are not finite after step {step}; not saved, {self.describe()}')
    later = [there for there in self.steps(kind) if there >= step]
    if later and kind == LATEST:
      return
    values = {'layout': _layout(state), 'host': dict(host)}
    items = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), host=ocp.args.JsonSave(values))
    with _quiet():
      for there in later:
        self._managers[kind].delete(there)
      self._managers[kind].save(step, args=items, force=True)

  def restore(self, like: TrainState, kind: str = LATEST, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
    """A state of `kind`, the last one unless `step` says another, and its host values.

    Args: like: a state, or jax.ShapeDtypeStructs (jax.eval_shape) with shardings, of the same shapes and dtypes.
    Raises: UserError when there is none, when it cannot be read, or when it holds another model.
    """
    step = self.latest(kind) if step is None else step
    if step is None:
      raise UserError(f'no checkpoint in {self.folder / kind}; possible: a folder that a training run has saved to')
    with _quiet():
      host = self._read(kind, step, host=ocp.args.JsonRestore())
      if found := _difference(host['layout'], _layout(like)):
        path = self.folder / kind / str(step)
        raise UserError(f'checkpoint {path} holds another model: {found}; possible: the config it was trained with')
      found = self._read(kind, step, state=ocp.args.StandardRestore(like._asdict()))
      return like._replace(**found), host['host']

  def describe(self) -> str:
    """One clause that says where to go on from."""
    step = self.latest()
    return f'the last good checkpoint is {self.folder / LATEST / str(step)}' if step else 'there is no checkpoint yet'

  def close(self) -> None:
    """Ends the threads of the managers."""
    for manager in filter(None, self._managers.values()):
      manager.close()

  def _read(self, kind: str, step: int, **item) -> Any:
    try:
      with _silent_failures():
        (found,) = self._managers[kind].restore(step, args=ocp.args.Composite(**item)).values()
        return found
    except Exception as error:  # orbax, tensorstore and json each raise their own kinds
      reason = ' '.join(str(error).split())[:160]
    earlier = [s for s in self._managers[kind].all_steps() if s < step]
    rest = f'go on from step {max(earlier)}' if earlier else 'start anew' if kind == LATEST else 'do without it'
    path = self.folder / kind / str(step)
    raise UserError(f'cannot read checkpoint {path}: {reason}; possible: move it away to {rest}')

  def _manager(self, kind: str, keep: int, every: int) -> ocp.CheckpointManager | None:
    if self._read_only and not (self.folder / kind).is_dir():
      return None
    here = {'preservation_policy': CheckpointRetention(keep, every)}
    if self._read_only:
      here = {'save_interval_steps': 0, 'read_only': True, 'create': False}
    options = ocp.CheckpointManagerOptions(
      enable_async_checkpointing=False, cleanup_tmp_directories=not self._read_only, **here
    )
    with _quiet():
      return ocp.CheckpointManager(self.folder / kind, options=options)


def _layout(state) -> dict[str, str]:
  """{'params/dense/kernel': 'float32[3,4]', ...}"""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  return {name(path): f'{x.dtype}{list(x.shape)}'.replace(' ', '') for path, x in jax.tree.leaves_with_path(state)}


def _difference(stored: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
  """The first array that differs; orbax would cast some of these differences away unseen."""
  for name in sorted(stored.keys() | wanted.keys()):
    there, here = stored.get(name, 'absent'), wanted.get(name, 'absent')
    if there != here:
      return f'{name} is {there} there, {here} in this config'


@contextlib.contextmanager
def _silent_failures():
  """When one array cannot be read, orbax abandons the reads of the others, and each complains to stderr as it ends.

  Some end later, on threads of tensorstore, so after a failure the hook that ignores them stays.
  """
  before, log = sys.unraisablehook, logging.getLogger('asyncio')

  def hook(unraisable):
    if not any(words in str(unraisable.exc_value) for words in ('Event loop is closed', 'reading array index')):
      before(unraisable)

  sys.unraisablehook, log.disabled = hook, True
  try:
    yield
    sys.unraisablehook = before
  except Exception:
    gc.collect()
    raise
  finally:
    log.disabled = False


@contextlib.contextmanager
def _quiet():
  """Only errors from orbax: its notes about its own options are no news to a user."""
  before = absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.ERROR)
  try:
    yield
  finally:
    absl_logging.set_verbosity(before)
