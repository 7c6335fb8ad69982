"""Batches that lie on several devices: each runs for its own rows what a compiler cannot divide by itself."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, PartitionSpec

BATCH_AXIS = 'data'  # the axis of a mesh that splits the rows of a batch


def shard_over_rows(fn: Callable) -> Callable:
  """fn of arrays, or trees of them, such that under a mesh every device runs it for what it has of mapped axes.

  A compiler cannot look into a Pallas program, nor divide the steps of a loop over rows: left to itself it gathers all
  rows on every device, or refuses. Under a mesh (jax.set_mesh) fn is a jax.shard_map, of which jax.vmap splits those
  axes whose spmd_axis_name says along which axis of the mesh, see `batch_mesh_axis`.
  """

  def run(*given):
    if not _free_axes():
      return fn(*given)
    # Unchecked: nobody differentiates it, and the interpreter of Pallas does not know what varies along which axis.
    return jax.shard_map(fn, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(*given)

  return run


def batch_mesh_axis(rows: int) -> str | None:
  """What jax.vmap over so many rows is told as spmd_axis_name: the axis of the mesh around it that can split them."""
  return (
    BATCH_AXIS
    if BATCH_AXIS in _free_axes() and rows % jax.sharding.get_abstract_mesh().shape[BATCH_AXIS] == 0
    else None
  )


def _free_axes() -> list[str]:
  """The axes of a mesh of several devices, where the compiler divides along all; within a jax.shard_map, none."""
  mesh = jax.sharding.get_abstract_mesh()
  return list(mesh.axis_names) if mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto} else []
