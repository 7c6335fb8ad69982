"""Compiles the updates of a config ahead of time for a TPU pod that is not attached, and reports what they cost.

  python -m lab.compile_for_pod --topology=v5e:2x2 --config=configs/shapes.py:xu2015_soft
  python -m lab.compile_for_pod --topology=v5e:4x4 --config=configs/wmt14.py:transformer2017_base \\
    --vocabulary_size=32000
  python -m lab.compile_for_pod --topology=v5p:4x4x8 --config=configs/wmt14.py:gnmt2016 \\
    --vocabulary_size=32000 --config.mesh.fsdp=8 --largest
  python -m lab.compile_for_pod --topology=v5e:16x16 --config=configs/wmt14.py:gnmt2016 \\
    --vocabulary_size=32000 --try_meshes

The shapes of the batches are those of the data of the config, or, with --vocabulary_size, those of its buckets. The
costs of a shape are, for one device: the memory of parameters, optimiser state and temporary arrays; the FLOP of its
matrix products, and the time that they take at the published rate of the chip; and the FLOP and accessed bytes of XLA's
cost analysis, which counts the body of a loop once. Nothing runs, so nothing is measured. Needs libtpu, see
lab/requirements.txt.
"""

import time

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, define_config, launch
from lab.topologies import define_topology_flag, define_vocabulary_size_flag, describe_devices, topology_devices

define_config('a file of configs/ and a preset: configs/wmt14.py:gnmt2016')
define_topology_flag()
define_vocabulary_size_flag()
flags.DEFINE_bool('largest', False, 'compile the shape with the longest sequences only')
flags.DEFINE_bool('try_meshes', False, 'try sizes of the mesh until the shape with the longest sequences fits')


def main() -> None:
  """Prints the costs of the updates of --config for --topology.

  Raises:
    UserError: if --config is missing or has a mistake; with --try_meshes, if none of the meshes tried fits; otherwise,
      if the compiler rejects an update that does not fit, or if the mesh cannot shard the largest parameter.
  """
  if FLAGS.config is None:
    raise UserError(
      '--config is missing; for example --config=configs/wmt14.py:transformer2017_base --vocabulary_size=32000'
    )
  from attention_jax.systems.config import parse_config
  from lab import pods

  devices = topology_devices(FLAGS.topology)
  chip = pods.chip_of(devices)
  print(f'{describe_devices(devices)}, {chip.memory / 2**30:.0f} GiB each', flush=True)
  arguments = (parse_config(FLAGS.config), devices, chip, devices[0].platform)
  if FLAGS.try_meshes:
    reason = ''
    for sizes, cost, reason in pods.try_meshes(*arguments, vocabulary_size=FLAGS.vocabulary_size):
      result = _format_cost(cost) if cost else 'does not compile'
      print(f'fsdp={sizes.fsdp}, tensor={sizes.tensor}: {result}; {reason or "fits"}', flush=True)
    if reason:
      raise UserError(
        f'none of the meshes tried on --topology={FLAGS.topology} fits; choose a larger slice or a smaller batch'
      )
    return
  start = time.monotonic()
  for cost in pods.update_costs(*arguments, vocabulary_size=FLAGS.vocabulary_size, largest=FLAGS.largest):
    fits = 'fits' if cost.memory <= chip.memory else 'DOES NOT FIT'
    print(f'{_format_cost(cost)}; {fits}; compiled in {time.monotonic() - start:.0f} s', flush=True)
    start = time.monotonic()


def _format_cost(cost) -> str:
  """Returns one line about the cost of an update."""
  from attention_jax.training.partition import format_bytes
  from lab.ahead_of_time import format_shape

  flops, accessed = cost.analysis['flops'], cost.analysis['bytes accessed']
  return (
    f'{format_shape(cost.shape)}: per device {format_bytes(cost.parameters)} parameters, '
    f'{format_bytes(cost.optimizer)} optimiser, {format_bytes(cost.temporary)} temporary; '
    f'{cost.flop / 1e9:,.2f} GFLOP in products, at least {cost.seconds * 1e3:.3g} ms; '
    f'XLA, loops once: {flops / 1e9:,.2f} GFLOP, {format_bytes(accessed)} accessed'
  )


if __name__ == '__main__':
  launch(main)
