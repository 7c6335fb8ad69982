"""python -m experiments.compile_for_tpu [--topology=v5e:2x2] [--config=configs/wmt14.py:transformer2017_base]

Compiles for a TPU that need not be here (pip install libtpu, see requirements-bench.txt): the Pallas kernels, forward
and backward; or, of a config, the update of every bucket. Rows are divided over all devices of the topology. That finds
what the TPU's compiler would refuse and says what memory an update takes. Nothing is run, so nothing is said of speed.
"""

import os
import time

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, launch, load_config

flags.DEFINE_string('topology', 'v5e:2x2', 'of the TPU: v5e:16x16, v5p:8x8x16, ...')
flags.DEFINE_string('config', None, 'FILE:PRESET: compile its updates instead of the kernels')
flags.DEFINE_integer('entries', 32000, 'of --config: of both vocabularies; the data are not looked at', lower_bound=5)
flags.DEFINE_string('score', 'normed_additive', 'an additive score')
flags.DEFINE_multi_integer('lengths', [512, 4096], 'of queries and memory', lower_bound=1)
flags.DEFINE_integer('features', 256, 'of query, key and value', lower_bound=1)
flags.DEFINE_float('dropout', 0.0, 'on weights', lower_bound=0.0)
flags.DEFINE_integer('batch', 8, 'sequences', lower_bound=1)


def main() -> None:
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # there is no cloud machine to ask
  compile_all = _updates if FLAGS.config else _kernels
  compile_all(_devices(FLAGS.topology))


def _updates(devices) -> None:
  from attention_jax.systems.ahead_of_time import compile_updates
  from attention_jax.training.partition import make_mesh

  began, config = time.monotonic(), load_config(FLAGS.config).to_dict()
  for shape, compiled, parameters in compile_updates(config, FLAGS.entries, make_mesh(devices), 'tpu'):
    memory = compiled.memory_analysis()
    held, temporary = (size / 2**30 for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes))
    flop = compiled.cost_analysis()['flops'] * len(devices)
    print(
      f'{shape[0]} x ({shape[1]}, {shape[2]}) tokens, {parameters / 1e6:.1f} M parameters: compiled in '
      f'{time.monotonic() - began:.0f} s for {len(devices)} x {devices[0].device_kind}; each holds {held:.2f} GiB and '
      f'takes {temporary:.2f} GiB besides; {flop / 1e12:.2f} TFLOP in all',
      flush=True,
    )
    began = time.monotonic()


def _kernels(devices) -> None:
  import jax
  import jax.numpy as jnp

  import attention_jax as aj
  from attention_jax.kernels import pallas_additive
  from attention_jax.training.partition import check_rows, jit_on_mesh, make_mesh, sharding

  mesh, size = make_mesh(devices), FLAGS.features
  check_rows(FLAGS.batch, mesh)
  everywhere, divided = (sharding(mesh, rule) for rule in ('state', 'batch'))
  shapes = jax.eval_shape(
    lambda: aj.init_params(jax.random.key(0), score=FLAGS.score, query=size, key=size, features=size)
  )

  alignment = aj.with_dropout(aj.ALIGNMENTS['softmax'], FLAGS.dropout)

  def context(params, query, key, value, mask):
    options = {'score': FLAGS.score, 'params': params, 'implementation': 'pallas_additive', 'return_weights': False}
    options |= {'alignment': alignment, 'rng': jax.random.key(0), 'deterministic': False}
    return aj.attend(query, key, value, mask, **options).context

  total = lambda *given: context(*given).astype(jnp.float32).sum()
  ways = {'forward': context, 'backward': jax.grad(total, argnums=(0, 1, 2, 3))}
  for length in FLAGS.lengths:
    for dtype in (jnp.float32, jnp.bfloat16):
      place = lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=everywhere)
      row = jax.ShapeDtypeStruct((FLAGS.batch, length, size), dtype, sharding=divided)
      mask = jax.ShapeDtypeStruct((FLAGS.batch, 1, length), jnp.bool_, sharding=divided)
      for name, way in ways.items():
        began = time.monotonic()
        with pallas_additive.compile_for('tpu'):
          traced = jit_on_mesh(mesh, way).trace(jax.tree.map(place, shapes), row, row, row, mask)
          traced.lower(lowering_platforms=('tpu',)).compile()
        what, for_whom = f'{name}, T = S = {length}, {jnp.dtype(dtype)}', f'{len(devices)} x {devices[0].device_kind}'
        print(f'{what}: compiled in {time.monotonic() - began:.0f} s for {for_whom}', flush=True)


def _devices(topology: str):
  """The devices of a TPU that is only described. Raises: UserError where libtpu is missing or knows no such."""
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
  except Exception as error:
    raise UserError(f'cannot describe the TPU {topology!r} (pip install libtpu; v5e:2x2 is one): {error}') from error


if __name__ == '__main__':
  launch(main)
