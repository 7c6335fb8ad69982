"""Batches are split by rows over every device, states are copied to each."""

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
  for seeds, along in ((2, 2), (6, 2), (16, 8), (3, 1)):
    assert make_mesh(jax.devices()[:8], seeds).shape == {'seed': along, 'data': 8 // along}


def test_rules_name_axes_of_the_mesh():
  assert {axis for spec in RULES.values() for axis in spec if axis} <= set(AXES)


def test_place_splits_rows_and_keeps_values():
  batch, mesh = make_batch(0, rows=16), make_mesh(jax.devices()[:8])
  placed = shard_batch(batch, mesh)
  jax.tree.map(np.testing.assert_array_equal, batch, placed)
  assert {shard.data.shape[0] for x in placed for shard in x.addressable_shards} == {2}
  assert placed.target_mask.dtype == bool and placed.source.dtype == np.int32


def test_links_are_split_by_rows_too_and_may_be_missing():
  mesh, links = make_mesh(jax.devices()[:8]), np.random.default_rng(0).random((16, 5, 4)) < 0.5
  batch = Batch(*make_batch(0, rows=16))
  placed = shard_batch(batch._replace(links=links), mesh)
  np.testing.assert_array_equal(placed.links, links)
  assert {shard.data.shape for shard in placed.links.addressable_shards} == {(2, 5, 4)}
  assert shard_batch(batch, mesh).links is None


def test_replicate_copies_to_every_device():
  tree = replicate({'w': np.arange(5.0, dtype=np.float32)}, make_mesh())
  assert len(tree['w'].addressable_shards) == jax.device_count() and tree['w'].is_fully_replicated


def test_rows_must_divide():
  mesh = make_mesh(jax.devices()[:8])
  check_rows(32, mesh, parts=4)
  for rows, parts in ((4, 1), (12, 1), (16, 4)):
    with pytest.raises(UserError, match=f'{rows} rows.*possible: a multiple of {8 * parts}'):
      check_rows(rows, mesh, parts)
