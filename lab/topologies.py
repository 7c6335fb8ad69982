"""TPU topologies that are not attached, for programs that compile ahead of time."""

import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from attention_jax.errors import UserError


def define_topology_flag() -> None:
  """Defines --topology."""
  flags.DEFINE_string('topology', 'v5e:2x2', 'topology of the TPU: v5e:1x1, v5e:16x16, v5p:8x8x16, ...')


def define_vocabulary_size_flag() -> None:
  """Defines --vocabulary_size."""
  flags.DEFINE_integer(
    'vocabulary_size',
    None,
    'size of both vocabularies of a translation config, without reading its data',
    lower_bound=5,
  )


def topology_devices(topology: str) -> Sequence[Any]:
  """Returns the devices of a topology. Raises UserError if libtpu is missing or does not support the topology."""
  from jax.experimental import topologies

  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # there is no metadata server of a cloud TPU to query
  is_one_chip = set(topology.partition(':')[2].split('x')) == {'1'}
  options = {'chips_per_host_bounds': (1, 1, 1)} if is_one_chip else {}  # by default, a host has several
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=topology, **options).devices
  except Exception as error:
    expected = 'expected libtpu (pip install libtpu) and a topology such as v5e:2x2'
    raise UserError(f'cannot describe the TPU {topology!r}; {expected}: {error}') from error


def describe_devices(devices: Sequence[Any]) -> str:
  """Returns the number and the kind of devices: '4 x TPU v5 lite'."""
  return f'{len(devices)} x {devices[0].device_kind}'
