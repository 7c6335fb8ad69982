"""Functions that XLA cannot partition: every device runs them for its own rows of the batch."""

import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType, PartitionSpec

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
