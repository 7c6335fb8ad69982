"""python -m experiments.compile_for_tpu [--topology=v5e:2x2]

Compiles the Pallas kernels, forward and backward, for a TPU that need not be here (pip install libtpu, see
requirements-bench.txt), which finds what the TPU's compiler would refuse. Nothing is run, so nothing is said of speed.
"""

import os
import time

from absl import flags

from attention_jax.errors import UserError
from experiments.launch import FLAGS, launch

flags.DEFINE_string('topology', 'v5e:2x2', 'of the TPU: v5e:16x16, v5p:8x8x16, ...')
flags.DEFINE_string('score', 'normed_additive', 'an additive score')
flags.DEFINE_multi_integer('lengths', [512, 4096], 'of queries and memory', lower_bound=1)
flags.DEFINE_integer('features', 256, 'of query, key and value', lower_bound=1)
flags.DEFINE_integer('batch', 8, 'sequences', lower_bound=1)


def main() -> None:
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # there is no cloud machine to ask
  import jax
  import jax.numpy as jnp

  import attention_jax as aj
  from attention_jax.kernels import pallas_additive

  device = _device(FLAGS.topology)
  on_device = jax.sharding.SingleDeviceSharding(device)
  size = FLAGS.features
  shapes = jax.eval_shape(
    lambda: aj.init_params(jax.random.key(0), score=FLAGS.score, query=size, key=size, features=size)
  )

  def context(params, query, key, value, mask):
    options = {'score': FLAGS.score, 'params': params, 'implementation': 'pallas_additive', 'return_weights': False}
    return aj.attend(query, key, value, mask, **options).context

  total = lambda *given: context(*given).astype(jnp.float32).sum()
  ways = {'forward': context, 'backward': jax.grad(total, argnums=(0, 1, 2, 3))}
  for length in FLAGS.lengths:
    for dtype in (jnp.float32, jnp.bfloat16):
      place = lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=on_device)
      row = place(jnp.broadcast_to(0.0, (FLAGS.batch, length, size)))
      mask = jax.ShapeDtypeStruct((FLAGS.batch, 1, length), jnp.bool_, sharding=on_device)
      for name, way in ways.items():
        began = time.monotonic()
        with pallas_additive.target('tpu'):
          traced = jax.jit(way).trace(jax.tree.map(place, shapes), row, row, row, mask)
          traced.lower(lowering_platforms=('tpu',)).compile()
        what = f'{name}, T = S = {length}, {jnp.dtype(dtype)}'
        print(f'{what}: compiled in {time.monotonic() - began:.0f} s for {device.device_kind}', flush=True)


def _device(topology: str):
  """The first device of a TPU that is only described. Raises: UserError where libtpu is missing or knows no such."""
  from jax.experimental import topologies

  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices[0]
  except Exception as error:
    raise UserError(f'cannot describe the TPU {topology!r} (pip install libtpu; v5e:2x2 is one): {error}') from error


if __name__ == '__main__':
  launch(main)
