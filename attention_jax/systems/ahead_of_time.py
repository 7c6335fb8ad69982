"""Compiles updates ahead of time for a device topology that is not attached."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attention_jax.data.batching import BATCH_UNITS, Batch, Share
from attention_jax.data.encoding import check_buckets
from attention_jax.errors import UserError
from attention_jax.kernels.target import compile_for
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import fill_defaults
from attention_jax.systems.costs import count_in_jaxpr, matmul_flop
from attention_jax.systems.translation import initial_params
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import row_devices, sharding, state_shardings
from attention_jax.training.state import TrainState, init_state
from attention_jax.training.step import compile_update


class CompiledUpdate(NamedTuple):
  """The compiled update of one batch shape.

  Attributes:
    shape: (rows, source, target) of the global batch, over all devices.
    compiled: the compiled update.
    parameters: number of parameters of the model.
    state: shapes and shardings of the training state.
    flop: FLOP of the matrix products, on all devices together.
  """

  shape: tuple[int, int, int]
  compiled: Any
  parameters: int
  state: TrainState
  flop: float


def compile_updates(config: Mapping[str, Any], entries: int, mesh: Mesh, platform: str) -> Iterator[CompiledUpdate]:
  """Compiles the update of each bucket of a translation config.

  Args:
    config: the config of one run.
    entries: size of the source and of the target vocabulary; the data are not read.
    mesh: the devices, attached or described by a topology.
    platform: the platform to lower for, such as 'tpu'.

  Yields:
    One CompiledUpdate per bucket.

  Raises:
    UserError: for mistakes in the config, and for an update that does not fit into the memory of a device.
  """
  config = fill_defaults(config, 'the config')
  for field, expected in (('system', 'translation'), ('seeds', 1)):
    if config[field] != expected:
      raise UserError(f'config.{field} must be {expected!r} for ahead-of-time compilation, got {config[field]!r}')
  training = Training(**config['training'])
  data = config['data']
  model = build(config['model'], entries, entries)
  loss = sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip)
  params = jax.eval_shape(lambda: initial_params(model, 0))
  num_parameters = sum(x.size for x in jax.tree.leaves(params))
  anneal = make_anneal(training.anneal, params, training.steps)
  update = compile_update(
    loss, optimizer, schedule, mesh, accumulate=training.accumulate, average=training.average, anneal=anneal
  )
  # One program, so that the analyses of the compiler cover the whole update.
  # None: the ShapeDtypeStructs of the state already contain their shardings.
  input_shardings = (sharding(mesh, 'state'), None, sharding(mesh, 'batch'))
  whole_update = jax.jit(update, donate_argnums=1, in_shardings=input_shardings)
  state = jax.eval_shape(lambda: init_state(initial_params(model, 0), optimizer, training.average, loss.running))
  state = jax.tree.map(
    lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), state, state_shardings(state, mesh)
  )
  root_key_data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
  share = Share(multiple=row_devices(mesh) * training.accumulate)
  for source, target in check_buckets(data['buckets']):
    rows = share.pad(BATCH_UNITS[data['batch_unit']](data['batch_size'], (source, target)))
    batch = _batch_shapes(rows, source, target, loss.needs_links)
    shape = (rows, source, target)
    with _target(platform):
      traced = whole_update.trace(root_key_data, state, batch)
    compiled = _compile(traced, platform, shape)
    yield CompiledUpdate(shape, compiled, num_parameters, state, matmul_flop(count_in_jaxpr(traced.jaxpr.jaxpr)))


def _compile(traced: Any, platform: str, shape: tuple[int, int, int]) -> Any:
  """Compiles a traced update; raises UserError if it does not fit into the memory of a device."""
  with _target(platform):
    lowered = traced.lower(lowering_platforms=(platform,))
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    rows, source, target = shape
    reason = ' '.join(str(error).split())[:160]
    raise UserError(
      f'an update of {rows} x ({source}, {target}) does not fit into the memory of a device: {reason}'
    ) from error


def _target(platform: str) -> contextlib.AbstractContextManager:
  """Selects kernels for a platform other than that of this machine."""
  return contextlib.nullcontext() if platform == jax.default_backend() else compile_for(platform)


def _batch_shapes(rows: int, source: int, target: int, links: bool) -> Batch:
  shape = jax.ShapeDtypeStruct
  return Batch(
    source=shape((rows, source), jnp.int32),
    source_mask=shape((rows, source), jnp.bool_),
    target=shape((rows, target), jnp.int32),
    target_mask=shape((rows, target), jnp.bool_),
    index=shape((rows,), jnp.int32),
    links=shape((rows, target, source), jnp.bool_) if links else None,
  )
