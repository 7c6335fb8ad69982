"""An update is the same on every device mesh, and a device holds only its shards of the state."""

import functools
import json

import jax
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import parse_config
from attention_jax.training.config import Training
from attention_jax.training.partition import MeshConfig, fetch, make_mesh, place_parameters, process_share, shard_rows
from attention_jax.training.seeds import make_updates
from experiments.config_files import load_config
from tests.experiments.helpers import start_together, wait_for_outputs
from tests.modules.helpers import variables

ENTRIES = 16
ROWS = 8
SIZES = {
  'bahdanau2015_deep_tanh': {'encoder': 'birnn(features=8)', 'decoder': 'bahdanau(features=8, readout=8)'},
  'gnmt2016': {'encoder': 'gnmt(features=8, layers=2)', 'decoder': 'gnmt(features=8, layers=2)'},
  'transformer2017_base': {
    'encoder': 'transformer(layers=1, features=8, hidden=16, heads=2)',
    'decoder': 'transformer(layers=1, features=8, hidden=16, heads=2)',
  },
}
MESHES = [
  (8, MeshConfig(data=2, fsdp=2, tensor=2)),
  pytest.param(2, MeshConfig(data=2), marks=pytest.mark.product),
  pytest.param(2, MeshConfig(fsdp=2), marks=pytest.mark.product),
  pytest.param(2, MeshConfig(tensor=2), marks=pytest.mark.long),
  pytest.param(8, MeshConfig(data=8), marks=pytest.mark.product),
  pytest.param(8, MeshConfig(fsdp=8), marks=pytest.mark.product),
]


# Cases on all devices of two and of four processes, of two devices each: preset, mesh and options of `train`.
SEVERAL_PROCESSES = {
  f'{preset} {sizes} {options}': (preset, sizes, options)
  for preset, sizes, options in (
    *((preset, MeshConfig(**sizes), {}) for sizes in ({}, {'data': 1, 'fsdp': -1}, {'tensor': 2}) for preset in SIZES),
    *((preset, MeshConfig(fsdp=2, tensor=2), {}) for preset in SIZES),
    ('gnmt2016', MeshConfig(fsdp=2, tensor=2), {'accumulate': 2}),
    ('bahdanau2015_deep_tanh', MeshConfig(fsdp=2), {'seed': [3, 4]}),
    ('transformer2017_base', MeshConfig(tensor=2), {'seed': [3, 4]}),
  )
}


def make_model(preset):
  config = load_config(f'configs/wmt14.py:{preset}')
  config.model.update(SIZES[preset] | {'embedding': 8, 'dropout': 0.1, 'dtype': 'float32'})
  config.model.attention.features = 8
  if config.model.attention.heads > 1:
    config.model.attention.heads = 2
  return build(parse_config(config).model, ENTRIES, ENTRIES)


def make_batch(step):
  random = np.random.default_rng(step)

  def ids(size):
    return random.integers(3, ENTRIES, (ROWS, size), dtype=np.int32)

  def mask(size):
    return np.arange(size) < random.integers(1, size + 1, (ROWS, 1))

  return Batch(ids(5), mask(5), ids(4), mask(4), np.arange(ROWS, dtype=np.int32), None)


def random_params(model, seed):
  batch = make_batch(0)
  return variables(model, batch.source, batch.source_mask, batch.target, seed=seed, scale=0.3)['params']


def train(model, mesh, accumulate=1, seed=0):
  """Returns the parameters and the metrics after two updates, and the state."""
  training = Training(steps=2, optimizer='adam', schedule='constant(rate=0.01)', accumulate=accumulate, average=0.9)
  seeds = [seed] if isinstance(seed, int) else seed
  update = make_updates(training, sequence_loss(model), lambda s: random_params(model, s), mesh, seeds)
  states = update.load([None] * len(seeds))
  index, shares = process_share(mesh)
  for i in range(2):
    batch = jax.tree.map(lambda x: np.split(x, shares)[index], make_batch(i))
    states, metrics = update(states, [batch] * len(seeds), [True] * len(seeds))
  assert update.compilations() == 1
  selected = [update.select(states, i) for i in range(len(seeds))]
  metrics = {name: np.squeeze(value) for name, value in jax.device_get(dict(metrics)).items()}
  return fetch([state.params for state in selected]), metrics, states if len(seeds) > 1 else selected[0]


def search_scores(model, mesh):
  """Returns the scores of a beam search with random parameters, which the mesh shards, [B, K]."""
  batch = make_batch(0)
  search = compile_search(model, BeamSearch(2), 4, DEFAULT_RANKING, mesh)
  params = place_parameters(random_params(model, 0), mesh)
  return fetch(search(params, *shard_rows((batch.source, batch.source_mask), mesh)).scores)


@pytest.fixture(scope='module')
def trained_on():
  """Returns a function that trains a preset on a mesh, once for each pair, and returns the result."""

  @functools.cache
  def get(preset, devices, sizes):
    return train(make_model(preset), make_mesh(jax.devices()[:devices], sizes=sizes))

  return get


def assert_close(result, expected):
  for name in ('loss', 'grad_norm', 'tokens'):
    np.testing.assert_allclose(result[1][name], expected[1][name], rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), result[0], expected[0])


QUICK_PRESET = 'transformer2017_base'  # its layers are sharded in the most ways
PRESETS = [name if name == QUICK_PRESET else pytest.param(name, marks=pytest.mark.long) for name in SIZES]


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize(('devices', 'sizes'), MESHES, ids=str)
def test_every_mesh_makes_the_same_updates(preset, devices, sizes, trained_on):
  assert_close(trained_on(preset, devices, sizes), trained_on(preset, 1, MeshConfig()))


@pytest.mark.long
@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize(('devices', 'sizes'), MESHES, ids=str)
def test_searches_on_every_mesh_have_the_same_scores(preset, devices, sizes):
  meshes = make_mesh(jax.devices()[:devices], sizes=sizes), make_mesh(jax.devices()[:1])
  scores, expected = (search_scores(make_model(preset), mesh) for mesh in meshes)
  np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('processes', [2, 4])
def test_several_processes_make_the_same_updates(processes, trained_on):
  outputs = wait_for_outputs(start_together('tests.systems.train_on_meshes', settings=[{}] * processes), runs=4)
  results = [[json.loads(line) for line in output.splitlines() if line.startswith('{')] for output in outputs]
  assert all(result == results[0] for result in results)
  assert [result['case'] for result in results[0]] == list(SEVERAL_PROCESSES)
  one_device = make_mesh(jax.devices()[:1])
  for result, (preset, _, options) in zip(results[0], SEVERAL_PROCESSES.values(), strict=True):
    expected = train(make_model(preset), one_device, **options) if options else trained_on(preset, 1, MeshConfig())
    params, metrics, _ = expected
    for name in ('loss', 'grad_norm', 'tokens'):
      np.testing.assert_allclose(result[name], metrics[name], rtol=1e-5, err_msg=result['case'])
    sums = [np.abs(x).sum(dtype=np.float64) for x in jax.tree.leaves(params)]
    np.testing.assert_allclose(result['params'], sums, rtol=1e-3, atol=1e-4, err_msg=result['case'])
    if not options:
      expected_scores = search_scores(make_model(preset), one_device)
      np.testing.assert_allclose(result['scores'], expected_scores, rtol=1e-5, err_msg=result['case'])


def test_every_device_holds_its_part_of_the_state(trained_on):
  _, _, state = trained_on(QUICK_PRESET, 8, MeshConfig(data=2, fsdp=2, tensor=2))
  whole = sum(x.nbytes for x in jax.tree.leaves(state))
  local = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
  assert local < 0.35 * whole  # a quarter, and biases and gains that are replicated
