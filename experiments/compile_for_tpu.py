"""python -m experiments.compile_for_tpu [--topology=v5e:2x2] [--config=configs/wmt14.py:transformer2017_base]

Compiles ahead of time for a TPU that is not attached (pip install libtpu, see requirements-bench.txt): the Pallas
kernels, forward and backward; with --config, the update of every bucket. The batch is sharded over all devices of the
topology. This finds what the TPU compiler rejects, and reports the memory of an update. Nothing runs, so no speed
is measured.
"""

from experiments.large_pages import restart_with_large_pages

if __name__ == '__main__':
  restart_with_large_pages()  # before jax is imported

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from attention_jax.errors import UserError
from experiments.config_files import load_config
from experiments.launch import FLAGS, launch

flags.DEFINE_string('topology', 'v5e:2x2', 'topology of the TPU: v5e:16x16, v5p:8x8x16, ...')
flags.DEFINE_string('config', None, 'FILE:PRESET: compile the updates of a config instead of the kernels')
flags.DEFINE_integer('entries', 32000, 'for --config: size of both vocabularies; no data are read', lower_bound=5)
flags.DEFINE_string('score', 'normed_additive', 'an additive score')
flags.DEFINE_multi_integer('lengths', [512, 4096], 'lengths of queries and memory', lower_bound=1)
flags.DEFINE_integer('features', 256, 'features of query, key and value', lower_bound=1)
flags.DEFINE_float('dropout', 0.0, 'dropout on weights', lower_bound=0.0)
flags.DEFINE_integer('batch', 8, 'number of sequences', lower_bound=1)


def main() -> None:
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # there is no metadata server of a cloud TPU to query
  devices = _topology_devices(FLAGS.topology)
  if FLAGS.config:
    _compile_updates(devices)
  else:
    _compile_kernels(devices)


def _compile_updates(devices: Sequence[Any]) -> None:
  """Compiles the update of every bucket of --config."""
  from attention_jax.systems.ahead_of_time import compile_updates
  from attention_jax.training.partition import make_mesh

  start = time.monotonic()
  config = load_config(FLAGS.config).to_dict()
  for shape, compiled, parameters in compile_updates(config, FLAGS.entries, make_mesh(devices), 'tpu'):
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes / 2**30
    temporary = memory.temp_size_in_bytes / 2**30
    flop = compiled.cost_analysis()['flops'] * len(devices)
    print(
      f'{shape[0]} x ({shape[1]}, {shape[2]}) tokens, {parameters / 1e6:.1f} M parameters: compiled in '
      f'{time.monotonic() - start:.0f} s for {_describe_devices(devices)}; per device {arguments:.2f} GiB of arguments '
      f'and {temporary:.2f} GiB of temporary memory; {flop / 1e12:.2f} TFLOP in total',
      flush=True,
    )
    start = time.monotonic()


def _compile_kernels(devices: Sequence[Any]) -> None:
  """Compiles attention by pallas_additive, forward and backward, for every length and dtype."""
  import jax
  import jax.numpy as jnp

  import attention_jax as aj
  from attention_jax.training.partition import check_rows, make_mesh, sharding

  mesh = make_mesh(devices)
  check_rows(FLAGS.batch, mesh)
  replicated = sharding(mesh, 'state')
  sharded = sharding(mesh, 'batch')
  size = FLAGS.features
  params = jax.eval_shape(
    lambda: aj.init_params(jax.random.key(0), score=FLAGS.score, query=size, key=size, features=size)
  )
  functions = _attention_functions()
  for length in FLAGS.lengths:
    for dtype in (jnp.float32, jnp.bfloat16):

      def place_param(x, dtype=dtype):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=replicated)

      sequence = jax.ShapeDtypeStruct((FLAGS.batch, length, size), dtype, sharding=sharded)
      mask = jax.ShapeDtypeStruct((FLAGS.batch, 1, length), jnp.bool_, sharding=sharded)
      arguments = (jax.tree.map(place_param, params), sequence, sequence, sequence, mask)
      for name, fn in functions.items():
        start = time.monotonic()
        _compile_on_mesh(mesh, fn, arguments)
        seconds = time.monotonic() - start
        case = f'{name}, T = S = {length}, {jnp.dtype(dtype)}'
        print(f'{case}: compiled in {seconds:.0f} s for {_describe_devices(devices)}', flush=True)


def _attention_functions() -> dict[str, Callable]:
  """Returns attention by pallas_additive and its gradient, functions of (params, query, key, value, mask)."""
  import jax
  import jax.numpy as jnp

  import attention_jax as aj

  alignment = aj.with_dropout(aj.ALIGNMENTS['softmax'], FLAGS.dropout)

  def context(params, query, key, value, mask):
    return aj.attend(
      query,
      key,
      value,
      mask,
      score=FLAGS.score,
      alignment=alignment,
      params=params,
      rng=jax.random.key(0),
      deterministic=False,
      implementation='pallas_additive',
      return_weights=False,
    ).context

  def total(*arguments):
    return context(*arguments).astype(jnp.float32).sum()

  return {'forward': context, 'backward': jax.grad(total, argnums=(0, 1, 2, 3))}


def _compile_on_mesh(mesh: Any, fn: Callable, arguments: tuple) -> None:
  from attention_jax.kernels.target import compile_for
  from attention_jax.training.partition import jit_on_mesh

  with compile_for('tpu'):
    jit_on_mesh(mesh, fn).trace(*arguments).lower(lowering_platforms=('tpu',)).compile()


def _topology_devices(topology: str) -> Sequence[Any]:
  """Returns the devices of a topology. Raises UserError if libtpu is missing or does not support the topology."""
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
  except Exception as error:
    raise UserError(f'cannot describe the TPU {topology!r} (pip install libtpu; v5e:2x2 is one): {error}') from error


def _describe_devices(devices: Sequence[Any]) -> str:
  return f'{len(devices)} x {devices[0].device_kind}'


if __name__ == '__main__':
  launch(main)
