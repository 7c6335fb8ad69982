"""Batches are sharded by rows over the devices, and states by the names of their axes."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.training.partition import (
  AXES,
  LOGICAL_AXES,
  PARAMETER_AXES,
  RULES,
  MeshConfig,
  check_rows,
  describe_placement,
  format_bytes,
  make_mesh,
  process_share,
  replicate,
  shard_batch,
  state_shardings,
)
from tests.training.helpers import make_batch


def test_mesh_spans_all_devices_in_order_with_automatic_axes():
  assert make_mesh().shape == {'seed': 1, 'data': jax.device_count(), 'fsdp': 1, 'tensor': 1}
  assert make_mesh(jax.devices()[:3]).shape['data'] == 3
  for seeds, seed_devices in ((2, 2), (6, 2), (16, 8), (3, 1)):
    shape = make_mesh(jax.devices()[:8], seeds).shape
    assert (shape['seed'], shape['data']) == (seed_devices, 8 // seed_devices)
  devices = jax.devices()[:6][::-1]
  mesh = make_mesh(devices, seeds=2)
  assert list(mesh.devices.flat) == devices and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_rules_name_axes_of_the_mesh():
  assert {axis for spec in RULES.values() for axes in spec if axes for axis in np.atleast_1d(axes)} <= set(AXES)
  assert set(LOGICAL_AXES.values()) <= set(AXES)
  assert {name for _, names in PARAMETER_AXES for name in names} == set(LOGICAL_AXES)


def test_sizes_of_the_mesh_multiply_to_the_devices():
  sizes = MeshConfig(fsdp=2, tensor=2)
  assert dict(make_mesh(jax.devices()[:8], sizes=sizes).shape) == {'seed': 1, 'data': 2, 'fsdp': 2, 'tensor': 2}
  assert dict(make_mesh(jax.devices()[:8], 6, sizes).shape) == {'seed': 2, 'data': 1, 'fsdp': 2, 'tensor': 2}


@pytest.mark.parametrize(
  ('seeds', 'sizes', 'message'),
  [
    (1, {'fsdp': 3}, r'^the sizes of config.mesh \(data=.*\) must multiply to the 8 devices$'),
    (1, {'data': 2, 'fsdp': 2}, 'must multiply to the 8 devices$'),
    (2, {'data': 2}, r'\(data=2, .* multiply to the 4 devices of each of 2 groups of seeds$'),
    (1, {'fsdp': 0}, '^config.mesh.fsdp must be at least 1, or -1 for the rest of the devices, got 0$'),
    (1, {'fsdp': -1}, '^only one size of config.mesh may be -1, got data=-1, fsdp=-1, tensor=1$'),
  ],
)
def test_invalid_sizes_are_reported(seeds, sizes, message):
  with pytest.raises(UserError, match=message):
    make_mesh(jax.devices()[:8], seeds, MeshConfig(**sizes))


def specs_of(shapes, seeds=1, **options):
  mesh = make_mesh(jax.devices()[:8], seeds, MeshConfig(fsdp=2, tensor=2))
  tree = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
  return {name: layout.spec for name, layout in state_shardings(tree, mesh, **options).items()}


def test_parameters_are_placed_by_the_names_of_their_axes():
  shapes = {
    'mu/encoder/embedding/table/embedding': (16, 8),
    'output/kernel': (8, 16),
    'blocks_0/cross/query_kernel/kernel': (4, 8, 2),
    'cell/attention/key_kernel/kernel': (1, 8, 6),  # one head: its features are sharded
    'blocks_0/feed/Dense_1/kernel': (16, 8),
    'cells_0/kernel': (8, 24),
    'convolution/kernel': (3, 3, 1, 8),
    'residuals_0/LayerNorm_0/scale': (8,),
    'odd/kernel': (7, 9),
  }
  assert specs_of(shapes) == {
    'mu/encoder/embedding/table/embedding': P('tensor', 'fsdp'),
    'output/kernel': P('fsdp', 'tensor'),
    'blocks_0/cross/query_kernel/kernel': P('tensor', 'fsdp'),
    'cell/attention/key_kernel/kernel': P(None, 'fsdp', 'tensor'),
    'blocks_0/feed/Dense_1/kernel': P('tensor', 'fsdp'),
    'cells_0/kernel': P('fsdp', 'tensor'),
    'convolution/kernel': P(None, None, None, 'tensor'),
    'residuals_0/LayerNorm_0/scale': P(),
    'odd/kernel': P(),
  }
  assert specs_of({'cells_0/kernel': (8, 24)}, gathered=True) == {'cells_0/kernel': P(None, 'tensor')}
  assert specs_of({'cells_0/kernel': (2, 8, 24)}, seeds=2, stacked=True) == {
    'cells_0/kernel': P('seed', 'fsdp', 'tensor')
  }


@pytest.mark.parametrize(
  'size, text',
  [(3, '0.00 KiB'), (1536, '1.50 KiB'), (2**19, '0.50 MiB'), (3 * 2**28, '0.75 GiB'), (2**40, '1024.00 GiB')],
)
def test_sizes_have_the_largest_unit_of_which_they_are_half(size, text):
  assert format_bytes(size) == text


def test_a_mesh_that_does_not_shard_the_largest_parameter_is_an_error():
  sizes = {'a/kernel': (1026, 1024), 'a/bias': (1024,)}  # 4 MiB and 4 KiB; 2 divides 1026, and 4 does not
  shapes = {name: jax.ShapeDtypeStruct(size, np.float32) for name, size in sizes.items()}
  mesh = make_mesh(jax.devices()[:2], sizes=MeshConfig(fsdp=2))
  assert describe_placement(shapes, mesh) == 'parameters sharded over fsdp=2: 2.01 MiB of 4.01 MiB on each device'
  assert describe_placement(shapes, make_mesh(jax.devices()[:2])) == ''
  with pytest.raises(UserError, match=r'^config.mesh.fsdp=4 shards no axis of the largest parameter, a/kernel'):
    describe_placement(shapes, make_mesh(jax.devices()[:4], sizes=MeshConfig(fsdp=4)))


def test_processes_whose_devices_hold_the_same_rows_read_the_same_share(monkeypatch):
  def share(process, devices_per_process, **sizes):
    mesh = make_mesh(jax.devices()[:8], sizes=MeshConfig(**sizes))
    indices = {device: i // devices_per_process for i, device in enumerate(jax.devices()[:8])}
    fake = np.vectorize(lambda device: FakeDevice(indices[device]), otypes=[object])(mesh.devices)
    monkeypatch.setattr(jax, 'process_index', lambda: process)
    return process_share.__wrapped__(FakeMesh(fake, mesh.shape))

  assert [share(i, 4) for i in range(2)] == [(0, 2), (1, 2)]
  assert [share(i, 2, fsdp=2, tensor=2) for i in range(4)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
  assert [share(i, 2, tensor=4) for i in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
  assert share(1, 4, tensor=8) == (0, 1)


@dataclasses.dataclass
class FakeDevice:
  process_index: int


class FakeMesh(NamedTuple):
  devices: np.ndarray
  shape: Mapping[str, int]


def test_a_batch_is_sharded_by_rows_and_keeps_its_values():
  batch = Batch(*make_batch(0, rows=16))
  mesh = make_mesh(jax.devices()[:8])
  assert shard_batch(batch, mesh).links is None
  replicated = replicate({'w': batch.source}, mesh)['w']
  assert replicated.is_fully_replicated and len(replicated.addressable_shards) == 8
  batch = batch._replace(links=np.random.default_rng(0).random((16, 5, 4)) < 0.5)
  placed = shard_batch(batch, mesh)
  jax.tree.map(np.testing.assert_array_equal, batch, placed)
  assert {shard.data.shape[0] for x in jax.tree.leaves(placed) for shard in x.addressable_shards} == {2}
  assert placed.target_mask.dtype == placed.links.dtype == bool and placed.source.dtype == np.int32


def test_rows_must_divide_evenly():
  mesh = make_mesh(jax.devices()[:8])
  check_rows(32, mesh, parts=4)
  for rows, parts in ((4, 1), (12, 1), (16, 4)):
    with pytest.raises(UserError, match=f'{rows} rows.*expected a multiple of {8 * parts}'):
      check_rows(rows, mesh, parts)
