"""Updates of runs that differ only in their seeds: in one program on accelerators, in turn on CPUs.

`update(states, batches, live) -> (states, metrics)` makes one update of each live run: batches and metrics have an
entry for each run. A run that is not live keeps its state. The states are donated; their structure is that of each
class.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attention_jax.training.anneal import apply_schedules, make_anneal
from attention_jax.training.config import Training
from attention_jax.training.frozen import check_frozen, freeze_loss
from attention_jax.training.initializer import StateInitializer
from attention_jax.training.loss import Loss
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, sharding, state_shardings
from attention_jax.training.state import TrainState, init_state
from attention_jax.training.step import TrainStep, make_train_step


class UpdatesInTurn:
  """Applies the update of a single run to each run: the numbers are those of a run that is trained alone.

  For one run, and for several on CPUs, where one program of all runs takes up to twice the time.

  Attributes:
    shapes: shapes, dtypes and shardings of the state of one run.
  """

  def __init__(self, train_step: TrainStep, initializer: StateInitializer, seeds: Sequence[int]):
    self._train_steps = [train_step.with_seed(seed) for seed in seeds]
    self._initializer = initializer
    self._seeds = seeds
    self.shapes = initializer.shapes

  def __call__(self, states, batches, live):
    new_states, metrics = list(states), [collections.defaultdict(float)] * len(states)
    for run in np.flatnonzero(live):
      new_states[run], metrics[run] = self._train_steps[run](states[run], batches[run])
    names = metrics[int(np.argmax(live))]
    return new_states, {name: [run_metrics[name] for run_metrics in metrics] for name in names}

  def load(self, states: Sequence[TrainState | None]) -> list[TrainState]:
    """Returns the states of all runs from that of each; None stands for the state before its first update."""
    return [
      self._initializer(seed) if state is None else state for seed, state in zip(self._seeds, states, strict=True)
    ]

  def select(self, states: list[TrainState], run: int) -> TrainState:
    """Returns the state of one run."""
    return states[run]

  def compile_for(self, batch: Any) -> None:
    """Compiles the update for the shapes of a batch of one run."""
    self._train_steps[0].compile_for(self.shapes, batch)

  def compilations(self) -> int:
    """Returns the number of batch shapes of the updates made so far."""
    return self._train_steps[0].compilations()


class VmappedUpdates:
  """One program that updates all runs, vectorised over a leading axis, for devices that one run does not fill.

  Methods and attributes: see UpdatesInTurn.
  """

  def __init__(self, train_step: TrainStep, initializer: StateInitializer, seeds: Sequence[int]):
    self._train_step = train_step
    self._initializer = initializer
    self._seeds = seeds
    layout = sharding(train_step.mesh, 'state')
    self._select = jax.jit(lambda states, i: jax.tree.map(lambda x: x[i], states), out_shardings=layout)
    self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), initializer.shapes)
    stacked = self._stacked_shapes()
    self._stack = jax.jit(
      lambda states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
      out_shardings=jax.tree.map(lambda x: x.sharding, stacked),
    )

  def __call__(self, states, batches, live):
    return self._train_step(states, jax.tree.map(lambda *arrays: np.stack(arrays), *batches), np.asarray(live))

  def load(self, states: Sequence[TrainState | None]) -> TrainState:
    return self._stack(
      [self._initializer(seed) if state is None else state for seed, state in zip(self._seeds, states, strict=True)]
    )

  def select(self, states: TrainState, run: int) -> TrainState:
    return self._select(states, run)

  def compile_for(self, batch: Any) -> None:
    batch = jax.tree.map(lambda x: np.stack([x] * len(self._seeds)), batch)
    self._train_step.compile_for(self._stacked_shapes(), batch)

  def compilations(self) -> int:
    return self._train_step.compilations()

  def _stacked_shapes(self) -> TrainState:
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((len(self._seeds), *x.shape), x.dtype), self._initializer.shapes
    )
    layouts = state_shardings(shapes, self._train_step.mesh, stacked=True)
    return jax.tree.map(lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), shapes, layouts)


def make_updates(
  training: Training, loss: Loss, init_params: Callable[[int], Any], mesh: Mesh | None, seeds: Sequence[int]
) -> UpdatesInTurn | VmappedUpdates:
  """Returns the updates of a run for each seed.

  Args:
    training: options of training.
    loss: the loss to minimise.
    init_params: seed -> initial parameters.
    mesh: the mesh of the devices; by default all.
    seeds: the seed of each run.
  """
  mesh = mesh or make_mesh(seeds=len(seeds))
  in_turn = len(seeds) == 1 or (mesh.shape['seed'] == 1 and mesh.devices.flat[0].platform == 'cpu')
  cls = UpdatesInTurn if in_turn else VmappedUpdates
  return cls(*prepare_training(training, loss, init_params, mesh, seeds[0] if in_turn else seeds), seeds)


def prepare_training(
  training: Training, loss: Loss, init_params: Callable[[int], Any], mesh: Mesh, seed: int | Sequence[int]
) -> tuple[TrainStep, StateInitializer]:
  """Builds the training step and the initialiser of the state of one run.

  Args:
    training: options of training.
    loss: the loss to minimise.
    init_params: seed -> initial parameters.
    mesh: the mesh of the devices.
    seed: the seed of one run, or the seeds of several in one program, see step.make_train_step.

  Returns:
    The training step, and the initialiser, a function of a seed.
  """
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip, training.frozen)
  shapes = jax.eval_shape(lambda: init_params(training.seed))
  check_frozen(training.frozen, shapes)
  anneal = make_anneal(training.anneal, shapes, training.steps)
  train_step = make_train_step(
    freeze_loss(loss, training.frozen),
    optimizer,
    schedule,
    mesh,
    seed=seed,
    accumulate=training.accumulate,
    average_decay=training.average,
    anneal=anneal,
    skip_nonfinite=training.on_nonfinite == 'skip',
  )

  def init(params: Any) -> TrainState:
    return init_state(apply_schedules(params, anneal, 1), optimizer, training.average, loss.running)

  return train_step, StateInitializer(init_params, init, mesh)
