"""Updates of a config that are compiled before there are data."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.kernels import pallas_additive
from attention_jax.systems.ahead_of_time import compile_updates
from attention_jax.systems.config import default_config
from attention_jax.training.partition import make_mesh


def config(**data):
  given = default_config()
  given.model.encoder, given.model.decoder = 'birnn(features=4)', 'bahdanau(features=4, readout=4)'
  given.model.embedding = given.model.attention.features = 4
  given.training.auxiliary = 'guided'
  given.data.update({'buckets': ((6, 4),), 'batch_size': 64, 'batch_unit': 'tokens', **data})
  return given.to_dict()


def test_every_bucket_is_compiled_for_all_devices():
  found = list(compile_updates(config(buckets=((6, 4), (8, 8))), 9, make_mesh(), 'cpu'))
  assert [one.shape for one in found] == [(8, 6, 4), (8, 8, 8)]
  assert found[0].parameters == found[1].parameters > 100
  assert all(one.compiled.memory_analysis().argument_size_in_bytes > 0 for one in found)
  assert len(jax.devices()) == len(found[0].compiled.input_shardings[0][2].source.device_set)


@pytest.mark.parametrize(
  ('implementation', 'model'),
  [
    ('flash', {'score': 'scaled_dot', 'heads': 2}),
    ('pallas_additive', {'score': 'additive'}),
  ],
)
def test_kernels_run_where_the_rows_are(implementation, model):
  """An update by eight devices is that by one, and none of them sees the rows of another."""
  given = config()
  given['model']['attention'] |= model | {'implementation': implementation}
  given['model']['decoder'], given['training']['auxiliary'] = 'luong(features=4, input_feeding=False)', ''
  random = np.random.default_rng(0)
  ids = lambda size: random.integers(3, 9, (8, size), dtype=np.int32)
  shown = lambda size: np.arange(size) < random.integers(1, size + 1, (8, 1))
  batch = Batch(ids(6), shown(6), ids(4), shown(4), np.arange(8, dtype=np.int32), None)
  found = []
  with pallas_additive.compile_for('interpret'):
    for devices in (jax.devices()[:1], jax.devices()):
      ((_, compiled, _),) = compile_updates(given, 9, make_mesh(devices), 'cpu')
      root, state, _ = jax.tree.map(draw, compiled.args_info[0])
      found.append(jax.device_get(compiled(root, state, batch)))
  assert 'all-gather' not in compiled.as_text()
  jax.tree.map(lambda one, eight: np.testing.assert_allclose(one, eight, rtol=1e-4, atol=1e-5), *found)


def draw(like):
  return jnp.asarray(np.random.default_rng(math.prod(like.shape)).normal(size=like.shape) * 0.1).astype(like.dtype)


def test_rows_must_divide():
  with pytest.raises(UserError, match='a batch of 12 rows does not divide over 8 devices'):
    next(compile_updates(config(batch_size=12, batch_unit='sentences'), 9, make_mesh(), 'cpu'))


@pytest.mark.parametrize('given', [default_config('classification').to_dict(), config() | {'seeds': 4}])
def test_what_is_not_compiled_ahead_says_so(given):
  with pytest.raises(UserError, match='possible ahead of time'):
    next(compile_updates(given, 9, make_mesh(), 'cpu'))
