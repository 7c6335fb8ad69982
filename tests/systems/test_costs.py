"""Parameters and FLOP of a config, against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from attention_jax.systems.config import parse_config
from attention_jax.systems.costs import COUNTED_BATCHES, count_matmuls, matmul_flop, update_flop
from attention_jax.systems.recall.system import RecallSystem
from attention_jax.systems.translation.system import TranslationSystem
from attention_jax.training.partition import MeshConfig, make_mesh


def test_products_count_as_often_as_they_run_and_unused_products_not_at_all():
  w = jnp.ones((3, 5))
  x = jnp.ones((7, 4, 3))

  def fn(w, x):
    unused = x @ w @ jnp.ones((5, 9))
    del unused
    return jax.lax.scan(lambda total, row: (total + (row @ w).sum(), None), 0.0, x)[0]

  counts = count_matmuls(fn, w, x)
  (((left, right, _, _), count),) = counts.items()
  assert (left, right, count) == ((4, 3), (3, 5), 7)
  assert matmul_flop(counts) == 7 * 2 * 4 * 3 * 5


def test_batched_products_count_once_per_element_of_the_batch():
  counts = count_matmuls(lambda a, b: jnp.einsum('bij,bjk->bik', a, b), jnp.ones((2, 3, 5)), jnp.ones((2, 5, 7)))
  assert matmul_flop(counts) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize(
  ('manual', 'copies'), [({'data'}, 1), ({'data', 'tensor'}, 2)], ids=['data', 'data and tensor']
)
def test_products_of_a_shard_map_count_once_per_device(manual, copies):
  """Devices along 'tensor' compute the same."""
  rows, whole = PartitionSpec('data'), PartitionSpec()
  mesh = make_mesh(jax.devices()[:8], sizes=MeshConfig(tensor=2))
  fn = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows, axis_names=manual)
  assert matmul_flop(count_matmuls(fn, jnp.ones((8, 3)), jnp.ones((3, 5)))) == copies * 2 * 8 * 3 * 5


def test_flop_of_an_update_are_the_mean_over_the_shapes_of_data_without_epochs():
  data = {'task': 'copy(bits=2, longest=4, beyond=5)', 'batch_size': 8}
  system = RecallSystem(parse_config({'system': 'recall', 'data': data, 'model': {'cell': 'recurrent(features=3)'}}))
  steps = [system.batches(0).shape(step)[1] for step in range(COUNTED_BATCHES)]
  assert len(set(steps)) == 2
  # Products are computed, recomputed, and have gradients of parameters and inputs. The output layer is not recomputed,
  # and the inputs of the model have no gradient.
  # Vectors have 2 bits and the channel of the mark; the LSTM has 3 features and 4 gates.
  inputs, recurrence, bits = (2 * 8 * products for products in (3 * 12, 3 * 12, 3 * 2))
  assert update_flop(system) == pytest.approx(np.mean(steps) * (3 * inputs + 4 * recurrence + 3 * bits))


@pytest.mark.long
def test_flop_of_flash_are_those_of_the_definition(config):
  def flop(implementation):
    encoder = f'transformer(features=8, layers=1, heads=2, hidden=8, implementation="{implementation}")'
    changed = parse_config(config | {'model': config['model'] | {'encoder': encoder}})
    return update_flop(TranslationSystem.load(changed, None))

  assert flop('flash') == flop('xla')
