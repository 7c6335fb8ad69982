"""Costs of an update on a pod: memory and FLOP per device, and a lower bound of its time from the rate of the chip.

Memory is that of the compiler's own analysis. FLOP are counted in the traced program, with the bodies of loops as often
as they run; XLA's cost analysis counts them once. Nothing here is measured.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from attention_jax.errors import choose
from attention_jax.kernels.estimates import CHIPS, Chip
from attention_jax.systems.config import RunConfig
from attention_jax.training.partition import MeshConfig, format_bytes, make_mesh
from lab.ahead_of_time import CompiledUpdate, DoesNotFitError, compile_updates


class UpdateCost(NamedTuple):
  """Memory and FLOP of one device for one update of a batch shape.

  Attributes:
    shape: (rows, ...) of the global batch of one run.
    parameters: bytes of the parameters and their moving average.
    optimizer: bytes of the rest of the training state.
    temporary: bytes of temporary arrays: activations, gradients and gathered parameters.
    flop: FLOP of the matrix products.
    seconds: lower bound of the time: that of the matrix products at the peak rate of the chip.
    analysis: what XLA's cost analysis reports, such as 'flops' and 'bytes accessed'; the body of a loop counts once.
  """

  shape: tuple[int, ...]
  parameters: float
  optimizer: float
  temporary: float
  flop: float
  seconds: float
  analysis: Mapping[str, float]

  @property
  def memory(self) -> float:
    """Bytes of the training state and the temporary arrays at once, without those of the batch."""
    return self.parameters + self.optimizer + self.temporary


class Attempt(NamedTuple):
  """One mesh that was tried.

  Attributes:
    sizes: sizes of its axes.
    cost: the cost of the batch of the longest sequences; None if `update_costs` raised DoesNotFitError.
    reason: why the update does not fit, or ''.
  """

  sizes: MeshConfig
  cost: UpdateCost | None
  reason: str


def chip_of(devices: Sequence[Any]) -> Chip:
  """Returns the rate and the memory of one device.

  Where the devices of a topology are cores, as for v4, each has an equal part of the rate and memory of its chip.

  Raises:
    UserError: for a kind without a row in CHIPS.
  """
  chip = CHIPS[choose(devices[0].device_kind, CHIPS, 'chip')]
  cores = len(devices) // count_chips(devices)
  return Chip(*(amount / cores for amount in chip))


def count_chips(devices: Sequence[Any]) -> int:
  """Returns the number of chips of a topology: the cores of a chip have the same coordinates."""
  return len({tuple(getattr(device, 'coords', [device.id])) for device in devices})


def update_costs(
  config: RunConfig,
  devices: Sequence[Any],
  chip: Chip,
  platform: str,
  *,
  vocabulary_size: int | None = None,
  largest: bool = False,
) -> Iterator[UpdateCost]:
  """Compiles the updates of a config for devices that are not attached, and yields the cost of each.

  Args:
    config: the config of a run; its group `mesh` has the sizes of the mesh.
    devices: the devices of a topology.
    chip: the rate and the memory of one device, see `chip_of`.
    platform: the platform to lower for.
    vocabulary_size, largest: see ahead_of_time.compile_updates.

  Raises:
    UserError: for mistakes in the config or its data.
    DoesNotFitError: see ahead_of_time.compile_updates.
  """
  mesh = make_mesh(devices, seeds=config.seeds, sizes=config.mesh)
  for update in compile_updates(config, mesh, platform, vocabulary_size=vocabulary_size, largest=largest):
    yield _cost(update, chip, len(devices))


def try_meshes(
  config: RunConfig, devices: Sequence[Any], chip: Chip, platform: str, *, vocabulary_size: int | None = None
) -> Iterator[Attempt]:
  """Tries meshes for the longest sequences, in the order of `_candidates`, and ends with the first that fits.

  The arguments are those of `update_costs`, except that the group `mesh` of the config has no effect.

  Raises:
    UserError: for mistakes in the config or its data.
  """
  for sizes in _candidates(len(devices)):
    mesh_config = dataclasses.replace(config, mesh=sizes)
    try:
      (cost,) = update_costs(mesh_config, devices, chip, platform, vocabulary_size=vocabulary_size, largest=True)
    except DoesNotFitError as error:
      yield Attempt(sizes, None, str(error))
      continue
    fits = cost.memory <= chip.memory
    yield Attempt(sizes, cost, '' if fits else f'needs {format_bytes(cost.memory)}')
    if fits:
      return


def _candidates(num_devices: int) -> list[MeshConfig]:
  """Returns meshes in the order in which they are tried.

  Parameters are replicated, then sharded over fsdp=8, over all devices, and also over tensor=4 and 8.
  """
  sizes = [(1, 1), (8, 1), (num_devices, 1), (num_devices // 4, 4), (num_devices // 8, 8)]
  valid = [(fsdp, tensor) for fsdp, tensor in sizes if fsdp >= 1 and num_devices % (fsdp * tensor) == 0]
  return [MeshConfig(fsdp=fsdp, tensor=tensor) for fsdp, tensor in dict.fromkeys(valid)]


def _cost(update: CompiledUpdate, chip: Chip, num_devices: int) -> UpdateCost:
  memory = update.compiled.memory_analysis()
  unaliased_output = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)  # not in donated inputs
  flop = update.flop / num_devices
  parameters = _local_bytes((update.state.params, update.state.average))
  return UpdateCost(
    shape=update.shape,
    parameters=parameters,
    optimizer=_local_bytes(update.state) - parameters,
    temporary=memory.temp_size_in_bytes + unaliased_output,
    flop=flop,
    seconds=flop / chip.flops,
    analysis=update.compiled.cost_analysis(),
  )


def _local_bytes(tree: Any) -> float:
  """Returns the bytes of one device's part of a tree of shapes with shardings."""
  return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
