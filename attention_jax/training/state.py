"""The state that training carries from one update to the next. It is all that is needed to resume exactly."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class TrainState(NamedTuple):
  """State of training.

  Attributes:
    step: [] int32, the number of updates made so far; update number n (from 1) turns step n - 1 into n.
    params: the model's parameters.
    opt_state: the optimiser's state.
    average: the moving average of params (same tree), or () if there is none.
    running: running means of metrics [] float32 by name, those that the loss reads.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  average: Any
  running: dict[str, jax.Array]


def init_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  average: float = 0.0,
  running: Iterable[str] = (),
) -> TrainState:
  """Returns the state before the first update.

  Args:
    params: initial parameters. They are copied, because the training step donates its state.
    optimizer: the optimiser.
    average: decay of the moving average of the parameters; 0 keeps none.
    running: names of the metrics of which running means are kept.
  """

  def copy_params():
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)

  means = {name: jnp.zeros([], jnp.float32) for name in running}
  step = jnp.zeros([], jnp.int32)
  return TrainState(step, copy_params(), optimizer.init(params), copy_params() if average else (), means)


def update_average(average: Any, params: Any, step: jax.Array, decay: float) -> Any:
  """average ← d · average + (1 − d) · params with d = min(decay, (1 + n) / (10 + n)) at update n.

  The bound makes the average forget the random initialisation in short runs.

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
  return jax.tree.map(lambda a, p: (d * a + (1 - d) * p).astype(a.dtype), average, params)


def update_running(running: Mapping[str, jax.Array], metrics: Mapping[str, jax.Array], step: jax.Array):
  """mean ← d · mean + (1 − d) · metric with d = min(0.9, (n − 1) / n) at update n: at first the plain mean.

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


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
  """Returns whether every floating-point number of the state is finite, [] bool."""
  floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))
