"""Attention compiled ahead of time for a TPU that is not attached: memory of the program, and a bound of its time.

Nothing runs: a time is a bound, that of the bytes or of the matrix products of the blocks that an implementation
visits, forward and backward, at the published rates of the chip, as kernels.estimates has them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import attention_jax as aj
from attention_jax.functional.attend import Problem
from attention_jax.functional.table import lookup
from attention_jax.kernels import estimates
from attention_jax.kernels.auto import choose_implementation
from attention_jax.kernels.target import compile_for
from lab.benchmarks.measure import BenchmarkContext, Timing
from lab.topologies import topology_devices

HEADS, WIDTH = 8, 128
SEQUENCES = {512: 4, 4096: 4, 32768: 1}  # T = S -> B
WINDOW = 1024
SCORES = ('scaled_dot', 'additive')
# mask of self-attention or of a memory -> the Mask, from ids of segments [B, 1, T] and lengths [B, 1]
MASKS: Mapping[str, Callable[[Any, Any], aj.Mask]] = {
  'causal': lambda ids, lengths: aj.Mask.causal(),
  f'window {WINDOW}': lambda ids, lengths: aj.Mask.window(WINDOW, 0),
  'segments': lambda ids, lengths: aj.Mask.segments(ids) & aj.Mask.causal(),
  'lengths (cross)': lambda ids, lengths: aj.Mask.lengths(lengths),
}


def ahead_of_time(bench: BenchmarkContext) -> Iterator[Timing]:
  """Compiles the definition and the choice of 'auto' for one chip of `bench.topology`, in bfloat16."""
  device = topology_devices(bench.topology)[0]
  chip = estimates.CHIPS[device.device_kind]
  for score in SCORES:
    for length, batch in SEQUENCES.items():
      for mask in MASKS:
        case = f'{score}, {mask}, B={batch} N={HEADS} T=S={length}'
        bench.log(f'ahead of time: {case}')
        yield from _compile_case(case, score, MASKS[mask], (batch, HEADS, length, WIDTH), device, chip)


def _compile_case(
  case: str, score: str, make_mask: Callable, shape: tuple[int, ...], device: Any, chip: estimates.Chip
) -> Iterator[Timing]:
  place = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
  x = place(shape, jnp.bfloat16)
  batch, _, length, _ = shape
  arrays = place((batch, 1, length), jnp.int32), place((batch, 1), jnp.int32)
  params = jax.eval_shape(
    lambda: aj.init_params(jax.random.key(0), score=score, query=WIDTH, key=WIDTH, features=WIDTH)
  )
  params = {'score': jax.tree.map(lambda leaf: place(leaf.shape, jnp.bfloat16), params.get('score', {}))}
  rows = lookup(score, aj.SCORES, 'score'), lookup('softmax', aj.ALIGNMENTS, 'alignment')

  def problem(x, ids, lengths):
    return Problem(*rows, {}, x, aj.Memory(x, x, make_mask(ids, lengths)), return_weights=False)

  chosen = []

  def describe(*arrays):
    chosen.extend((choose_implementation(problem(*arrays)), estimates.sizes_of(problem(*arrays))))

  with compile_for('tpu'):
    jax.eval_shape(describe, x, *arrays)
  auto, sizes = chosen
  bounds = {name: estimates.COSTS[name](sizes) for name in dict.fromkeys(('xla', auto))}
  for name, cost in bounds.items():

    def attend(params, query, key, value, ids, lengths, name=name):
      mask = make_mask(ids, lengths)
      options = {'score': score, 'params': params, 'implementation': name, 'return_weights': False}
      return aj.attend(query, key, value, mask, **options).context

    def total(*arguments, attend=attend):
      return attend(*arguments).astype(jnp.float32).sum()

    forward, backward = (
      _temporary_bytes(fn, params, x, x, x, *arrays) for fn in (attend, jax.grad(total, argnums=(0, 1, 2, 3)))
    )
    seconds = max(cost.flop / chip.flops, cost.traffic / chip.bandwidth)
    speed = bounds['xla'].seconds(chip) / cost.seconds(chip)
    note = f'bound, not measured: {cost.traffic / 1e9:.2f} GB, {cost.flop / 1e12:.2f} TFLOP; forward alone '
    note += 'does not fit' if forward is None else f'{forward / 1e6:.0f} MB'
    note += '; with gradients it does not fit' if backward is None else ''
    side = f'{name}, by auto' if name == auto else name
    yield Timing('aot', case, side, seconds, seconds, seconds, speed, memory=backward, note=note)


def _temporary_bytes(fn: Callable, *arguments: Any) -> int | None:
  """The temporary bytes of the program of `fn`; None if it does not fit."""
  with compile_for('tpu'):
    lowered = jax.jit(fn).trace(*arguments).lower(lowering_platforms=('tpu',))
  try:
    return lowered.compile().memory_analysis().temp_size_in_bytes
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return None
