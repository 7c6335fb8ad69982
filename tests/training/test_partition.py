"""Batches are sharded by rows over all devices, and states are replicated."""

import jax
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.training.partition import AXES, RULES, check_rows, make_mesh, replicate, shard_batch
from tests.training.helpers import make_batch


def test_mesh_spans_all_devices():
  assert make_mesh().shape == {'seed': 1, 'data': jax.device_count()}
  assert make_mesh(jax.devices()[:3]).shape == {'seed': 1, 'data': 3}
  for seeds, seed_devices in ((2, 2), (6, 2), (16, 8), (3, 1)):
    assert make_mesh(jax.devices()[:8], seeds).shape == {'seed': seed_devices, 'data': 8 // seed_devices}


def test_mesh_has_the_devices_in_order_and_automatic_axes():
  devices = jax.devices()[:6][::-1]
  mesh = make_mesh(devices, seeds=2)
  assert list(mesh.devices.flat) == devices
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_rules_name_axes_of_the_mesh():
  assert {axis for spec in RULES.values() for axis in spec if axis} <= set(AXES)


def test_a_batch_is_sharded_by_rows_and_keeps_its_values():
  batch = make_batch(0, rows=16)
  mesh = make_mesh(jax.devices()[:8])
  placed = shard_batch(batch, mesh)
  jax.tree.map(np.testing.assert_array_equal, batch, placed)
  assert {shard.data.shape[0] for x in placed for shard in x.addressable_shards} == {2}
  assert placed.target_mask.dtype == bool and placed.source.dtype == np.int32


def test_links_are_sharded_by_rows_and_optional():
  mesh = make_mesh(jax.devices()[:8])
  links = np.random.default_rng(0).random((16, 5, 4)) < 0.5
  batch = Batch(*make_batch(0, rows=16))
  placed = shard_batch(batch._replace(links=links), mesh)
  np.testing.assert_array_equal(placed.links, links)
  assert {shard.data.shape for shard in placed.links.addressable_shards} == {(2, 5, 4)}
  assert shard_batch(batch, mesh).links is None


def test_replicate_copies_to_every_device():
  replicated = replicate({'w': np.arange(5.0, dtype=np.float32)}, make_mesh())
  assert len(replicated['w'].addressable_shards) == jax.device_count()
  assert replicated['w'].is_fully_replicated


def test_rows_must_divide_evenly():
  mesh = make_mesh(jax.devices()[:8])
  check_rows(32, mesh, parts=4)
  for rows, parts in ((4, 1), (12, 1), (16, 4)):
    with pytest.raises(UserError, match=f'{rows} rows.*expected a multiple of {8 * parts}'):
      check_rows(rows, mesh, parts)
