"""The states and updates of several runs that differ only in their seeds: stacked in one program, or separate."""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from attention_jax.training.initializer import StateInitializer
from attention_jax.training.loop import Training, prepare_training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import fetch, sharding
from attention_jax.training.state import TrainState
from attention_jax.training.step import TrainStep
from attention_jax.training.threads import map_in_threads, program_threads


class SideBySide(abc.ABC):
  """Runs side by side: `runs(states, batches, live) -> (states, metrics)` makes one update of each live run.

  Each subclass defines the structure of `states`. Batches and metrics have a leading axis of runs; a metric may be a
  list with an entry for each run. A run that is not live keeps its state, except for its step; its metrics are 0.
  """

  @abc.abstractmethod
  def __call__(self, states: Any, batches: Any, live: np.ndarray) -> tuple[Any, Mapping[str, Any]]:
    """Makes one update; `states` are donated."""

  @abc.abstractmethod
  def init_states(self) -> Any:
    """Returns the states before the first update."""

  @abc.abstractmethod
  def state_shapes(self) -> TrainState:
    """Returns the shapes and dtypes of what `stack` returns, and the shardings with which it is restored."""

  @abc.abstractmethod
  def run_shapes(self) -> TrainState:
    """Returns the shapes, dtypes and shardings of what `select` returns."""

  @abc.abstractmethod
  def select(self, states: Any, run: int) -> TrainState:
    """Returns the state of one run."""

  @abc.abstractmethod
  def stack(self, states: Any) -> TrainState:
    """Returns the states with a leading axis of runs, as they are stored in a checkpoint."""

  @abc.abstractmethod
  def unstack(self, stacked: TrainState) -> Any:
    """Inverse of `stack`."""

  @abc.abstractmethod
  def compile_for(self, batch: Any, when_lowered: Callable[[], None]) -> None:
    """Compiles the update for the shapes of a batch of one run, see TrainStep.compile_for.

    Args:
      batch: a batch of one run.
      when_lowered: called before the compilers start.
    """

  @abc.abstractmethod
  def compilations(self) -> int:
    """Returns the number of batch shapes of the updates made so far, see TrainStep.compilations."""


class Stacked(SideBySide):
  """One program that updates all runs, vectorised over a leading axis, for devices that one run does not fill."""

  def __init__(self, train_step: TrainStep, initializer: StateInitializer):
    self._train_step = train_step
    self._initializer = initializer
    # `select` replicates the state of one run over all devices.
    self._layout = sharding(train_step.mesh, 'state')
    self._select = jax.jit(lambda states, i: jax.tree.map(lambda x: x[i], states), out_shardings=self._layout)

  def __call__(self, states, batches, live):
    return self._train_step(states, batches, live)

  def init_states(self):
    return self._initializer()

  def state_shapes(self):
    return self._initializer.shapes

  def run_shapes(self):
    def remove_axis(x):
      return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=self._layout)

    return jax.tree.map(remove_axis, self.state_shapes())

  def select(self, states, run):
    return self._select(states, run)

  def stack(self, states):
    return states

  def unstack(self, stacked):
    return stacked

  def compile_for(self, batch, when_lowered):
    runs = len(self._train_step.root)
    batch = jax.tree.map(lambda x: np.stack([x] * runs), batch)
    self._train_step.compile_for(self.state_shapes(), batch, when_lowered)

  def compilations(self):
    return self._train_step.compilations()


class Separate(SideBySide):
  """One state per run, updated by the programs of a single run, several runs at the same time, see `program_threads`.

  For CPUs, where one program of all runs is as slow as their programs one after the other. All runs share the compiled
  programs of one, and have the same numbers as if they were trained alone.
  """

  def __init__(self, train_steps: Sequence[TrainStep], initializers: Sequence[StateInitializer]):
    self._train_steps = train_steps
    self._initializers = initializers
    self._layout = sharding(train_steps[0].mesh, 'state')

  def __call__(self, states, batches, live):
    def update(run):
      state = states[run]
      if not live[run]:
        return state._replace(step=state.step + 1), collections.defaultdict(float)
      return jax.block_until_ready(self._train_steps[run](state, jax.tree.map(lambda x: x[run], batches)))

    new_states, metrics = zip(*map_in_threads(update, range(len(states)), program_threads()), strict=True)
    live_metrics = metrics[int(np.argmax(live))]
    return list(new_states), {name: [run_metrics[name] for run_metrics in metrics] for name in live_metrics}

  def init_states(self):
    return [initializer() for initializer in self._initializers]

  def state_shapes(self):
    def add_axis(x):
      return jax.ShapeDtypeStruct((len(self._initializers), *x.shape), x.dtype, sharding=self._layout)

    return jax.tree.map(add_axis, self.run_shapes())

  def run_shapes(self):
    return self._initializers[0].shapes

  def select(self, states, run):
    return states[run]

  def stack(self, states):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *fetch(states))

  def unstack(self, stacked):
    stacked = fetch(stacked)
    shapes = self.run_shapes()
    return [
      jax.tree.map(lambda x, like, i=i: jax.device_put(x[i], like.sharding), stacked, shapes)
      for i in range(len(self._train_steps))
    ]

  def compile_for(self, batch, when_lowered):
    self._train_steps[0].compile_for(self.run_shapes(), batch, when_lowered)

  def compilations(self):
    return self._train_steps[0].compilations()


def prepare_side_by_side(
  training: Training, loss: Loss, init_params: Callable[[int], Any], mesh: Mesh, seeds: Sequence[int]
) -> SideBySide:
  """Prepares one run for each seed; the arguments are those of `loop.prepare_training`."""
  if mesh.shape['seed'] == 1 and mesh.devices.flat[0].platform == 'cpu':
    first, initializer = prepare_training(training, loss, init_params, mesh, seeds[0])
    return Separate([first.with_seed(seed) for seed in seeds], [initializer.with_seed(seed) for seed in seeds])
  return Stacked(*prepare_training(training, loss, init_params, mesh, seeds))
