"""Functions that XLA cannot partition: every device runs them for its own rows of the batch."""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, PartitionSpec

BATCH_AXIS = 'data'  # the axis of a mesh that splits the rows of a batch


def shard_over_rows(fn: Callable) -> Callable:
  """Wraps `fn` so that under a mesh every device runs it for its own part of the mapped axes.

  XLA cannot partition a Pallas program, nor a loop over rows: without this wrapper it gathers all rows on every device,
  or fails. Under a mesh (jax.set_mesh) the wrapped function is a jax.shard_map. A jax.vmap around it
  partitions its rows if it has an spmd_axis_name, see `batch_mesh_axis`.

  Args:
    fn: a function of arrays or trees of arrays.

  Returns:
    A function of the same signature.
  """

  def run(*args):
    if not _auto_axes():
      return fn(*args)
    # check_vma=False: no gradient passes through, and Pallas' interpreter does not track varying axes.
    return jax.shard_map(fn, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(*args)

  return run


def batch_mesh_axis(rows: int) -> str | None:
  """Returns the spmd_axis_name for a jax.vmap over `rows` rows: the mesh axis that splits them, or None."""
  if BATCH_AXIS not in _auto_axes():
    return None
  devices = jax.sharding.get_abstract_mesh().shape[BATCH_AXIS]
  return BATCH_AXIS if rows % devices == 0 else None


def _auto_axes() -> list[str]:
  """The axes of the current mesh if XLA partitions along all of them; none within a jax.shard_map."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}:
    return list(mesh.axis_names)
  return []
