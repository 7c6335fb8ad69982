"""Compiles updates ahead of time for a device topology that is not attached."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attention_jax.data.batching import BATCH_UNITS, Batch, Share, packed_bucket
from attention_jax.data.encoding import check_buckets
from attention_jax.data.pipeline import first_step_of_each_shape
from attention_jax.errors import UserError
from attention_jax.kernels.target import compile_for, trace_for_counting
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import RunConfig
from attention_jax.systems.costs import count_in_jaxpr, matmul_flop
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.translation.system import initial_params
from attention_jax.training.anneal import make_anneal
from attention_jax.training.config import Training
from attention_jax.training.frozen import freeze_loss
from attention_jax.training.loss import Loss
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import describe_placement, row_devices, sharding, state_shardings
from attention_jax.training.state import TrainState, count_parameters, init_state
from attention_jax.training.step import make_update


class DoesNotFitError(UserError):
  """Error for an update that does not fit into a device, or a mesh that cannot shard the largest parameter."""


class CompiledUpdate(NamedTuple):
  """The compiled update of one batch shape.

  Attributes:
    shape: (rows, ...) of the global batch of one run, over all devices, as in `BatchSequence.shapes`.
    compiled: the compiled update.
    parameters: number of parameters of the model.
    state: shapes and shardings of the training state; with several seeds, of all runs together.
    flop: FLOP of the matrix products of all runs, on all devices together, counted as in `costs.update_flop`, but
      with those of the optimiser.
  """

  shape: tuple[int, ...]
  compiled: Any
  parameters: int
  state: TrainState
  flop: float


class Inputs(NamedTuple):
  """The loss, and the shapes of parameters and batches, for which updates are compiled.

  Attributes:
    loss: the loss.
    params: shapes of the parameters of one run.
    batches: shape (rows, ...) -> shapes of the arrays of the global batch of one run.
  """

  loss: Loss
  params: Any
  batches: Mapping[tuple[int, ...], Any]


def compile_updates(
  config: RunConfig, mesh: Mesh, platform: str, *, vocabulary_size: int | None = None, largest: bool = False
) -> Iterator[CompiledUpdate]:
  """Compiles the update of each batch shape of a config, for all its seeds together.

  With data, the shapes are those that occur in training; without data, there is one for each bucket.

  Args:
    config: the config of a run.
    mesh: the devices, attached or described by a topology.
    platform: the platform to lower for, such as 'tpu'.
    vocabulary_size: size of both vocabularies of a translation config, whose data are then not read; None to read the
      data of the config.
    largest: whether to compile only the shape with the longest sequences.

  Yields:
    One CompiledUpdate per batch shape.

  Raises:
    UserError: for mistakes in the config or its data.
    DoesNotFitError: if an update does not fit into the memory of a device, and for a mesh that training rejects,
      because it cannot shard the largest parameter.
  """
  training = config.training
  share = Share(multiple=row_devices(mesh) * training.accumulate)
  if vocabulary_size is None:
    inputs = _inputs_from_data(config, share)
  else:
    inputs = _inputs_of_translation(config, vocabulary_size, share)
  _check_placement(inputs.params, mesh)
  seeds = config.seeds
  update, state = _build_update(training, inputs, mesh, stacked=seeds > 1)
  root = _stack(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))), seeds)
  state = _place(state, mesh, seeds)
  live = [jax.ShapeDtypeStruct((seeds,), jnp.bool_)] if seeds > 1 else []
  num_parameters = count_parameters(inputs.params)
  shapes = list(inputs.batches)
  if largest:
    shapes = [max(shapes, key=lambda shape: (math.prod(shape[1:]), shape[0]))]
  for shape in shapes:
    with _target(platform):
      arguments = (root, state, _stack(inputs.batches[shape], seeds), *live)
      traced = update.trace(*arguments)
      with trace_for_counting():
        flop = matmul_flop(count_in_jaxpr(update.trace(*arguments).jaxpr.jaxpr))
    yield CompiledUpdate(shape, _compile(traced, platform, shape), num_parameters, state, flop)


def _check_placement(params: Any, mesh: Mesh) -> None:
  try:
    describe_placement(params, mesh)
  except UserError as error:
    raise DoesNotFitError(str(error)) from error


def _build_update(training: Training, inputs: Inputs, mesh: Mesh, *, stacked: bool) -> tuple[Any, TrainState]:
  """Returns the jitted update, and the shapes of the state of one run.

  Args:
    training: options of training.
    inputs: the loss and the parameters.
    mesh: the devices.
    stacked: whether there are several runs side by side; the update then has a further argument `live` [seeds], see
      step.TrainStep.
  """
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip, training.frozen)
  update = make_update(
    freeze_loss(inputs.loss, training.frozen),
    optimizer,
    schedule,
    mesh,
    stacked=stacked,
    accumulate=training.accumulate,
    average_decay=training.average,
    anneal=make_anneal(training.anneal, inputs.params, training.steps),
    skip_nonfinite=training.on_nonfinite == 'skip',
  )

  # One program, so that the analyses of the compiler cover the whole update.
  def whole_update(root, state, batch, *live):
    sums, gradients = update.compute_gradients(root, state.step, state.params, state.running, batch)
    return update.apply_gradients(state, sums, gradients, *live)

  root_layout = sharding(mesh, 'states' if stacked else 'state')
  # None: the ShapeDtypeStructs of the state already contain their shardings.
  layouts = (root_layout, None, sharding(mesh, 'batches' if stacked else 'batch'), *([root_layout] if stacked else []))
  state = jax.eval_shape(
    lambda params: init_state(params, optimizer, training.average, inputs.loss.running), inputs.params
  )
  return jax.jit(whole_update, donate_argnums=1, in_shardings=layouts), state


def _place(state: TrainState, mesh: Mesh, seeds: int) -> TrainState:
  """Returns the shapes and shardings of the states of all runs."""
  stacked = _stack(state, seeds)
  return jax.tree.map(
    lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
    stacked,
    state_shardings(stacked, mesh, stacked=seeds > 1),
  )


def _inputs_from_data(config: RunConfig, share: Share) -> Inputs:
  """Loads the data of a config, and returns the inputs of its updates."""
  system = SYSTEMS[config.system].load(config, None)
  seed = config.training.seed
  initializer = system.initializer()
  batches = system.batches(seed, share)
  by_shape = {}
  for step in first_step_of_each_shape(batches, 0, config.training.steps):
    by_shape[batches.shape(step)] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[step])
  return Inputs(system.loss, jax.eval_shape(lambda: initializer(seed)), by_shape)


def _inputs_of_translation(config: RunConfig, vocabulary_size: int, share: Share) -> Inputs:
  """Returns the inputs of a translation config with vocabularies of `vocabulary_size`, without data."""
  if config.system != 'translation':
    raise UserError(f"config.system must be 'translation' to compile without data, got {config.system!r}")
  model = build(config.model, vocabulary_size, vocabulary_size)
  training = config.training
  loss = sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)
  data = config.data
  batches = {}
  buckets = check_buckets(data.buckets)
  for source, target in [packed_bucket(buckets)] if data.packed else buckets:
    rows = share.pad(BATCH_UNITS[data.batch_unit](data.batch_size, (source, target)))
    batches[rows, source, target] = _batch_shapes(rows, source, target, loss.needs_links, data.packed)
  return Inputs(loss, jax.eval_shape(lambda: initial_params(model, 0)), batches)


def _stack(tree: Any, seeds: int) -> Any:
  """Adds a leading axis of seeds to shapes, if there are several."""
  if seeds == 1:
    return tree
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct((seeds, *x.shape), x.dtype), tree)


def _compile(traced: Any, platform: str, shape: tuple[int, ...]) -> Any:
  """Compiles a traced update; raises DoesNotFitError if it does not fit into the memory of a device."""
  with _target(platform):
    lowered = traced.lower(lowering_platforms=(platform,))
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    reason = ' '.join(str(error).split())[:160]
    raise DoesNotFitError(
      f'an update of {format_shape(shape)} does not fit into the memory of a device: {reason}'
    ) from error


def format_shape(shape: tuple[int, ...]) -> str:
  """Returns a batch shape as text, such as '8 x (6, 4)'."""
  rows, *lengths = shape
  return f'{rows} x ({", ".join(map(str, lengths))})'


def _target(platform: str) -> contextlib.AbstractContextManager:
  """Selects kernels for a platform other than that of this machine."""
  return contextlib.nullcontext() if platform == jax.default_backend() else compile_for(platform)


def _batch_shapes(rows: int, source: int, target: int, needs_links: bool, packed: bool) -> Batch:
  shape = jax.ShapeDtypeStruct
  segments = (shape((rows, source), jnp.int32), shape((rows, target), jnp.int32))
  return Batch(
    source=shape((rows, source), jnp.int32),
    source_mask=shape((rows, source), jnp.bool_),
    target=shape((rows, target), jnp.int32),
    target_mask=shape((rows, target), jnp.bool_),
    index=shape((rows,), jnp.int32),
    links=shape((rows, target, source), jnp.bool_) if needs_links else None,
    segments=segments if packed else None,
  )
