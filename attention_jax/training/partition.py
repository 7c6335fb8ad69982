"""Where arrays live: one mesh over all devices, and a table that says which axis of the mesh splits what."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention_jax.errors import UserError
from attention_jax.kernels.sharding import BATCH_AXIS

AXES = ('seed', BATCH_AXIS)

RULES = {
  'batch': PartitionSpec(BATCH_AXIS),
  'parts': PartitionSpec(None, BATCH_AXIS),  # [parts, rows, ...] when gradients are accumulated
  'state': PartitionSpec(),  # a copy on every device
  'batches': PartitionSpec('seed', BATCH_AXIS),  # [seeds, rows, ...] of runs that are trained side by side
  'states': PartitionSpec('seed'),  # [seeds, ...]
}


def make_mesh(devices: Sequence[jax.Device] | None = None, seeds: int = 1) -> Mesh:
  """A mesh over `devices`, by default all there are: over as many of the `seeds` as divide them, then over rows."""
  devices = np.asarray(jax.devices() if devices is None else devices)
  return Mesh(devices.reshape(math.gcd(seeds, devices.size), -1), AXES)


def sharding(mesh: Mesh, rule: str) -> NamedSharding:
  """The sharding that a row of RULES means on this mesh."""
  return NamedSharding(mesh, RULES[rule])


def check_rows(rows: int, mesh: Mesh, parts: int = 1) -> None:
  """Raises UserError unless a global batch of `rows` divides evenly over the devices and the accumulated parts."""
  devices = mesh.shape[BATCH_AXIS]
  if rows % (devices * parts):
    several = f' x {parts} accumulated parts' if parts > 1 else ''
    possible = f'a multiple of {devices * parts}'
    raise UserError(f'a batch of {rows} rows does not divide over {devices} devices{several}; possible: {possible}')


def replicate(tree, mesh: Mesh):
  """A copy of every array of `tree` on every device; every process gives the same values."""
  return jax.device_put(tree, sharding(mesh, 'state'))


def shard_batch(batch, mesh: Mesh, parts: int = 1, rule: str = 'batch'):
  """This process's rows of a batch (numpy arrays) -> global arrays, split over the devices as `rule` says."""
  size = jax.tree.leaves(batch)[0].shape[RULES[rule].index(BATCH_AXIS)]
  check_rows(size * jax.process_count(), mesh, parts)
  rows = sharding(mesh, rule)
  return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)


def jit_on_mesh(mesh: Mesh, fn: Callable, **options) -> Callable:
  """jax.jit of fn, whose kernels each device runs for the rows that it has; options, of jax.jit."""

  @functools.wraps(fn)
  def on_mesh(*given):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return fn(*given)

  return jax.jit(on_mesh, **options)
