"""Compiles an implementation of attention, forward and backward, for a TPU that is not attached.

  python -m lab.compile_for_tpu --topology=v5e:2x2
  python -m lab.compile_for_tpu --topology=v5e:1x1 --implementation=splash --score=scaled_dot

Needs libtpu (pip install libtpu, see lab/requirements.txt). The batch is sharded over all devices of the topology.
This finds what the TPU compiler rejects, and the temporary memory. Nothing runs, so no speed is measured.
`compile_for_pod` compiles the updates of a config.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from experiments.launch import FLAGS, launch
from lab.topologies import define_topology_flag, describe_devices, topology_devices

define_topology_flag()
flags.DEFINE_string('implementation', 'pallas_additive', 'the implementation')
flags.DEFINE_string('score', 'normed_additive', 'a score that it supports')
flags.DEFINE_boolean('causal', False, 'causal self-attention')
flags.DEFINE_multi_integer('lengths', [512, 4096], 'lengths of queries and memory', lower_bound=1)
flags.DEFINE_integer('features', 256, 'features of query, key and value', lower_bound=1)
flags.DEFINE_float('dropout', 0.0, 'dropout on weights', lower_bound=0.0)
flags.DEFINE_integer('batch', 8, 'number of sequences', lower_bound=1)


def main() -> None:
  """Compiles the Pallas kernels for --topology."""
  _compile_kernels(topology_devices(FLAGS.topology))


def _compile_kernels(devices: Sequence[Any]) -> None:
  """Compiles attention, forward and backward, for every length and dtype."""
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
        memory = _compile_on_mesh(mesh, fn, arguments)
        seconds = time.monotonic() - start
        case = f'{name}, T = S = {length}, {jnp.dtype(dtype)}'
        compiled = f'compiled in {seconds:.0f} s for {describe_devices(devices)}'
        print(f'{case}: {compiled}, {memory / 2**20:.0f} MB temporary', flush=True)


def _attention_functions() -> dict[str, Callable]:
  """Returns attention and its gradient, functions of (params, query, key, value, mask)."""
  import jax
  import jax.numpy as jnp

  import attention_jax as aj

  alignment = aj.with_dropout(aj.ALIGNMENTS['softmax'], FLAGS.dropout)

  def context(params, query, key, value, mask):
    return aj.attend(
      query,
      key,
      value,
      aj.Mask.array(mask) & aj.Mask.causal() if FLAGS.causal else mask,
      score=FLAGS.score,
      alignment=alignment,
      params=params,
      rng=jax.random.key(0),
      deterministic=False,
      implementation=FLAGS.implementation,
      return_weights=False,
    ).context

  def total(*arguments):
    return context(*arguments).astype(jnp.float32).sum()

  return {'forward': context, 'backward': jax.grad(total, argnums=(0, 1, 2, 3))}


def _compile_on_mesh(mesh: Any, fn: Callable, arguments: tuple) -> int:
  """Returns the bytes of temporary memory of each device."""
  from attention_jax.kernels.target import compile_for
  from attention_jax.training.partition import jit_on_mesh

  with compile_for('tpu'):
    compiled = jit_on_mesh(mesh, fn).trace(*arguments).lower(lowering_platforms=('tpu',)).compile()
  return compiled.memory_analysis().temp_size_in_bytes


if __name__ == '__main__':
  launch(main)
