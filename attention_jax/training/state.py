"""What training carries from one update to the next, and nothing else: knowing it is enough to go on exactly."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class TrainState(NamedTuple):
  """Attributes:
  step: [] int32, the number of updates made so far; update number n (from 1) turns step n - 1 into n.
  params: the model's parameters.
  opt_state: the optimiser's state.
  average: the moving average of params (same tree), or () when none is kept.
  running: running means of metrics [] float32 by name, those that the loss uses.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  average: Any
  running: dict[str, jax.Array]


def init_state(
  params, optimizer: optax.GradientTransformation, average: float = 0.0, running: Iterable[str] = ()
) -> TrainState:
  """The state before the first update. Copies params: the step donates its input, the caller's own arrays survive."""
  copy = lambda: jax.tree.map(lambda x: jnp.array(x, copy=True), params)
  means = {name: jnp.zeros([], jnp.float32) for name in running}
  return TrainState(jnp.zeros([], jnp.int32), copy(), optimizer.init(params), copy() if average else (), means)


def update_average(average, params, step: jax.Array, decay: float):
  """average ← d · average + (1 − d) · params with d = min(decay, (1 + n) / (10 + n)) at update n.

  The bound lets the average forget the random start in short runs. Without an average, () stays ().
  """
  if not decay:
    return average
  d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
  return jax.tree.map(lambda a, p: (d * a + (1 - d) * p).astype(a.dtype), average, params)


def update_running(running: Mapping[str, jax.Array], metrics: Mapping[str, jax.Array], step: jax.Array):
  """mean ← d · mean + (1 − d) · metric with d = min(0.9, (n − 1) / n) at update n: of few updates the plain mean."""
  d = jnp.minimum(0.9, (step - 1) / step)
  return {name: d * mean + (1 - d) * metrics[name] for name, mean in running.items()}


def evaluation_params(state: TrainState):
  """The parameters to evaluate and to translate with: the average where one is kept, else params."""
  return state.average or state.params


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
  """[] bool: whether every floating number of the state is finite."""
  floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))
