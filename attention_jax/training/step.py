"""One update, compiled once per batch shape: gradients, optimiser, average. Of one run, or of several side by side."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from attention_jax.training.anneal import NO_SCHEDULES, Schedules, apply_schedules, zero_scheduled
from attention_jax.training.loss import OBJECTIVE_RNG, Loss
from attention_jax.training.partition import jit_on_mesh, shard_batch, sharding
from attention_jax.training.state import TrainState, update_average, update_running

RNGS = ('dropout', 'attention', OBJECTIVE_RNG)  # the streams of randomness that models and objectives draw from


def step_rngs(rng: jax.Array) -> dict[str, jax.Array]:
  """One rng per stream; does not depend on which of them the model uses."""
  return {name: jax.random.fold_in(rng, i) for i, name in enumerate(RNGS)}


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """`train_step(state, batch) -> (state, metrics)`. The given state is donated: it is gone afterwards.

  metrics are [] float32 arrays still on the device (nothing waits for them): loss, accuracy (and whatever else the loss
  sums) per token, tokens, grad_norm before clipping, learning_rate. Of several seeds, everything has an axis of them in
  front, and train_step(state, batch, live) leaves those as they are that `live` [seeds] says False for: only their
  step goes on, and their metrics are 0.
  """

  compiled: Callable
  root: jax.Array
  mesh: Mesh
  accumulate: int = 1
  rule: str = 'batch'

  def __call__(
    self, state: TrainState, batch, live: np.ndarray | None = None
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    batch = shard_batch(batch, self.mesh, self.accumulate, self.rule)
    if self.rule == 'batch':
      return self.compiled(self.root, state, batch)
    live = np.ones(len(self.root), bool) if live is None else live
    return self.compiled(self.root, state, batch, jax.device_put(live, self.root.sharding))

  def compilations(self) -> int:
    """How many batch shapes have been compiled so far."""
    return self.compiled._cache_size()


def make_train_step(
  loss: Loss,
  optimizer: optax.GradientTransformation,
  schedule: Callable,
  mesh: Mesh,
  *,
  seed: int | Sequence[int],
  accumulate: int = 1,
  average: float = 0.0,
  anneal: Schedules = NO_SCHEDULES,
) -> TrainStep:
  """One update as a function of (state, batch, seed).

  Args:
    seed: of all randomness. With several, each is a run of its own: state, batch and metrics have a leading axis of
      them, which the mesh splits (partition.make_mesh).
  The others are those of `compile_update`.
  """
  several = not isinstance(seed, int)
  # As plain numbers, which several processes can put on one mesh.
  key_data = lambda seed: np.asarray(jax.random.key_data(jax.random.key(seed)))
  root = np.stack([key_data(one) for one in seed]) if several else key_data(seed)
  compiled = compile_update(
    loss, optimizer, schedule, mesh, several=several, accumulate=accumulate, average=average, anneal=anneal
  )
  root = jax.device_put(root, sharding(mesh, 'states' if several else 'state'))
  return TrainStep(compiled, root, mesh, accumulate, 'batches' if several else 'batch')


def compile_update(
  loss: Loss,
  optimizer: optax.GradientTransformation,
  schedule: Callable,
  mesh: Mesh,
  *,
  several: bool = False,
  accumulate: int = 1,
  average: float = 0.0,
  anneal: Schedules = NO_SCHEDULES,
) -> Callable:
  """(root, state, batch) -> (state, metrics), compiled once per shape; root is the data of a PRNG key. The state is
  donated.

  Args:
    several: whether runs are side by side, under a leading axis of root, state and batch; then (root, state, batch,
      live), see TrainStep.
    accumulate: the batch is worked through in so many parts, one after the other, for less memory. The update is that
      of the whole batch: tokens, not parts, are weighted equally, and `step` counts updates.
    average: decay of the moving average of the parameters; 0 keeps none. See state.update_average.
    anneal: schedules of parameters that have no gradient then: after update n they are at their values for n + 1.
  """

  def gradients(params, running, number, batch, rng):
    objective = lambda p: (lambda sums: (sums['loss'], sums))(loss(p, batch, step_rngs(rng), running, number))
    (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params)
    return sums, grads

  def update(root, state, batch):
    rng = jax.random.fold_in(jax.random.wrap_key_data(root), state.step)
    whole = gradients if accumulate == 1 else _in_parts(gradients, accumulate, sharding(mesh, 'parts'))
    step = state.step + 1
    sums, grads = whole(state.params, state.running, step, batch, rng)
    count = jnp.maximum(sums['tokens'], 1)
    grads = zero_scheduled(jax.tree.map(lambda g: g / count.astype(g.dtype), grads), anneal)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = apply_schedules(optax.apply_updates(state.params, updates), anneal, step + 1)
    averages = apply_schedules(update_average(state.average, params, step, average), anneal, step + 1)
    metrics = {name: total / count for name, total in sums.items()} | {
      'tokens': sums['tokens'],
      'grad_norm': optax.tree.norm(grads),
      'learning_rate': jnp.asarray(schedule(step), jnp.float32),
    }
    return TrainState(step, params, opt_state, averages, update_running(state.running, metrics, step)), metrics

  # The root is an argument: the program is the same for every seed, and compiled once for all of them.
  held, rows = (sharding(mesh, rule) for rule in (('states', 'batches') if several else ('state', 'batch')))
  given = (held, held, rows)
  if several:
    update, given = _of_each(_while_live(update), mesh), (*given, held)
  return jit_on_mesh(mesh, update, donate_argnums=1, in_shardings=given, out_shardings=held)


def _while_live(update: Callable) -> Callable:
  """`update` of a run that may be over: (root, state, batch, live)."""
  update = jax.jit(update)  # traced once for both uses

  def still(root, state, batch):
    metrics = jax.eval_shape(update, root, state, batch)[1]
    return state._replace(step=state.step + 1), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

  return lambda root, state, batch, live: jax.lax.cond(live, update, still, root, state, batch)


def _of_each(update: Callable, mesh: Mesh) -> Callable:
  """`update` of several runs, under a leading axis of all that it takes and gives."""
  if mesh.shape['seed'] == 1 and mesh.devices.flat[0].platform == 'cpu':
    # One run keeps all cores busy; several at once would only share their caches.
    return lambda *given: jax.lax.map(lambda own: update(*own), given)
  return jax.vmap(update, spmd_axis_name='seed')


def _in_parts(gradients: Callable, parts: int, layout) -> Callable:
  """`gradients` as a scan over `parts` slices of the batch: the same sums, one slice in memory at a time."""

  def split(x):
    # Part i takes the rows i, i + parts, ...: each device slices its own rows and none has to move.
    x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, layout)

  def whole(params, running, number, batch, rng):
    slices = jax.tree.map(split, batch)
    one = lambda i: gradients(params, running, number, jax.tree.map(lambda x: x[i], slices), jax.random.fold_in(rng, i))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0))
    add = lambda total, i: (jax.tree.map(jnp.add, total, one(i)), None)
    return jax.lax.scan(add, zeros, jnp.arange(parts))[0]

  return whole
