"""Training that starts from the parameters of another run: fine-tuning, or a second stage of training.

The new run uses the vocabularies of the first one. Parameters of equal names are copied; the others have their random
initial values. The copied parameters are stored in the new run folder, so that the new run resumes without the first
one. With config.initial_state, the first checkpoint of the new run is the latest state of the first one. The word
vectors of initial_vectors.py are stored in the same way as parameters.
"""

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from attention_jax.atomic import write_bytes
from attention_jax.data.files import read_arrays
from attention_jax.errors import UserError
from attention_jax.modules.parameter_files import abbreviate_names, flatten_names, unflatten_names
from attention_jax.systems.base import Log, System
from attention_jax.systems.config import RunConfig, read_run_config
from attention_jax.systems.ready_made import resolve_folder
from attention_jax.systems.runs import open_run
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.run import BestEvaluation
from attention_jax.training.seeds import prepare_training
from attention_jax.training.state import TrainState

INITIAL_FILE = 'initial.npz'  # written after the vocabularies: where it exists, they exist
# fields of config.data that both runs must have in common
DATA_FIELDS = ('vocabulary', 'shared_vocabulary', 'normalization')

Initializer = Callable[[int], Any]


class InitialRun(NamedTuple):
  """Parameters to start from, and the system whose vocabularies they belong to.

  Attributes:
    arrays: parameters by name.
    system: the system of config.initial_run; None once the new run has stored its vocabularies.
  """

  arrays: Mapping[str, np.ndarray]
  system: System | None


def check_initial_run(config: RunConfig) -> None:
  """Compares a config with that of its initial run, if it names one. Reads no parameters.

  Raises:
    UserError: if the folder holds no run, or one of another system or another kind of vocabulary.
  """
  if not config.initial_run:
    return
  name = f'config.initial_run={config.initial_run!r}'
  folder = resolve_folder(config.initial_run)
  initial_config = read_run_config(folder)
  if initial_config.system != config.system:
    raise UserError(f'{name} is a run of system {initial_config.system!r}; expected a run of system {config.system!r}')
  for field in DATA_FIELDS:
    values = [getattr(run_config.data, field, None) for run_config in (config, initial_config)]
    if values[0] != values[1]:
      raise UserError(f'config.data.{field} must be that of {name}, {values[1]!r}; got {values[0]!r}')


def open_initial_run(config: RunConfig, folder: epath.Path) -> InitialRun | None:
  """Returns the parameters that a run starts from: those stored in its folder, or the best ones of config.initial_run.

  Args:
    config: the whole config of the run.
    folder: the run folder, which need not exist.

  Returns:
    The parameters by name and, if the run has not stored them, their system; None if config.initial_run is empty.

  Raises:
    UserError: as `check_initial_run` and `open_run`, and for a stored file that cannot be read.
  """
  if not config.initial_run:
    return None
  if stored := read_stored_initial(folder):
    return InitialRun(stored, None)
  check_initial_run(config)
  run = open_run(config.initial_run)
  arrays = {name: np.asarray(leaf) for name, leaf in flatten_names(jax.device_get(run.params)).items()}
  return InitialRun(arrays, run.system)


def read_continued_state(config: RunConfig, system: System, initializer: Initializer) -> TrainState:
  """Returns the latest state of config.initial_run, which the run continues with other options of training or data.

  Args:
    config: the whole config of the run.
    system: its system.
    initializer: seed -> initial parameters.

  Raises:
    UserError: if the initial run has no such state, or that of another model or optimiser, and if it has made as many
      updates as this run will have.
  """
  training = config.training
  _, state_initializer = prepare_training(training, system.loss, initializer, system.training_mesh, training.seed)
  with contextlib.closing(Checkpoints(resolve_folder(config.initial_run), read_only=True)) as checkpoints:
    state, _ = checkpoints.restore(state_initializer.shapes)
  if state.step >= training.steps:
    raise UserError(
      f'config.training.steps must be greater than the step of config.initial_run, {state.step}, got {training.steps}'
    )
  return state


def store_continued_state(folder: epath.Path, state: TrainState) -> None:
  """Stores the result of `read_continued_state` as the first checkpoint of a run, which has no best state yet."""
  with contextlib.closing(Checkpoints(folder)) as checkpoints:
    checkpoints.save(state, {'best': BestEvaluation()._asdict()})


def read_stored_initial(folder: epath.Path) -> dict[str, np.ndarray] | None:
  """Returns the parameters that `save_initial` has stored in a run folder; None if there are none.

  Raises:
    UserError: if the file cannot be read.
  """
  path = folder / INITIAL_FILE
  return read_arrays(str(path)) if path.exists() else None


def start_from(initializer: Initializer, arrays: Mapping[str, np.ndarray]) -> Initializer:
  """Returns seed -> parameters: those of `arrays` where it has them, otherwise those of `initializer`.

  Args:
    initializer: seed -> random parameters.
    arrays: parameters by name.
  """

  def initialize(seed: int) -> Any:
    params = initializer(seed)
    leaves = flatten_names(params)
    copied = {name: array.astype(leaves[name].dtype) for name, array in arrays.items() if name in leaves}
    return unflatten_names(leaves | copied, params)

  return initialize


def describe_start(arrays: Mapping[str, np.ndarray], params: Any, name: str, log: Log) -> None:
  """Logs how many parameters are copied, which are random, and which of `arrays` are not used.

  Args:
    arrays: the parameters to start from by name.
    params: the parameters of the new model, or their shapes.
    name: the config field that names their source, with its value, such as "config.initial_run='runs/x'".
    log: called with each line.

  Raises:
    UserError: if parameters of the same name have different shapes, or if none has the same name.
  """
  expected = flatten_names(params)
  common = sorted(expected.keys() & arrays.keys())
  for key in common:
    if arrays[key].shape != expected[key].shape:
      raise UserError(
        f'{key} is {list(arrays[key].shape)} in {name}, and {list(expected[key].shape)} in this '
        'config; expected a model with parameters of the same shape'
      )
  if not common:
    raise UserError(f'{name} has no parameter of the same name as this model')
  log(f'starts with {len(common)} of its {len(expected)} parameter arrays from {name}')
  if random := sorted(expected.keys() - arrays.keys()):
    log(f'random at the start: {abbreviate_names(random)}')
  if unused := sorted(arrays.keys() - expected.keys()):
    log(f'not used from {name}: {abbreviate_names(unused)}')


def save_initial(folder: epath.Path, arrays: Mapping[str, np.ndarray]) -> str:
  """Stores the parameters that a run starts from in its folder, unless they are there; returns the name of the file."""
  path = folder / INITIAL_FILE
  if not path.exists():
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_bytes(path, content.getvalue())
  return INITIAL_FILE
