"""Repeats an update whose loss or gradient was not finite, and reports which rows and parameters are the cause."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from attention_jax.data.pipeline import stream
from attention_jax.errors import UserError, choose
from attention_jax.systems.base import System
from attention_jax.systems.config import fill_defaults
from attention_jax.systems.initial_run import read_stored_initial, start_from
from attention_jax.systems.ready_made import resolve_folder
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import check_run_files, run_seeds
from attention_jax.training.anneal import make_anneal, zero_scheduled
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.folder import read_config
from attention_jax.training.frozen import freeze_loss
from attention_jax.training.incidents import named_arrays, read_batch, stored_updates
from attention_jax.training.initializer import StateInitializer
from attention_jax.training.loop import Training, prepare_training
from attention_jax.training.partition import MeshConfig, fetch, make_mesh
from attention_jax.training.side_by_side import SideBySide, prepare_side_by_side
from attention_jax.training.state import TrainState
from attention_jax.training.step import step_rngs


class Replay(NamedTuple):
  """An update that has been repeated.

  Attributes:
    update: number of the update, from 1.
    seed: the seed of the run.
    start: the step of the state from which the earlier updates were repeated: that of a checkpoint, or 0 for the
      initial state.
    loss: loss of the batch per token.
    grad_norm: norm of the gradient of that loss, before clipping.
    params: names of parameters that were not finite before the update.
    gradients: names of parameters whose gradient is not finite.
    rows: numbers of the rows whose loss, computed for each row alone and without dropout, is not finite: numbers in the
      training split, or in the batch if batches are generated or have no `index`.
  """

  update: int
  seed: int
  start: int
  loss: float
  grad_norm: float
  params: list[str]
  gradients: list[str]
  rows: list[int]

  @property
  def is_finite(self) -> bool:
    """Whether the loss and the gradient norm are finite."""
    return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def replay(folder: str | Path, update: int = 0, seed: int | None = None) -> Replay:
  """Repeats an update of a run from the last checkpoint before it, or the initial state, without writing anything.

  Args:
    folder: the run folder, or its URL, with a stored batch of that update.
    update: number of the update; 0 for the first one of which the batch is stored.
    seed: which of several runs side by side to repeat; by default the first one whose loss or gradient is not finite,
      or the last one if all are finite.

  Raises:
    UserError: if the folder holds no run, no stored batch of that update or no such seed, if the files of the run have
      changed, and if the data now yield another batch than the stored one.
  """
  folder = resolve_folder(folder)
  check_run_files(folder)
  config = fill_defaults(read_config(folder), f'{folder}/config.json')
  config |= {'mesh': dataclasses.asdict(MeshConfig())}  # that of this machine, which may have fewer devices
  seeds = run_seeds(config)
  if seed is not None:
    choose(str(seed), map(str, seeds), f'seed in {folder}:')
  updates = stored_updates(folder)
  if not updates:
    if stored_updates(folder.parent):
      raise UserError(f'{folder} has no stored batch; those of several seeds are in {folder.parent}')
    raise UserError(f'{folder} has no stored batch; expected a run with a loss or gradient that was not finite')
  update = update or updates[0]
  choose(str(update), map(str, updates), f'update with a stored batch in {folder}:')
  system = SYSTEMS[config['system']].load(dict(config, seeds=1), str(folder))
  initializer = system.initializer()
  if initial := read_stored_initial(folder):
    initializer = start_from(initializer, initial)
  for index, run_seed in enumerate(seeds):
    if seed is None or run_seed == seed:
      result = _repeat(folder, system, initializer, update, seeds, index)
      if not result.is_finite:
        break
  return result


def _repeat(
  folder: Path, system: System, initializer: Callable[[int], Any], update: int, seeds: Sequence[int], index: int
) -> Replay:
  """Repeats an update of a single run, or of one of several side by side.

  Args:
    folder: the run folder.
    system: the system of a single run.
    initializer: seed -> initial parameters.
    update: number of the update.
    seeds: the seed of each run.
    index: which of the runs to repeat.
  """
  training = Training(**system.config['training'])
  seed = seeds[index]
  train_step, initial_state = prepare_training(training, system.loss, initializer, system.training_mesh, seed)
  side_by_side = None
  if len(seeds) > 1:
    side_by_side = prepare_side_by_side(training, system.loss, initializer, make_mesh(seeds=len(seeds)), seeds)
  state = _state_before(folder, update, initial_state, side_by_side, index)
  start = int(state.step)
  batches = system.batches(seed)
  for batch in stream(batches, start, update - 1):
    state, _ = train_step(state, batch)
  batch = batches[update - 1]
  stored = read_batch(folder, update)
  if side_by_side:
    stored = {name: array[index] for name, array in stored.items()}
  _check_unchanged(update, batch, stored)
  sums, gradients = _sums_and_gradients(freeze_loss(system.loss, training.frozen), state, batch, seed)
  # As in training, annealed and frozen parameters have no gradient.
  gradients = zero_scheduled(gradients, make_anneal(training.anneal, state.params, training.steps))
  count = max(float(sums['tokens']), 1.0)
  return Replay(
    update,
    seed,
    start,
    float(sums['loss']) / count,
    float(optax.tree.norm(gradients)) / count,
    _nonfinite_names(state.params),
    _nonfinite_names(gradients),
    _nonfinite_rows(system.loss, state, batch),
  )


def _state_before(
  folder: Path, update: int, initial_state: StateInitializer, side_by_side: SideBySide | None, index: int
) -> TrainState:
  """Returns the state of the last checkpoint before an update, or the initial state.

  Args:
    folder: the run folder.
    update: number of the update.
    initial_state: computes the initial state of the run, or its shapes.
    side_by_side: the runs whose states the checkpoint contains; None for a single run.
    index: number of the run among them.
  """
  checkpoints = Checkpoints(folder, read_only=True)
  try:
    steps = [step for step in checkpoints.steps() if step < update]
    if not steps:
      return initial_state()
    shapes = side_by_side.state_shapes() if side_by_side else initial_state.shapes
    state, _ = checkpoints.restore(shapes, step=steps[-1])
  finally:
    checkpoints.close()
  if side_by_side is None:
    return state
  run_state = jax.tree.map(lambda x: x[index], fetch(state))
  return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), run_state, initial_state.shapes)


def _check_unchanged(update: int, batch: Any, stored: dict[str, np.ndarray]) -> None:
  """Raises UserError if a batch differs from the stored one of the update."""
  stored = _real_rows(stored)
  arrays = _real_rows(named_arrays(batch))
  changed = [name for name in stored.keys() | arrays.keys() if not np.array_equal(stored.get(name), arrays.get(name))]
  if changed:
    raise UserError(
      f'the batch of update {update} differs from the stored one in {", ".join(sorted(changed))}; '
      'expected the data with which the run was trained'
    )


def _real_rows(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Arrays of a batch without filler rows, whose number depends on that of the devices."""
  if 'index' not in arrays:
    return arrays
  return {name: array[arrays['index'] >= 0] for name, array in arrays.items()}


def _sums_and_gradients(loss: Any, state: TrainState, batch: Any, seed: int) -> tuple[Any, Any]:
  """The sums of a batch and the gradient of the loss, with the random numbers of training with accumulate=1."""
  rngs = step_rngs(jax.random.fold_in(jax.random.key(seed), state.step))

  @jax.jit
  def differentiate(params, batch):
    def objective(params):
      sums = loss(params, batch, rngs, state.running, state.step + 1)
      return sums['loss'], sums

    return jax.grad(objective, has_aux=True)(params)

  gradients, sums = differentiate(state.params, batch)
  return sums, gradients


def _nonfinite_rows(loss: Any, state: TrainState, batch: Any) -> list[int]:
  """The numbers of the rows whose loss is not finite, see Replay.rows."""

  def row_loss(row):
    single = jax.tree.map(lambda x: x[None], row)
    return loss(state.params, single, None, state.running, state.step + 1)['loss']

  losses = jax.device_get(jax.jit(lambda batch: jax.lax.map(row_loss, batch))(batch))
  rows = np.flatnonzero(~np.isfinite(losses))
  index = getattr(batch, 'index', None)
  return rows.tolist() if index is None else np.asarray(index)[rows].tolist()


def _nonfinite_names(tree: Any) -> list[str]:
  """The names of the arrays with an entry that is not finite."""
  return [name for name, array in named_arrays(tree).items() if not np.isfinite(array.astype(np.float32)).all()]
