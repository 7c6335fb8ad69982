"""Exports of trained runs: run folders without the state from which training resumes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from attention_jax.atomic import write_folder_atomic
from attention_jax.errors import UserError
from attention_jax.modules.parameter_files import SUFFIX
from attention_jax.systems.base import System
from attention_jax.systems.config import to_dict
from attention_jax.systems.experiment import HYPOTHESES_PREFIX, RESULTS
from attention_jax.systems.initial_run import INITIAL_FILE
from attention_jax.systems.plugins import stored_plugins
from attention_jax.systems.provenance import COMMITS
from attention_jax.systems.runs import Run, open_run
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.digests import (
  DATA_DIGESTS_FILE,
  FILE_DIGESTS,
  add_file_digests,
  digested_files,
  drop_file_digests,
)
from attention_jax.training.folder import CONFIG, prepare_folder
from attention_jax.training.paths import absolute, is_in_bucket, run_path
from attention_jax.training.state import TrainState, evaluation_field

# Files that may lack a digest: users may delete the digests, and an interrupted run has dropped some of them.
FILES = (CONFIG, COMMITS, DATA_DIGESTS_FILE, RESULTS, FILE_DIGESTS)


def export_run(folder: epath.PathLike, target: epath.PathLike, checkpoint: str = 'best') -> int:
  """Writes a run folder with the parameters of a run, without the state of its optimiser.

  It has the config, the vocabularies and the digests of the run, one checkpoint, `best`, and results and hypotheses if
  they are those of this checkpoint. It can be opened like any other run, but training cannot be resumed from it.

  Args:
    folder: the folder of the run.
    target: the new folder.
    checkpoint: as for `runs.open_run`.

  Returns:
    The size of the new folder in bytes.

  Raises:
    UserError: as `open_run`, and if `target` exists or cannot be written.
  """
  run = open_run(folder, checkpoint)
  target = run_path(target)
  if is_in_bucket(target):
    raise UserError(f'cannot export to {target}: expected a folder of a file system, which may be copied to a bucket')
  target = absolute(target)
  if target.exists():
    raise UserError(f'{target} exists; choose another folder')
  try:
    with write_folder_atomic(target) as unfinished:
      _write_run(run, unfinished, checkpoint)
  except OSError as error:
    raise UserError(f'cannot export to {target}: {error.strerror}') from error
  return sum(path.stat().st_size for path in Path(target).rglob('*') if path.is_file())


def _write_run(run: Run, folder: epath.Path, checkpoint: str) -> None:
  run.system.save(str(folder))
  names = {*digested_files(run.folder), *FILES, *(path.name for path in stored_plugins(run.folder))}
  omitted = {INITIAL_FILE}  # which training alone needs
  if checkpoint.endswith(SUFFIX) or not _has_results_of(run):  # a file may hold the parameters of any run
    omitted |= {name for name in names if name == RESULTS or name.startswith(HYPOTHESES_PREFIX)}
  for name in names - omitted:
    if (run.folder / name).exists():
      (folder / name).write_bytes((run.folder / name).read_bytes())
  drop_file_digests(folder, sorted(omitted))
  write_checkpoint(run.params, run.step, run.config.training.average, folder)


def write_run(system: System, params: Any, folder: epath.PathLike) -> None:
  """Writes a new run folder for parameters that this package did not train, as `export_run` writes it; step 0.

  Args:
    system: the system, whose config is that of the run.
    params: the parameters.
    folder: the new folder.
  """
  with write_folder_atomic(epath.Path(folder)) as unfinished:
    prepare_folder(unfinished, to_dict(system.config))
    add_file_digests(unfinished, [CONFIG, *system.save(str(unfinished))])
    write_checkpoint(params, 0, system.config.training.average, unfinished)


def write_checkpoint(params: Any, step: int, average: float, folder: epath.Path) -> None:
  """Writes parameters as the best checkpoint of a run, from which training cannot resume.

  Args:
    params: the parameters.
    step: the step of the checkpoint.
    average: config.training.average of the run.
    folder: the run folder.
  """
  empty_state = TrainState(step=np.int32(step), params=(), opt_state=(), average=(), running={})
  state = empty_state._replace(**{evaluation_field(average): params})
  checkpoints = Checkpoints(folder)
  try:
    checkpoints.save(state, host_values={}, kind=BEST)  # without host values: training cannot resume from it
  finally:
    checkpoints.close()
  (folder / LATEST).rmdir()  # created by Checkpoints, and empty


def _has_results_of(run: Run) -> bool:
  """Returns whether the results in the folder of a run were measured with the parameters of `run`."""
  path = run.folder / RESULTS
  return path.exists() and (json.loads(path.read_text()).get('step'),) == run.steps
