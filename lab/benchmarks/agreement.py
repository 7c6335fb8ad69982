"""Differences between every implementation of attention on this device and its definition in full float32."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.errors import UserError
from lab.benchmarks.kernels import attention, make_inputs, unsupported_reason
from lab.benchmarks.measure import BenchmarkContext, Timing

# score and alignment of the comparisons
PAIRS = (
  ('additive', 'softmax'),
  ('location_sensitive', 'softmax'),
  ('coverage', 'softmax'),
  ('scaled_dot', 'softmax'),
  ('general', 'local_m(width=10)'),
)
SIZES = (3, 2, 37, 53, 24)  # B, N, T, S, F: no multiples of a kernel's tile
# Norm of the difference relative to the norm of the reference. On GPUs float32 products are computed in TF32 by
# default, with 11 significant bits; bfloat16 has 8.
TOLERANCES = {'float32': 2e-3, 'bfloat16': 2e-2}
REFERENCE = 'the definition in float32'


def kernel_agreement(bench: BenchmarkContext) -> list[Timing]:
  """Logs the largest relative difference of context and gradients, for every row of PAIRS, mask and implementation.

  Raises:
    UserError: after all comparisons, if a difference is not less than the tolerance.
  """
  masks = make_masks()
  jobs = {}
  for (score, alignment), mask in itertools.product(PAIRS, masks):
    jobs[score, alignment, mask, REFERENCE] = ('float32', score, alignment, 'xla', masks[mask], 'highest')
    for name in aj.IMPLEMENTATIONS:
      if not unsupported_reason(bench, score, name, alignment, masks[mask], SIZES):
        jobs[score, alignment, mask, name] = (bench.dtype, score, alignment, name, masks[mask], None)
  with ThreadPoolExecutor(bench.compile_threads or os.cpu_count()) as pool:  # most of the time is that of the compiler
    values = dict(zip(jobs, pool.map(lambda job: contexts_and_gradients(*job), jobs.values()), strict=True))
  failures = []
  for (*case, name), value in values.items():
    if name == REFERENCE:
      continue
    difference = relative_difference(value, values[*case, REFERENCE])
    line = f'{", ".join(case)}, by {name}: {difference:.1e}'
    bench.log(line)
    if not difference < TOLERANCES[bench.dtype]:
      failures.append(line)
  if failures:
    raise UserError(f'differs from the definition by more than {TOLERANCES[bench.dtype]}: {"; ".join(failures)}')
  return []


def make_masks() -> dict[str, aj.Mask]:
  """Returns masks of queries [B, N, T, F] by name: each part of a Mask, alone and with others."""
  batch, _, queries, size, _ = SIZES
  lengths = aj.Mask.lengths(jnp.asarray([size, size // 2, 0][:batch])[:, None])
  ids = jnp.arange(size) // 20
  array = jax.random.bernoulli(jax.random.key(0), 0.5, (batch, 1, queries, size))
  return {
    'lengths': lengths,
    'causal': aj.Mask.causal(),
    'causal lengths': aj.Mask.causal() & lengths,
    'window': aj.Mask.window(5, 0),
    'window on both sides': aj.Mask.window(5, 2),
    'sinks': aj.Mask.window(5, 0, sinks=2) & aj.Mask.causal(),
    'segments': aj.Mask.segments(ids[:queries], ids) & aj.Mask.causal(),
    'array': aj.Mask.array(array),
  }


def contexts_and_gradients(
  dtype: str, score: str, alignment: str, implementation: str, mask: aj.Mask, precision: str | None
) -> Any:
  """Returns the context and the gradients of params, query, key and value, as one program computes them.

  Args:
    dtype: dtype of query, key and value, 'float32' or 'bfloat16'; in both, their values are rounded to bfloat16.
      Parameters are float32.
    score: a key of SCORES.
    alignment: a spec of ALIGNMENTS.
    implementation: a key of IMPLEMENTATIONS.
    mask: one of `make_masks`.
    precision: of products, see jax.default_matmul_precision; None for the default of the device.
  """
  params, *arrays = make_inputs('bfloat16', score, *SIZES)
  inputs = (params, *(x.astype(dtype) for x in arrays))
  attend = attention(score, alignment, implementation)

  def loss(params, query, key, value):
    context = attend(query, key, value, mask, params=params).context
    return jnp.sum(jnp.sin(context.astype(jnp.float32))), context

  with jax.default_matmul_precision(precision):
    gradients, context = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*inputs)
  return context, gradients


def relative_difference(values: Any, reference: Any) -> float:
  """Returns the largest norm of a difference relative to that of the reference, over the arrays of a tree.

  Where the reference is an array of zeros, the norm of the difference is not divided.
  """
  largest = 0.0
  for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(reference), strict=True):
    x, y = (np.asarray(array, np.float64) for array in (x, y))
    norm = np.linalg.norm(y)
    largest = max(largest, float(np.linalg.norm(x - y) / norm) if norm else float(np.linalg.norm(x)))
  return largest
