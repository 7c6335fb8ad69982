"""Updates of a config that are compiled ahead of time, without data."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.kernels.target import compile_for
from attention_jax.systems.config import default_config, default_run_config, parse_config
from attention_jax.systems.registry import SYSTEMS
from attention_jax.training.partition import MeshConfig, make_mesh, state_shardings
from attention_jax.training.seeds import prepare_training
from experiments.config_files import load_config
from lab import ahead_of_time
from lab.ahead_of_time import DoesNotFitError, compile_updates
from tests.experiments.train_every_system import CONFIGS

ENTRIES = 9


def make_config(fields=(), **data):
  """Returns a config; `fields` have dotted names, `data` are of the group `data`."""
  config = default_config()
  config.model.encoder = 'embedded'
  config.model.decoder = 'luong(rnn="simple", features=4, input_feeding=False)'
  config.model.embedding = config.model.attention.features = 4
  config.training.auxiliary = 'guided'
  config.data.update({'buckets': ((6, 4),), 'batch_size': 64, 'batch_unit': 'tokens', **data})
  config.update_from_flattened_dict(dict(fields))
  return parse_config(config)


@pytest.mark.long
def test_every_bucket_is_compiled_for_all_devices():
  config = make_config(buckets=((6, 4), (8, 8)), batch_size=12, batch_unit='sentences')
  updates = list(compile_updates(config, make_mesh(), 'cpu', vocabulary_size=ENTRIES))
  # 12 rows and 4 filler rows: a multiple of 8 devices.
  assert [update.shape for update in updates] == [(16, 6, 4), (16, 8, 8)]
  assert updates[0].parameters == updates[1].parameters > 100
  assert all(update.compiled.memory_analysis().argument_size_in_bytes > 0 for update in updates)
  batch_shardings = updates[0].compiled.input_shardings[0][2]
  assert len(batch_shardings.source.device_set) == len(jax.devices())


@pytest.mark.long
def test_flop_of_kernels_are_those_of_the_definition(monkeypatch):
  monkeypatch.setattr(ahead_of_time, '_compile', lambda traced, platform, shape: traced)
  flop = set()
  for implementation in ('xla', 'flash'):
    config = make_config({'model.attention.score': 'scaled_dot', 'model.attention.implementation': implementation})
    (update,) = compile_updates(config, make_mesh(jax.devices()[:1]), 'cpu', vocabulary_size=ENTRIES)
    flop.add(update.flop)
  assert len(flop) == 1


@pytest.mark.long
@pytest.mark.parametrize(('implementation', 'score'), [('flash', 'scaled_dot'), ('pallas_additive', 'additive')])
def test_kernels_run_on_the_device_of_their_rows(implementation, score):
  """An update on two devices equals that on one, and gathers no rows."""
  fields = {'model.attention.implementation': implementation, 'model.attention.score': score}
  config = make_config(fields | {'model.attention.heads': 1 + (score == 'scaled_dot'), 'training.auxiliary': ''})
  random = np.random.default_rng(0)

  def ids(size):
    return random.integers(3, ENTRIES, (8, size), dtype=np.int32)

  def mask(size):
    return np.arange(size) < random.integers(1, size + 1, (8, 1))

  batch = Batch(ids(6), mask(6), ids(4), mask(4), np.arange(8, dtype=np.int32), None)
  results = []
  with compile_for('interpret'):
    for devices in (jax.devices()[:1], jax.devices()[:2]):
      ((_, compiled, *_),) = compile_updates(config, make_mesh(devices), 'cpu', vocabulary_size=ENTRIES)
      root, state, _ = jax.tree.map(random_array, compiled.args_info[0])
      results.append(jax.device_get(compiled(root, state, batch)))
  assert 'all-gather' not in compiled.as_text()
  jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5), *results)


def random_array(info):
  """A small random array of the shape and dtype of `info`; equal for arrays of equal size."""
  random = np.random.default_rng(math.prod(info.shape))
  return jnp.asarray(random.normal(size=info.shape) * 0.1).astype(info.dtype)


@pytest.mark.long
def test_memory_of_a_device_falls_with_the_size_of_the_mesh():
  specs = {'model.encoder': 'birnn(features=64)', 'model.decoder': 'bahdanau(features=64, readout=64)'}
  config = make_config(specs | {'model.embedding': 64, 'model.attention.features': 64})

  def state_bytes(**sizes):
    mesh = make_mesh(jax.devices()[:8], sizes=MeshConfig(**sizes))
    (update,) = compile_updates(config, mesh, 'cpu', vocabulary_size=512)
    return update.compiled.memory_analysis().argument_size_in_bytes

  whole = state_bytes()
  assert state_bytes(fsdp=8) < 0.15 * whole
  assert state_bytes(fsdp=2, tensor=4) < 0.15 * whole


def test_what_cannot_be_compiled_is_an_error():
  mesh = make_mesh(jax.devices()[:8], sizes=MeshConfig(tensor=8))
  with pytest.raises(DoesNotFitError, match=r'^config\.mesh\.tensor=8 shards no axis of the largest parameter'):
    next(compile_updates(make_config(), mesh, 'cpu', vocabulary_size=ENTRIES))
  with pytest.raises(UserError, match=r"config\.system must be 'translation' to compile without data"):
    next(compile_updates(default_run_config('classification'), mesh, 'cpu', vocabulary_size=ENTRIES))


SMALL = {
  'shapes:xu2015_soft': {'data.batch_size': 4, 'model.encoder': 'grid(features=4, layers=1)'},
  'entailment:parikh2016': {'data.batch_size': 4, 'model.embedding': 4},
  'digits:mnih2014': {'data.batch_size': 4} | CONFIGS['glimpsing'][1],
  'recall:graves2014': {'data.batch_size': 4},
  'dates:luong2015_birnn_dot': {'data.batch_size': 4, 'model.embedding': 4},
}


@pytest.mark.long
@pytest.mark.parametrize('seeds', [1, 2])
@pytest.mark.parametrize('name', SMALL)
def test_the_update_is_that_of_training(name, seeds):
  """An update of every system, compiled for a mesh without running anything, equals that of training on this mesh."""
  task, preset = name.split(':')
  config = load_config(f'configs/{task}.py:{preset}')
  config.update_from_flattened_dict(SMALL[name] | {'seeds': seeds, 'training.steps': 200, 'mesh.fsdp': 2})
  config = parse_config(config)
  mesh = make_mesh(seeds=seeds, sizes=MeshConfig(fsdp=2))
  (update,) = compile_updates(config, mesh, 'cpu', largest=True)
  system = SYSTEMS[config.system].load(config, None)
  runs = [system.batches(seed) for seed in range(seeds)]
  step = next(step for step in itertools.count() if runs[0].shape(step) == update.shape)
  batches = [run[step] for run in runs]
  seed = list(range(seeds)) if seeds > 1 else 0
  train_step, initial_state = prepare_training(config.training, system.loss, system.initializer(), mesh, seed)
  states = [initial_state(seed) for seed in range(seeds)]
  batch, state = batches[0], states[0]
  if seeds > 1:
    batch, state = (jax.tree.map(lambda *leaves: np.stack(leaves), *trees) for trees in (batches, states))
  live = (np.full(seeds, True),) if seeds > 1 else ()

  def placed():
    layouts = state_shardings(state, mesh, stacked=seeds > 1)
    return jax.tree.map(lambda x, layout: jax.device_put(np.asarray(x), layout), state, layouts)

  actual = jax.device_get(update.compiled(train_step.root, placed(), batch, *live))
  expected = jax.device_get(train_step(placed(), batch, *live))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), actual, expected)
