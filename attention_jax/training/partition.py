"""Placement of arrays: a mesh of devices, and tables of rules that name its axes.

Rows of batches are sharded over the axes 'data' and 'fsdp'. Parameters, their moving average and the state of the
optimiser are sharded over 'fsdp' and 'tensor', by the names of their axes: PARAMETER_AXES selects these names by the
end of the path of an array, and LOGICAL_AXES maps them to axes of the mesh. Models contain no sharding code: the
compiler derives the placement of every other array. Over 'fsdp', parameters of Transformer and convolutional layers are
gathered where they are used; the others once, before the loss, so that a recurrence does not gather them in every step.
Over 'tensor' all stay sharded.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attention_jax.errors import UserError
from attention_jax.kernels.sharding import ROW_AXES

AXES = ('seed', *ROW_AXES, 'tensor')
BINARY_UNITS = {'GiB': 2**30, 'MiB': 2**20}
ALL_REMAINING = -1  # as the size of an axis: all devices that the other axes do not use

# Shardings by the kind of array; brackets name the axes of the array.
RULES = {
  'batch': PartitionSpec(ROW_AXES),  # [rows, ...]
  'parts': PartitionSpec(None, ROW_AXES),  # [parts, rows, ...] when gradients are accumulated
  'state': PartitionSpec(),  # replicated
  'batches': PartitionSpec('seed', ROW_AXES),  # [seeds, rows, ...] of runs side by side
  'states': PartitionSpec('seed'),  # [seeds, ...]
}

# Names of the last axes of a parameter, by a pattern of the end of its path; the first match counts. An array without a
# match is replicated: biases and gains are small.
PARAMETER_AXES = (
  (r'embedding', ('vocabulary', 'model')),
  (r'output/kernel', ('model', 'vocabulary')),
  (r'output/bias', ('vocabulary',)),
  (r'(attention|cross)/(query|key|value|gate)_kernel/kernel', ('heads', 'model', 'features')),
  (r'join/kernel', ('features', 'model')),
  (r'feed/Dense_1/kernel', ('features', 'model')),
  (r'kernel', ('model', 'features')),
)
# Layers that compute all positions at once: each use of their parameters is one product.
PARALLEL_LAYERS = r'(?:^|/)blocks_\d+/'
# The axis of the mesh over which a named axis may be sharded. An axis of the mesh shards one axis of an array:
# the first that divides evenly, such as the features instead of a single head.
LOGICAL_AXES = {'heads': 'tensor', 'vocabulary': 'tensor', 'features': 'tensor', 'model': 'fsdp'}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the device mesh; the fields of `config.mesh`. One of them may be -1, which takes the rest of the devices.

  Attributes:
    data: number of devices over which the rows of a batch are sharded, with the same parameters on each.
    fsdp: number of devices over which the rows of a batch, the parameters and the state of the optimiser are sharded.
    tensor: number of devices over which heads, features and vocabularies are sharded, for the same rows.
  """

  data: int = ALL_REMAINING
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self):
    sizes = dataclasses.asdict(self)
    for name, size in sizes.items():
      if size < 1 and size != ALL_REMAINING:
        raise UserError(f'config.mesh.{name} must be at least 1, or -1 for the rest of the devices, got {size}')
    if list(sizes.values()).count(ALL_REMAINING) > 1:
      raise UserError(f'only one size of config.mesh may be -1, got {self._describe()}')

  def sizes(self, devices: int, seed_devices: int = 1) -> tuple[int, int, int]:
    """Returns the sizes of the axes data, fsdp and tensor.

    Args:
      devices: number of devices for these three axes.
      seed_devices: size of the axis seed, for the error.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    sizes = [self.data, self.fsdp, self.tensor]
    fixed_product = math.prod(size for size in sizes if size != ALL_REMAINING)
    if ALL_REMAINING in sizes and devices % fixed_product == 0:
      sizes[sizes.index(ALL_REMAINING)] = devices // fixed_product
    if math.prod(sizes) != devices:
      groups = f' of each of {seed_devices} groups of seeds' if seed_devices > 1 else ''
      raise UserError(f'the sizes of config.mesh ({self._describe()}) must multiply to the {devices} devices{groups}')
    return tuple(sizes)

  def _describe(self) -> str:
    return ', '.join(f'{name}={size}' for name, size in dataclasses.asdict(self).items())


MESH_FIELDS = tuple(f'mesh.{field.name}' for field in dataclasses.fields(MeshConfig))  # they affect only rounding


def make_mesh(devices: Sequence[jax.Device] | None = None, seeds: int = 1, sizes: MeshConfig | None = None) -> Mesh:
  """Returns a mesh with the axes AXES.

  Args:
    devices: the devices of the mesh, in this order; by default all. Neighbours in this order share the axis 'tensor'.
    seeds: number of runs side by side. The axis 'seed' has gcd(seeds, n) devices, where n is the number of devices
      divided by the sizes of the other axes that are not -1.
    sizes: sizes of the other axes; by default all devices are on the axis 'data'.

  Raises:
    UserError: if the sizes do not multiply to the number of devices.
  """
  devices = np.asarray(jax.devices() if devices is None else devices)
  sizes = sizes or MeshConfig()
  fixed = math.prod(size for size in dataclasses.astuple(sizes) if size != ALL_REMAINING)
  seed_devices = math.gcd(seeds, max(devices.size // fixed, 1))
  # jax.make_mesh would reorder the devices of a TPU, and raises an error for several slices.
  shape = seed_devices, *sizes.sizes(devices.size // seed_devices, seed_devices)
  return Mesh(devices.reshape(shape), AXES)


def sharding(mesh: Mesh, rule: str) -> NamedSharding:
  """Returns the sharding of a row of RULES on a mesh."""
  return NamedSharding(mesh, RULES[rule])


def state_shardings(tree: Any, mesh: Mesh, *, stacked: bool = False, gathered: bool = False) -> Any:
  """Returns the sharding of every array of a tree of parameters, or of a whole training state.

  Args:
    tree: arrays, or their shapes, whose paths end like those of parameters.
    mesh: the mesh of the devices.
    stacked: whether the arrays have a leading axis of runs side by side.
    gathered: whether parameters outside of PARALLEL_LAYERS are whole on the axis 'fsdp', as recurrences need them.

  Returns:
    A tree of the same structure with NamedShardings.
  """

  def place(path, x):
    axes = [None] * len(x.shape)
    if stacked and mesh.shape['seed'] > 1:
      axes[0] = 'seed'
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    for axis, mesh_axis in _sharded_axes(name, x.shape[stacked:], mesh.shape).items():
      if not (gathered and mesh_axis == 'fsdp' and not re.search(PARALLEL_LAYERS, name)):
        axes[axis + stacked] = mesh_axis
    while axes and axes[-1] is None:
      axes.pop()  # as jax writes the shardings of results: another spec would compile an update twice
    return NamedSharding(mesh, PartitionSpec(*axes))

  return jax.tree.map_with_path(place, tree)


def _sharded_axes(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[int, str]:
  """Returns the axes of a parameter that are sharded, and the axis of the mesh of each."""
  mesh_axes = {}
  for axis, logical in _logical_axes(name, shape).items():
    mesh_axis = LOGICAL_AXES[logical]
    size = sizes[mesh_axis]
    if size > 1 and shape[axis] % size == 0 and mesh_axis not in mesh_axes.values():
      mesh_axes[axis] = mesh_axis
  return mesh_axes


def _logical_axes(name: str, shape: Sequence[int]) -> dict[int, str]:
  """Returns the axes of a parameter that have a name, and their names."""
  names = next((axes for end, axes in PARAMETER_AXES if re.search(f'(?:^|/)(?:{end})$', name)), ())
  names = names[max(len(names) - len(shape), 0) :]
  return dict(zip(range(len(shape) - len(names), len(shape)), names, strict=True))


def constrain(tree: Any, shardings: Any) -> Any:
  """Requires shardings of the arrays of a tree, inside of a compiled function."""
  return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def describe_placement(params: Any, mesh: Mesh) -> str:
  """Describes how parameters are sharded over a mesh; '' if every device holds all of them.

  Args:
    params: the parameters, or their shapes.
    mesh: the mesh of the devices.

  Raises:
    UserError: if the axis 'fsdp' or 'tensor' has several devices, but the largest parameter cannot be sharded over it:
      the axis would save little memory.
  """
  axes = [axis for axis in ('fsdp', 'tensor') if mesh.shape[axis] > 1]
  if not axes:
    return ''
  shardings = jax.tree.leaves(state_shardings(params, mesh))
  arrays = jax.tree.leaves_with_path(params)
  path, largest = max(arrays, key=lambda pair: math.prod(pair[1].shape))
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  used_axes = _sharded_axes(name, largest.shape, mesh.shape).values()
  for axis in axes:
    if axis not in used_axes:
      named = _logical_axes(name, largest.shape).items()
      sizes = [f'{largest.shape[i]} ({logical})' for i, logical in named if LOGICAL_AXES[logical] == axis]
      expected = f'a divisor of {" or ".join(sizes)}' if sizes else 1
      raise UserError(
        f'config.mesh.{axis}={mesh.shape[axis]} shards no axis of the largest parameter, {name} {list(largest.shape)}; '
        f'expected {expected}'
      )
  total = sum(x.dtype.itemsize * math.prod(x.shape) for _, x in arrays)
  local = sum(
    x.dtype.itemsize * math.prod(place.shard_shape(x.shape)) for (_, x), place in zip(arrays, shardings, strict=True)
  )
  sizes = ', '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)
  return f'parameters sharded over {sizes}: {format_bytes(local)} of {format_bytes(total)} on each device'


def format_bytes(size: float) -> str:
  """Returns a number of bytes as text, in the largest unit of which it is at least a half, else in KiB."""
  unit, bytes_of_unit = next((pair for pair in BINARY_UNITS.items() if size >= pair[1] / 2), ('KiB', 2**10))
  return f'{size / bytes_of_unit:.2f} {unit}'


def row_devices(mesh: Mesh) -> int:
  """Returns the number of shards of the rows of a batch."""
  return math.prod(mesh.shape[axis] for axis in ROW_AXES)


@functools.cache
def process_share(mesh: Mesh) -> tuple[int, int]:
  """Returns which share of the rows of a batch this process reads, and the number of shares.

  Processes whose devices hold the same rows, because 'tensor' or 'seed' spans them, read the same share.

  Raises:
    UserError: if the devices of a process do not hold one even share.
  """
  row_shards = np.moveaxis(mesh.devices, 0, 2).reshape(row_devices(mesh), -1)  # [shards, seed x tensor]
  is_local = np.vectorize(lambda device: device.process_index == jax.process_index())(row_shards)
  local = np.flatnonzero(is_local.any(axis=1))
  size = len(local)
  is_block = size and local[-1] - local[0] == size - 1 and local[0] % size == 0 and len(row_shards) % size == 0
  if not is_block:
    raise UserError(
      f'the {len(row_shards)} shards of a batch cannot be divided over {jax.process_count()} processes; '
      'expected a config.mesh, and a number of seeds, with which each process holds one block of shards'
    )
  return int(local[0]) // size, len(row_shards) // size


def check_rows(rows: int, mesh: Mesh, parts: int = 1) -> None:
  """Checks that a batch divides evenly over the devices of the axes data and fsdp, and the accumulated parts.

  Args:
    rows: number of rows of the global batch.
    mesh: the mesh of the devices.
    parts: number of parts in which gradients are accumulated.

  Raises:
    UserError: if the rows do not divide evenly.
  """
  devices = row_devices(mesh)
  divisor = devices * parts
  if rows % divisor:
    divided = f'{devices} devices (data x fsdp)' + (f' x {parts} accumulated parts' if parts > 1 else '')
    raise UserError(f'a batch of {rows} rows does not divide over {divided}; expected a multiple of {divisor}')


def shards_parameters(mesh: Mesh) -> bool:
  """Returns whether a mesh shards the parameters of a run."""
  return mesh.shape['fsdp'] > 1 or mesh.shape['tensor'] > 1


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
  """Returns the shardings of parameters in an evaluation on a mesh: those of training, or whole on every device."""
  if shards_parameters(mesh):
    return state_shardings(params, mesh)
  return jax.tree.map(lambda _: sharding(mesh, 'state'), params)


def place_parameters(params: Any, mesh: Mesh) -> Any:
  """Returns parameters as an evaluation on a mesh needs them, see `parameter_shardings`."""
  if shards_parameters(mesh):
    return jax.device_put(params, state_shardings(params, mesh))
  return replicate(fetch(params), mesh)


def gather_recurrent(params: Any, mesh: Mesh) -> Any:
  """Gathers the parameters outside of PARALLEL_LAYERS over 'fsdp', inside of a compiled function."""
  return constrain(params, state_shardings(params, mesh, gathered=True)) if shards_parameters(mesh) else params


def replicate(tree: Any, mesh: Mesh) -> Any:
  """Copies every array of `tree` to every device; every process must pass the same values."""
  return jax.device_put(tree, sharding(mesh, 'state'))


def shard_batch(batch: Any, mesh: Mesh, parts: int = 1, rule: str = 'batch') -> Any:
  """Makes global arrays from this process's rows of a batch.

  Args:
    batch: a tree of numpy arrays with the rows of `process_share`.
    mesh: the mesh of the devices.
    parts: number of parts in which gradients are accumulated.
    rule: the key of RULES that shards the arrays: 'batch' or 'batches'.

  Returns:
    A tree of the same structure with global arrays, sharded over the devices.

  Raises:
    UserError: if the rows do not divide evenly.
  """
  axis = RULES[rule].index(ROW_AXES)
  _, shares = process_share(mesh)
  rows = jax.tree.leaves(batch)[0].shape[axis] * shares
  check_rows(rows, mesh, parts)
  layout = sharding(mesh, rule)

  def place(x):
    shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
    return jax.make_array_from_process_local_data(layout, x, shape)

  return jax.tree.map(place, batch)


def shard_rows(batch: Any, mesh: Mesh) -> Any:
  """Makes global arrays from a batch that every process has: each gives the rows of its devices, see `shard_batch`."""
  index, shares = process_share(mesh)

  def own_rows(x):
    return x[index * len(x) // shares : (index + 1) * len(x) // shares]

  return shard_batch(jax.tree.map(own_rows, batch) if mesh.is_multi_process else batch, mesh)


def fetch(tree: Any) -> Any:
  """Copies whole arrays of any sharding to the host of every process; all processes must call it together."""

  def fetch_array(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return x
    return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)

  return jax.device_get(jax.tree.map(fetch_array, tree))


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
