"""The state that training carries from one update to the next; with config and data it determines all later updates."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils


class TrainState(NamedTuple):
  """State of training.

  Attributes:
    step: [] int32, the number of updates made so far; update number n (from 1) turns step n - 1 into n.
    params: the model's parameters.
    opt_state: the optimiser's state.
    average: the moving average of params (same tree), or () if there is none.
    running: running means [] float32 of the metrics that the loss reads, by name.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  average: Any
  running: dict[str, jax.Array]


def count_parameters(params: Any) -> int:
  """Returns the number of values in a tree of arrays, or of their shapes."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def init_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  average_decay: float = 0.0,
  running: Iterable[str] = (),
) -> TrainState:
  """Returns the state before the first update.

  Args:
    params: initial parameters. They are copied, because the training step donates its state.
    optimizer: the optimiser.
    average_decay: decay of the moving average of the parameters; 0 keeps none.
    running: names of the metrics of which running means are kept.
  """

  def copy_params():
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)

  means = {name: jnp.zeros([], jnp.float32) for name in running}
  step = jnp.zeros([], jnp.int32)
  return TrainState(step, copy_params(), optimizer.init(params), copy_params() if average_decay else (), means)


def update_average(average: Any, params: Any, step: jax.Array, decay: float) -> Any:
  """Returns the moving average of the parameters after update n: d · average + (1 − d) · params.

  d = min(decay, (1 + n) / (10 + n)). This bound makes the average forget the random initialisation in short runs.

  Args:
    average: the moving average, or () if there is none.
    params: the parameters after this update.
    step: number n of this update, [] int32.
    decay: 0 leaves `average` as it is.

  Returns:
    The moving average after this update.
  """
  if not decay:
    return average
  d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
  updated = optax.incremental_update(params, average, 1 - d)
  return jax.tree.map(lambda new, old: new.astype(old.dtype), updated, average)


def update_running(running: Mapping[str, jax.Array], metrics: Mapping[str, jax.Array], step: jax.Array):
  """Returns the running means of metrics after update n: d · mean + (1 − d) · metric.

  d = min(0.9, (n − 1) / n), so that the first ten are plain means.

  Args:
    running: the running means by name, [] float32.
    metrics: the metrics of this update by name, among them those of `running`.
    step: number n of this update, [] int32.

  Returns:
    The running means after this update.
  """
  d = jnp.minimum(0.9, (step - 1) / step)
  return {name: d * mean + (1 - d) * metrics[name] for name, mean in running.items()}


def evaluation_params(state: TrainState) -> Any:
  """Returns the parameters to evaluate and to predict with: the moving average if there is one, else params."""
  return state.average or state.params


def evaluation_field(average_decay: float) -> str:
  """Returns the field of TrainState that `evaluation_params` reads, for the decay of the moving average."""
  return 'average' if average_decay else 'params'


def is_finite(state: TrainState) -> bool:
  """Returns whether every floating-point number of the state is finite, the same in every process.

  The host checks the numbers: a program would have one reduction to compile for each array.
  """
  floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
  local = all(np.isfinite(part).all() for x in floats for part in _local_parts(x))
  return bool(np.all(multihost_utils.process_allgather(np.asarray(local))))


def _local_parts(x: jax.Array | np.ndarray) -> list[np.ndarray]:
  """The parts of an array that this process holds; a part that several devices hold is returned once."""
  if isinstance(x, np.ndarray):
    return [x]
  parts = {str(shard.index): shard.data for shard in x.addressable_shards}
  return [np.asarray(part) for part in parts.values()]
