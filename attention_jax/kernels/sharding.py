"""Batches on several devices: rows that a mesh splits, and functions that XLA cannot partition.

Every device runs the latter for its own rows of the batch.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_jax.errors import UserError

ROW_AXES = ('data', 'fsdp')  # the axes of a mesh that split the rows of a batch


def shard_over_rows(fn: Callable) -> Callable:
  """Wraps `fn`, the computation of one row, so that a jax.vmap of it runs on every device for the device's own rows.

  XLA cannot partition a Pallas program, nor a loop over rows: without this wrapper it gathers all rows on every device,
  or fails. Under a mesh of several devices whose axes are all Auto (jax.set_mesh) the wrapped function runs in a
  jax.shard_map. The vmap must have an spmd_axis_name, see `batch_mesh_axis`; without one, every device computes all
  rows.

  Args:
    fn: a function of arrays or trees of arrays, all of them positional arguments.

  Returns:
    A function of the same arguments. It raises UserError for rows that are split over axes of type Explicit.
  """

  def run(*args):
    if not _auto_axes():
      return _run_unpartitioned(fn, args)
    # check_vma=False: no gradient passes through, and Pallas' interpreter does not track varying axes.
    return jax.shard_map(fn, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(*args)

  return run


def has_explicit_axes() -> bool:
  """Whether the current mesh has several devices and an axis of AxisType.Explicit."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.size > 1 and AxisType.Explicit in mesh.axis_types


def explicit_axes_error() -> UserError:
  """Returns the error for an implementation that jax cannot compute under a mesh of type Explicit."""
  return UserError(
    'attend: this implementation cannot split rows over mesh axes of AxisType.Explicit; expected a mesh with '
    "AxisType.Auto, or implementation='xla'"
  )


def shard_alike(arrays: Any, num_axes: int) -> Any:
  """Splits the batch axes of all arrays over the axes of type Explicit that split them in one of the arrays.

  jax.vmap requires it. A new array, such as an rng for each row, is replicated.

  Args:
    arrays: a tree of arrays that have the same leading axes; length 1 stands for an axis that rows share.
    num_axes: the number of these axes.

  Returns:
    The arrays; those of length 1 along an axis are not split there.

  Raises:
    UserError: for arrays that are split over different axes of the mesh.
  """
  shardings = [jax.typeof(x).sharding for x in jax.tree.leaves(arrays)]
  split = [dict.fromkeys(s.spec[axis] for s in shardings if s.spec[axis] is not None) for axis in range(num_axes)]
  for axis, names in enumerate(split):
    if len(names) > 1:
      got = ' and '.join(map(str, names))
      raise UserError(f'attention: arrays must be split alike along batch axis {axis}, got mesh axes {got}')
  if not any(split):
    return arrays
  mesh = next(sharding.mesh for sharding in shardings if any(sharding.spec))
  names = [next(iter(axis_names), None) for axis_names in split]

  def shard(x):
    batch = (None if size == 1 else name for name, size in zip(names, x.shape, strict=False))
    spec = PartitionSpec(*batch, *jax.typeof(x).sharding.spec[num_axes:])
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))

  return jax.tree.map(shard, arrays)


def _run_unpartitioned(fn: Callable, args: tuple):
  """Returns fn(*args); raises UserError if jax cannot loop over rows because a mesh of type Explicit splits them."""
  try:
    return fn(*args)
  except ValueError as error:
    if not has_explicit_axes():
      raise
    raise explicit_axes_error() from error


def batch_mesh_axis(rows: int) -> tuple[str, ...] | None:
  """Returns the spmd_axis_name for a jax.vmap over `rows` rows: the mesh axes that split them.

  None if no mesh axis splits rows, or if `rows` does not divide evenly over these axes.
  """
  axes = tuple(axis for axis in ROW_AXES if axis in _auto_axes())
  if not axes:
    return None
  sizes = jax.sharding.get_abstract_mesh().shape
  parts = math.prod(sizes[axis] for axis in axes)
  # XLA fails to sum over axes of one device in a program that is also partitioned along other axes.
  return axes if parts > 1 and rows % parts == 0 else None


def _auto_axes() -> list[str]:
  """The axes of the current mesh if XLA partitions along all of them; none within a jax.shard_map or on one device."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}:
    return list(mesh.axis_names)
  return []
