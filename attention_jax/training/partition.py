"""Placement of arrays: one mesh over all devices, and a table of shardings that name its axes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention_jax.errors import UserError
from attention_jax.kernels.sharding import BATCH_AXIS

AXES = ('seed', BATCH_AXIS)

RULES = {
  'batch': PartitionSpec(BATCH_AXIS),
  'parts': PartitionSpec(None, BATCH_AXIS),  # [parts, rows, ...] when gradients are accumulated
  'state': PartitionSpec(),  # replicated
  'batches': PartitionSpec('seed', BATCH_AXIS),  # [seeds, rows, ...] of runs side by side
  'states': PartitionSpec('seed'),  # [seeds, ...]
}


def make_mesh(devices: Sequence[jax.Device] | None = None, seeds: int = 1) -> Mesh:
  """Returns a mesh with the axes AXES.

  Args:
    devices: the devices of the mesh, in this order; by default all.
    seeds: number of runs side by side. The axis 'seed' has gcd(seeds, devices) devices, and the batch
      is split over the rest.
  """
  devices = np.asarray(jax.devices() if devices is None else devices)
  # jax.make_mesh would reorder the devices of a TPU, and raises an error for several slices.
  return Mesh(devices.reshape(math.gcd(seeds, devices.size), -1), AXES)


def sharding(mesh: Mesh, rule: str) -> NamedSharding:
  """Returns the sharding of a row of RULES on a mesh."""
  return NamedSharding(mesh, RULES[rule])


def check_rows(rows: int, mesh: Mesh, parts: int = 1) -> None:
  """Checks that a batch divides evenly over the devices and the accumulated parts.

  Args:
    rows: number of rows of the global batch.
    mesh: the mesh of the devices.
    parts: number of parts in which gradients are accumulated.

  Raises:
    UserError: if the rows do not divide evenly.
  """
  devices = mesh.shape[BATCH_AXIS]
  divisor = devices * parts
  if rows % divisor:
    divided = f'{devices} devices' + (f' x {parts} accumulated parts' if parts > 1 else '')
    raise UserError(f'a batch of {rows} rows does not divide over {divided}; expected a multiple of {divisor}')


def replicate(tree: Any, mesh: Mesh) -> Any:
  """Copies every array of `tree` to every device; every process must pass the same values."""
  return jax.device_put(tree, sharding(mesh, 'state'))


def shard_batch(batch: Any, mesh: Mesh, parts: int = 1, rule: str = 'batch') -> Any:
  """Makes global arrays of this process's rows of a batch.

  Args:
    batch: a tree of numpy arrays.
    mesh: the mesh of the devices.
    parts: number of parts in which gradients are accumulated.
    rule: row of RULES that shards the arrays: 'batch' or 'batches'.

  Returns:
    The same tree of global arrays, sharded over the devices.

  Raises:
    UserError: if the rows do not divide evenly.
  """
  rows = jax.tree.leaves(batch)[0].shape[RULES[rule].index(BATCH_AXIS)]
  check_rows(rows * jax.process_count(), mesh, parts)
  layout = sharding(mesh, rule)
  return jax.tree.map(lambda x: jax.make_array_from_process_local_data(layout, x), batch)


def jit_on_mesh(mesh: Mesh, fn: Callable, **options) -> Callable:
  """Compiles a function whose kernels run on each device's own rows.

  Args:
    mesh: the mesh of the devices.
    fn: the function.
    **options: arguments of jax.jit.

  Returns:
    The compiled function.
  """

  @functools.wraps(fn)
  def fn_on_mesh(*args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return fn(*args)

  return jax.jit(fn_on_mesh, **options)
