"""Repeats an update of a run, and reports which parameters, gradients and rows are not finite."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from etils import epath

from attention_jax.data.pipeline import stream
from attention_jax.errors import UserError
from attention_jax.systems.config import read_run_config
from attention_jax.systems.initial_run import read_stored_initial, start_from
from attention_jax.systems.ready_made import resolve_folder
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import check_run_files, seed_folder
from attention_jax.training.anneal import make_anneal, zero_scheduled
from attention_jax.training.checkpoint import Checkpoints
from attention_jax.training.digests import check_digests, compute_digests
from attention_jax.training.frozen import freeze_loss
from attention_jax.training.partition import MeshConfig
from attention_jax.training.seeds import prepare_training
from attention_jax.training.state import TrainState
from attention_jax.training.step import step_rngs


class Replay(NamedTuple):
  """An update that has been repeated.

  Attributes:
    update: number of the update, from 1.
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
  start: int
  loss: float
  grad_norm: float
  params: list[str]
  gradients: list[str]
  rows: list[int]


def replay(folder: epath.PathLike, update: int) -> Replay:
  """Repeats an update of a run from the last checkpoint before it, or the initial state, without writing anything.

  Args:
    folder: the run folder; that of one seed, if there are several.
    update: number of the update, from 1.

  Raises:
    UserError: if the folder holds no single run, if its files or data have changed, and for an update that the run does
      not make.
  """
  folder = resolve_folder(folder)
  check_run_files(folder)
  config = dataclasses.replace(read_run_config(folder), mesh=MeshConfig())  # this machine may have fewer devices
  training = config.training
  if config.seeds > 1:
    seeds = ', '.join(seed_folder(folder, seed).name for seed in config.run_seeds)
    raise UserError(f'{folder} has the runs of several seeds; expected the folder of one of them: {seeds}')
  if not 1 <= update <= training.steps:
    raise UserError(f'the update must be 1 to {training.steps}, the steps of the run, got {update}')
  system = SYSTEMS[config.system].load(config, str(folder))
  check_digests(folder, compute_digests(system.arrays), print)
  initializer = system.initializer()
  if initial := read_stored_initial(folder):
    initializer = start_from(initializer, initial)
  train_step, initial_state = prepare_training(training, system.loss, initializer, system.training_mesh, training.seed)
  with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
    steps = [step for step in checkpoints.steps() if step < update]
    state = checkpoints.restore(initial_state.shapes, step=steps[-1])[0] if steps else initial_state(training.seed)
  start = int(state.step)
  batches = system.batches(training.seed)
  for batch in stream(batches, start, update - 1):
    state, _ = train_step(state, batch)
  batch = batches[update - 1]
  sums, gradients = _sums_and_gradients(freeze_loss(system.loss, training.frozen), state, batch, training.seed)
  # As in training, annealed and frozen parameters have no gradient.
  gradients = zero_scheduled(gradients, make_anneal(training.anneal, state.params, training.steps))
  count = max(float(sums['tokens']), 1.0)
  return Replay(
    update,
    start,
    float(sums['loss']) / count,
    float(optax.tree.norm(gradients)) / count,
    _nonfinite_names(state.params),
    _nonfinite_names(gradients),
    _nonfinite_rows(system.loss, state, batch),
  )


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
  leaves = ((jax.tree_util.keystr(path, simple=True, separator='/'), x) for path, x in jax.tree.leaves_with_path(tree))
  return [name for name, x in leaves if not np.isfinite(np.asarray(x, np.float32)).all()]
