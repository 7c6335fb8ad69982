"""The update of one run, or of several side by side: gradients, compiled once per batch shape, then the optimiser."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from attention_jax.training.anneal import NO_SCHEDULES, Schedules, apply_schedules, zero_scheduled
from attention_jax.training.loss import OBJECTIVE_RNG, Loss
from attention_jax.training.partition import constrain, jit_on_mesh, shard_batch, sharding, state_shardings
from attention_jax.training.state import TrainState, update_average, update_running

RNGS = ('dropout', 'attention', OBJECTIVE_RNG)  # names of the rngs that models and objectives consume


def step_rngs(rng: jax.Array) -> dict[str, jax.Array]:
  """Returns one rng for each name of RNGS; none depends on which of them the model uses."""
  return {name: jax.random.fold_in(rng, i) for i, name in enumerate(RNGS)}


@dataclasses.dataclass(frozen=True)
class Update:
  """The two programs of an update. Only the first depends on the shape of the batch: the second is compiled once.

  With several runs side by side, all arrays have a leading axis of seeds, and `apply_gradients` has a further argument
  `live` [seeds], see TrainStep.

  Attributes:
    compute_gradients: (root, step, params, running, batch) -> (sums of the loss, gradients of the summed loss), where
      root is the data of a PRNG key.
    apply_gradients: (state, sums, gradients) -> (state, metrics), which donates the state.
  """

  compute_gradients: Callable
  apply_gradients: Callable

  def __call__(self, root: jax.Array, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """Makes one update of one run."""
    sums, gradients = self.compute_gradients(root, state.step, state.params, state.running, batch)
    return self.apply_gradients(state, sums, gradients)


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """One update: `train_step(state, batch) -> (state, metrics)`. The state that is passed in is donated.

  The metrics are [] float32 arrays on the device: 'loss' and the other sums of the loss, such as 'accuracy', per token;
  'tokens'; 'grad_norm' before clipping; and 'learning_rate'.

  With several runs side by side, all arrays have a leading axis of seeds. `train_step(state, batch, live)` then leaves
  the runs unchanged for which `live` [seeds] is False, and their metrics are 0.

  Attributes:
    update: the result of `make_update`.
    root: data of the root PRNG keys.
    mesh: the mesh of the devices.
    accumulate: number of parts in which gradients are accumulated.
    rule: row of partition.RULES that shards the batch: 'batch' or, for several runs, 'batches'.
  """

  update: Update
  root: jax.Array
  mesh: Mesh
  accumulate: int = 1
  rule: str = 'batch'

  def __call__(
    self, state: TrainState, batch: Any, live: np.ndarray | None = None
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    batch = shard_batch(batch, self.mesh, self.accumulate, self.rule)
    if self.rule == 'batch':
      return self.update(self.root, state, batch)
    sums, gradients = self.update.compute_gradients(self.root, state.step, state.params, state.running, batch)
    live = np.ones(len(self.root), bool) if live is None else live
    # Not device_put, which would compare the values of all processes in every update.
    live = jax.make_array_from_callback(live.shape, self.root.sharding, lambda index: live[index])
    return self.update.apply_gradients(state, sums, gradients, live)

  def compile_for(self, state: TrainState, batch: Any) -> jax.stages.Compiled:
    """Compiles the gradients for the shapes of a batch; a call with such shapes then uses this program.

    Args:
      state: shapes, dtypes and shardings of the state, see StateInitializer.shapes.
      batch: a batch.
    """
    batch = shard_batch(batch, self.mesh, self.accumulate, self.rule)
    return self.update.compute_gradients.lower(self.root, state.step, state.params, state.running, batch).compile()

  def with_seed(self, seed: int) -> 'TrainStep':
    """Returns the training step of one run with another seed, which shares the compiled programs."""
    return dataclasses.replace(self, root=jax.device_put(_root_key_data(seed), self.root.sharding))

  def compilations(self) -> int:
    """Returns the number of batch shapes of the updates made so far; `compile_for` alone adds none."""
    return self.update.compute_gradients._cache_size()


def make_train_step(
  loss: Loss,
  optimizer: optax.GradientTransformation,
  schedule: Callable,
  mesh: Mesh,
  *,
  seed: int | Sequence[int],
  accumulate: int = 1,
  average_decay: float = 0.0,
  anneal: Schedules = NO_SCHEDULES,
  skip_nonfinite: bool = False,
) -> TrainStep:
  """Builds the training step.

  Args:
    loss: the loss to minimise.
    optimizer: the optimiser.
    schedule: the learning-rate schedule of the optimiser, for the metric learning_rate only.
    mesh: the mesh of the devices.
    seed: seed of the random numbers of all updates, such as those of dropout. A sequence means several runs side by
      side: state, batch and metrics then have a leading axis of seeds. That of state and batch is sharded over the mesh
      axis 'seed' (partition.make_mesh).
    accumulate: see `make_update`.
    average_decay: see `make_update`.
    anneal: see `make_update`.
    skip_nonfinite: see `make_update`.

  Returns:
    The training step.
  """
  stacked = np.ndim(seed) > 0
  root = np.stack([_root_key_data(run_seed) for run_seed in seed]) if stacked else _root_key_data(seed)
  update = make_update(
    loss,
    optimizer,
    schedule,
    mesh,
    stacked=stacked,
    accumulate=accumulate,
    average_decay=average_decay,
    anneal=anneal,
    skip_nonfinite=skip_nonfinite,
  )
  root = jax.device_put(root, sharding(mesh, 'states' if stacked else 'state'))
  return TrainStep(update, root, mesh, accumulate, 'batches' if stacked else 'batch')


def _root_key_data(seed: int) -> np.ndarray:
  """Returns the data of a root key as NumPy values, which several processes can place on one mesh."""
  return np.asarray(jax.random.key_data(jax.random.key(seed)))


def make_update(
  loss: Loss,
  optimizer: optax.GradientTransformation,
  schedule: Callable,
  mesh: Mesh,
  *,
  stacked: bool = False,
  accumulate: int = 1,
  average_decay: float = 0.0,
  anneal: Schedules = NO_SCHEDULES,
  skip_nonfinite: bool = False,
) -> Update:
  """Builds the jitted update.

  Args:
    loss: the loss to minimise.
    optimizer: the optimiser.
    schedule: the learning-rate schedule of the optimiser, for the metric learning_rate only.
    mesh: the mesh of the devices.
    stacked: whether there are several runs side by side, along a leading axis of all arguments, see Update.
    accumulate: number of parts in which a batch is processed, one after the other, for less memory. The update is that
      of the whole batch: tokens, not parts, have equal weight, and `step` counts updates.
    average_decay: decay of the moving average of the parameters; 0 keeps none. See state.update_average.
    anneal: schedules of annealed parameters, which get no gradient. After update n they have the values for n + 1.
    skip_nonfinite: whether an update whose loss or gradient is not finite leaves the state unchanged, except for what
      depends on the number of the update: `step`, the learning rate and annealed parameters. Its metrics are those of
      the update that was not made.

  Returns:
    The programs, each compiled once per shape of its arguments.
  """

  def sums_and_gradients(params, running, update_number, batch, rng):
    def objective(params):
      sums = loss(params, batch, step_rngs(rng), running, update_number)
      return sums['loss'], sums

    gathered = constrain(params, state_shardings(params, mesh, gathered=True))
    (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(gathered)
    return sums, grads

  def compute_gradients(root, step, params, running, batch):
    # The root is an argument, so that one compiled program serves every seed.
    rng = jax.random.fold_in(jax.random.wrap_key_data(root), step)
    differentiate = sums_and_gradients
    if accumulate > 1:
      differentiate = _accumulate(sums_and_gradients, accumulate, sharding(mesh, 'parts'))
    return differentiate(params, running, step + 1, batch, rng)

  def apply_gradients(state, sums, grads):
    step = state.step + 1
    count = jnp.maximum(sums['tokens'], 1)
    grads = zero_scheduled(jax.tree.map(lambda g: g / count.astype(g.dtype), grads), anneal)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    averages = update_average(state.average, params, step, average_decay)
    metrics = {name: total / count for name, total in sums.items()} | {
      'tokens': sums['tokens'],
      'grad_norm': optax.tree.norm(grads),
      'learning_rate': jnp.asarray(schedule(step), jnp.float32),
    }
    new_state = TrainState(step, params, opt_state, averages, update_running(state.running, metrics, step))
    if skip_nonfinite:
      is_finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(metrics['grad_norm'])

      def select(new, old):
        return new if _counts_updates(new) else jnp.where(is_finite, new, old)

      new_state = jax.tree.map(select, new_state, state, is_leaf=_counts_updates)._replace(step=step)
    params, averages = (apply_schedules(tree, anneal, step + 1) for tree in (new_state.params, new_state.average))
    return new_state._replace(params=params, average=averages), metrics

  scalars = sharding(mesh, 'states' if stacked else 'state')
  batch_layout = sharding(mesh, 'batches' if stacked else 'batch')
  metrics_layout = sharding(mesh, 'state')
  if stacked:
    compute_gradients = jax.vmap(compute_gradients, spmd_axis_name='seed')
    apply_gradients = _only_live_runs(jax.vmap(apply_gradients, spmd_axis_name='seed'))

  def compute_placed_gradients(*args):
    sums, grads = compute_gradients(*args)
    return sums, constrain(grads, state_shardings(grads, mesh, stacked=stacked))

  def apply_placed_gradients(*args):
    state, metrics = apply_gradients(*args)
    return constrain(state, state_shardings(state, mesh, stacked=stacked)), metrics

  # None keeps the sharding of an argument, or of a result that `constrain` has placed. Metrics are replicated.
  layouts = (scalars, scalars, None, scalars, batch_layout)
  gradient_layouts = {'in_shardings': layouts, 'out_shardings': (scalars, None)}
  return Update(
    jit_on_mesh(mesh, compute_placed_gradients, **gradient_layouts),
    jit_on_mesh(mesh, apply_placed_gradients, donate_argnums=0, out_shardings=(None, metrics_layout)),
  )


def _counts_updates(state: Any) -> bool:
  """Returns whether a part of the optimiser's state is the number of the update, which selects the learning rate."""
  return isinstance(state, optax.ScaleByScheduleState)


def _only_live_runs(apply_gradients: Callable) -> Callable:
  """Adds the argument `live` [seeds]: a run that is not live keeps its state, and its metrics are 0."""

  def apply_to_live(states, sums, grads, live):
    new_states, metrics = apply_gradients(states, sums, grads)

    def select(new, old):
      return jnp.where(live.reshape(live.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(select, new_states, states), jax.tree.map(lambda x: select(x, jnp.zeros_like(x)), metrics)

  return apply_to_live


def _accumulate(sums_and_gradients: Callable, parts: int, layout: jax.sharding.NamedSharding) -> Callable:
  """Returns a function that processes `parts` slices of the batch one by one.

  The sums and gradients are those of the whole batch up to rounding and random numbers: each slice has its own rng.
  """

  def split(x):
    # Part i takes rows i, i + parts, ...: each device slices its own rows, and no row moves.
    x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, layout)

  def accumulated(params, running, update_number, batch, rng):
    slices = jax.tree.map(split, batch)

    def differentiate_part(i):
      part = jax.tree.map(lambda x: x[i], slices)
      return sums_and_gradients(params, running, update_number, part, jax.random.fold_in(rng, i))

    def add_part(total, i):
      return jax.tree.map(jnp.add, total, differentiate_part(i)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate_part, 0))
    total, _ = jax.lax.scan(add_part, zeros, jnp.arange(parts))
    return total

  return accumulated
