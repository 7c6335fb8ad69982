"""Attention by itself: every implementation beside the plain formula and PyTorch, and how time grows with length."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from experiments.benchmarks import peers
from experiments.benchmarks.limits import machine_limits
from experiments.benchmarks.measure import BenchmarkContext, Side, Timing, compare, fit_exponent, jit_side

# case: score, whether the mask is causal, batch, heads, T, S, features
CASES = {
  'additive, B=1 T=S=512 F=256': ('additive', False, 1, 1, 512, 512, 256),
  'additive, B=32 T=S=64 F=256': ('additive', False, 32, 1, 64, 64, 256),
  'location_sensitive, B=1 T=S=512 F=256': ('location_sensitive', False, 1, 1, 512, 512, 256),
  'coverage, B=1 T=S=512 F=256': ('coverage', False, 1, 1, 512, 512, 256),
  'scaled_dot, B=1 N=8 T=S=2048 D=64': ('scaled_dot', False, 1, 8, 2048, 2048, 64),
  'scaled_dot, causal, B=1 N=8 T=S=2048 D=64': ('scaled_dot', True, 1, 8, 2048, 2048, 64),
}
FEATURES = 64
GROWN = (('additive', 'factored'), ('additive', 'pallas_additive'), ('scaled_dot', 'flash'), ('scaled_dot', 'cudnn'))
# What bounds a score: the row of limits.machine_limits, and how often each pair of a query and a key needs it, forward, and
# forward and backward, for every feature: a tanh (or what does its work), and products of matrices.
BOUNDS = {
  'additive': ('tanh', 1, 3),
  'coverage': ('tanh', 1, 2),
  'location_sensitive': ('tanh', 1, 2),
  'scaled_dot': ('matrix product', 4, 14),
}
# what grows: its sizes, and from one of them batch, heads, T, S
GROWTH = {
  'T=S': ([2**power for power in range(6, 14)], lambda size: (1, 1, size, size)),
  'B': ([1, 2, 4, 8, 16, 32], lambda size: (size, 1, 512, 512)),
  'N': ([1, 2, 4, 8, 16], lambda size: (1, size, 512, 512)),
}
# candidate of kernels.auto: score, alignment, features, (batch, T = S) from small to large
CROSSING = {
  'factored': ('additive', 'softmax', 256, ((128, 8), (128, 14), (64, 32))),
  'flash': ('scaled_dot', 'softmax', 64, ((16, 128), (8, 256), (8, 512), (8, 1024))),
  'window': ('general', 'local_m(width=10)', 256, ((16, 128), (8, 256), (8, 512), (4, 1024))),
  'chunked': ('coverage', 'softmax', 256, ((128, 8), (128, 14), (64, 32), (8, 128))),
}
SOFTMAX = aj.ALIGNMENTS['softmax']


def problem(dtype: str, score: str, batch: int, heads: int, queries: int, size: int, features: int):
  """Parameters without projections, and query, key and value [B, N, T or S, F] of this type."""
  rng = np.random.default_rng(0)
  draw = lambda steps: jnp.asarray(rng.normal(size=(batch, heads, steps, features)), dtype)
  params = aj.init_params(jax.random.key(0), score=score, query=features, key=features, features=features)
  params = {'score': {name: jnp.asarray(rng.normal(size=p.shape), p.dtype) / 16 for name, p in params['score'].items()}}
  return params, draw(queries), draw(size), draw(size)


def forward(score: str, implementation: str, causal: bool = False, alignment: str = 'softmax'):
  def run(params, query, key, value):
    mask = aj.causal_mask(query.shape[-2]) if causal else None
    options = {'score': score, 'alignment': alignment, 'params': params, 'implementation': implementation}
    return aj.attend(query, key, value, mask, **options, return_weights=False).context

  return run


def backward(score: str, implementation: str, causal: bool = False, alignment: str = 'softmax'):
  run = forward(score, implementation, causal, alignment)
  return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(run(*given))), argnums=(0, 1, 2, 3))


def unsupported_reason(bench: BenchmarkContext, score: str, implementation: str) -> str:
  """Why this cannot be measured here; '' if it can."""
  try:
    jax.eval_shape(backward(score, implementation), *problem(bench.dtype, score, 1, 1, 16, 16, FEATURES))
  except aj.UserError as error:
    return str(error)
  return ''


def kernels(bench: BenchmarkContext) -> Iterator[Timing]:
  rates = {t.case: t.rate for t in machine_limits(bench)}
  for case, (score, causal, *sizes) in CASES.items():
    implementations = [
      name for name, way in aj.IMPLEMENTATIONS.items() if not way.unsupported_reason(aj.SCORES[score], SOFTMAX)
    ]
    given = problem(bench.dtype, score, *sizes)
    arrays = [np.asarray(x) for x in given[1:]]
    theirs = peers.attention(bench.log, score, causal, *arrays, given[0]['score']) if bench.is_torch_comparable else {}
    for name, way, theirs_way in (('forward', forward, 'forward'), ('forward and backward', backward, 'backward')):
      bench.log(f'{case}: {name}')
      sides = {}
      for implementation in implementations:
        if reason := unsupported_reason(bench, score, implementation):  # cudnn computes in bfloat16 alone
          bench.log(f'left out: {reason}')
        else:
          what = f'{case}, {name} by {implementation}'
          sides |= _tried(bench, what, implementation, way(score, implementation, causal), given)
      sides |= {side: runs[theirs_way] for side, runs in theirs.items()}
      some = compare('kernels', f'{case}, {name}', sides, repeats=bench.repeats)
      yield from some
      yield _limit(some[0], rates, score, causal, sizes, way is backward)


def _tried(bench: BenchmarkContext, what: str, name: str, fn: Callable, given) -> dict[str, Side]:
  """{name: the side}, or {} where it cannot be compiled or run, which the bench is told."""
  try:
    side = jit_side(fn, *given)
    side.run()
  except Exception as error:
    bench.report_failure(what, error)
    return {}
  return {name: side}


def _limit(first: Timing, rates: dict[str, float], score: str, causal: bool, sizes: list[int], both: bool) -> Timing:
  """What a score's arithmetic alone would take at the rate of this machine; a causal mask leaves half of the pairs."""
  what, *times = BOUNDS[score]
  amount = times[both] * np.prod(sizes, dtype=float) / (2 if causal else 1)
  alone = amount / rates[what]
  return dataclasses.replace(
    first, side=f'limit: {what}', low=alone, median=alone, high=alone, speed=first.median / alone, memory=None
  )


def crossing(bench: BenchmarkContext) -> Iterator[Timing]:
  """From which size on each candidate of 'auto' is faster than the definition, forward and backward."""
  for name, (score, alignment, features, sizes) in CROSSING.items():
    for batch, size in sizes:
      bench.log(f'{name} beside the definition, T = S = {size}')
      given = problem(bench.dtype, score, batch, 1, size, size, features)
      way = lambda implementation: jit_side(backward(score, implementation, alignment=alignment), *given)  # noqa: B023
      sides = {'xla': way('xla'), name: way(name)}
      case = f'{score}, {alignment}, B={batch} T=S={size} F={features}'
      yield from compare('crossing', case, sides, repeats=bench.repeats)


def growth(bench: BenchmarkContext) -> Iterator[Timing]:
  """Forward and backward as one size after the other grows, see GROWTH, with the exponent of the last four."""
  for score, implementation in GROWN:
    if reason := unsupported_reason(bench, score, implementation):
      bench.log(f'growth of {score} by {implementation} is left out: {reason}')
      continue
    for what, (sizes, shape) in GROWTH.items():
      found = []
      for size in sizes:
        bench.log(f'growth of {score} by {implementation}: {what} = {size}')
        given = problem(bench.dtype, score, *shape(size), FEATURES)
        case = f'{score} {what}={size}'
        of = f'growth of {case} by {implementation}'
        side = _tried(bench, of, implementation, backward(score, implementation), given)
        if not side:  # nor will anything larger run
          break
        found += compare('growth', case, side, repeats=max(2, bench.repeats // 2))
      if len(found) < 4:
        yield from found
        continue
      last = [t.median for t in found[-4:]], [t.memory for t in found[-4:]]
      time, memory = (fit_exponent(sizes[: len(found)][-4:], of) for of in last)
      note = f'with {what}, time grows to the power {time:.2f}, memory {memory:.2f}, of the last four'
      bench.log(f'{score} by {implementation}: {note}')
      yield from (*found[:-1], dataclasses.replace(found[-1], note=note))
