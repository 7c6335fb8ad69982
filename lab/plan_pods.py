"""Prints a table of the costs of an update on TPU slices of several sizes, none of which is attached.

  python -m lab.plan_pods --config=configs/wmt14.py:transformer2017_big --vocabulary_size=32000 --tokens=3072
  python -m lab.plan_pods --config=configs/wmt14.py:gnmt2016 --vocabulary_size=32000 --config.mesh.fsdp=8

Compiles the update of the longest sequences for each slice, see compile_for_pod.py, with batches that grow with the
slice: --tokens tokens of each side for each chip. config.mesh.fsdp is reduced to its greatest common divisor with the
number of devices. Each row has

- the memory per device, and the bytes that it accesses by XLA's cost analysis, which counts the body of a loop once;
- a lower bound of the time of an update: that of its matrix products at the published rate of the chip;
- an upper bound of the target tokens per second, padding included: the rate if an update takes exactly this time.

'does not fit' marks slices whose devices have too little memory for the update, or whose mesh cannot shard the largest
parameter. Nothing is measured. One slice takes minutes to compile. Needs libtpu, see lab/requirements.txt.
"""

import math
from collections.abc import Sequence
from typing import Any

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, define_config, launch
from lab.topologies import define_vocabulary_size_flag, topology_devices

SLICES = ['v5e:1x1', 'v5e:2x2', 'v5e:4x4', 'v5e:8x8', 'v5e:16x16', 'v5p:4x4x8', 'v5p:8x8x16']
COLUMNS = {
  'slice': '---',
  'chips': '---:',
  'pairs': '---:',
  'state, GiB per device': '---:',
  'temporary, GiB': '---:',
  'accessed, GiB': '---:',
  'products, ms': '---:',
  'tokens per second at most': '---:',
}

define_config('the config of a translation system: configs/wmt14.py:gnmt2016')
flags.DEFINE_list('topologies', SLICES, 'TPU slices')
flags.DEFINE_integer('tokens', 3072, 'tokens of each side of a batch for each chip, padding included', lower_bound=1)
define_vocabulary_size_flag()


def main() -> None:
  """Prints the costs of --config on each of --topologies. Raises UserError unless --config is a translation config."""
  if FLAGS.config is None:
    raise UserError(
      '--config is missing; for example --config=configs/wmt14.py:transformer2017_big --vocabulary_size=32000'
    )
  if FLAGS.config.system != 'translation':
    raise UserError(f"config.system must be 'translation' for batches of --tokens, got {FLAGS.config.system!r}")
  # All slices first, so that a mistake is reported before anything is compiled.
  slices = {topology: topology_devices(topology) for topology in FLAGS.topologies}
  for topology, devices in slices.items():
    _check_mesh(topology, devices)
  print('\n'.join(_format_row(cells) for cells in (COLUMNS, COLUMNS.values())), flush=True)
  for topology, devices in slices.items():
    print(_format_row(_plan(topology, devices)), flush=True)


def _config_for(devices: Sequence[Any]) -> Any:
  """Returns --config with a value of config.mesh.fsdp that divides the devices of a slice."""
  config = FLAGS.config.copy_and_resolve_references()
  if config.mesh.fsdp > 0:  # -1 takes the rest of the devices
    config.mesh.fsdp = math.gcd(config.mesh.fsdp, len(devices))
  return config


def _check_mesh(topology: str, devices: Sequence[Any]) -> None:
  """Raises UserError if a slice does not have the devices of config.mesh."""
  from attention_jax.training.partition import MeshConfig, make_mesh

  config = _config_for(devices)
  try:
    make_mesh(devices, seeds=config.seeds, sizes=MeshConfig(**config.mesh))
  except UserError as error:
    raise UserError(f'{topology}: {error}; choose other --topologies') from error


def _plan(topology: str, devices: Sequence[Any]) -> list[str]:
  """Returns the cells of the row of one slice."""
  from attention_jax.systems.config import parse_config
  from lab import pods
  from lab.ahead_of_time import DoesNotFitError

  chip = pods.chip_of(devices)
  chips = str(pods.count_chips(devices))
  config = _config_for(devices)
  config.data.batch_unit = 'tokens'
  config.data.batch_size = FLAGS.tokens * pods.count_chips(devices)
  platform = devices[0].platform
  try:
    (cost,) = pods.update_costs(
      parse_config(config), devices, chip, platform, vocabulary_size=FLAGS.vocabulary_size, largest=True
    )
  except DoesNotFitError:
    return [topology, chips, *[''] * (len(COLUMNS) - 3), 'does not fit']
  rows, source, target = cost.shape
  fits = '' if cost.memory <= chip.memory else ', does not fit'
  gib = (cost.parameters + cost.optimizer, cost.temporary, cost.analysis['bytes accessed'])
  sizes = [chips, f'{rows} x ({source}, {target})', *(f'{size / 2**30:.2f}' for size in gib)]
  return [topology, *sizes, f'{cost.seconds * 1e3:.3g}', f'{rows * target / cost.seconds:,.0f}{fits}']


def _format_row(cells) -> str:
  return f'| {" | ".join(cells)} |'


if __name__ == '__main__':
  launch(main)
