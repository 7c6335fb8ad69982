"""The updates of a config, compiled for devices that need not be here."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attention_jax.data.batching import BATCH_UNITS, Batch
from attention_jax.data.encoding import check_buckets
from attention_jax.errors import UserError
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import fill_defaults
from attention_jax.systems.translation import initial_params
from attention_jax.training.anneal import make_anneal
from attention_jax.training.loop import Training
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import check_rows
from attention_jax.training.state import init_state
from attention_jax.training.step import compile_update


class CompiledUpdate(NamedTuple):
  """One batch shape: (rows, source, target) of all devices, the compiled update, and how many parameters it has."""

  shape: tuple[int, int, int]
  compiled: Any
  parameters: int


def compile_updates(config: Mapping[str, Any], entries: int, mesh: Mesh, platform: str) -> Iterator[CompiledUpdate]:
  """The update of each bucket of a config, compiled for a platform and the devices of a mesh, which may be described.

  Args: entries, of both vocabularies, as the data are not looked at.
  Raises: UserError for what is wrong with the config, and rows that do not divide over the devices.
  """
  config = fill_defaults(config, 'the config')
  for field, possible in (('system', 'translation'), ('seeds', 1)):
    if config[field] != possible:
      raise UserError(f'config.{field} is {config[field]!r}; possible ahead of time: {possible!r}')
  training, data = Training(**config['training']), config['data']
  model = build(config['model'], entries, entries)
  loss = sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)
  schedule = make_schedule(training.schedule, training.steps)
  optimizer = make_optimizer(training.optimizer, schedule, training.clip)
  params = jax.eval_shape(lambda: initial_params(model, 0))
  anneal = make_anneal(training.anneal, params, training.steps)
  update = compile_update(
    loss, optimizer, schedule, mesh, accumulate=training.accumulate, average=training.average, anneal=anneal
  )
  state = jax.eval_shape(lambda: init_state(initial_params(model, 0), optimizer, training.average, loss.running))
  root = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
  for source, target in check_buckets(data['buckets']):
    rows = BATCH_UNITS[data['batch_unit']](data['batch_size'], (source, target))
    check_rows(rows, mesh, training.accumulate)
    side = lambda size, rows=rows: (_shape((rows, size), jnp.int32), _shape((rows, size), jnp.bool_))
    links = _shape((rows, target, source), jnp.bool_) if loss.needs_links else None
    batch = Batch(*side(source), *side(target), _shape((rows,), jnp.int32), links)
    compiled = update.trace(root, state, batch).lower(lowering_platforms=(platform,)).compile()
    yield CompiledUpdate((rows, source, target), compiled, sum(x.size for x in jax.tree.leaves(params)))


_shape = jax.ShapeDtypeStruct
