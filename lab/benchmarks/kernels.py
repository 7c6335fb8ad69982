"""Attention by itself: every implementation beside the definition and PyTorch, and how time grows with size."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from lab.benchmarks import peers
from lab.benchmarks.limits import machine_limits
from lab.benchmarks.measure import (
  BenchmarkContext,
  Side,
  Timing,
  compare,
  fit_exponent,
  jit_side,
)

# case -> score, whether the mask is causal, batch, heads, T, S, features
CASES = {
  'additive, B=1 T=S=512 F=256': ('additive', False, 1, 1, 512, 512, 256),
  'additive, B=32 T=S=64 F=256': ('additive', False, 32, 1, 64, 64, 256),
  'location_sensitive, B=1 T=S=512 F=256': ('location_sensitive', False, 1, 1, 512, 512, 256),
  'coverage, B=1 T=S=512 F=256': ('coverage', False, 1, 1, 512, 512, 256),
  'scaled_dot, B=1 N=8 T=S=2048 D=64': ('scaled_dot', False, 1, 8, 2048, 2048, 64),
  'scaled_dot, causal, B=1 N=8 T=S=2048 D=64': ('scaled_dot', True, 1, 8, 2048, 2048, 64),
}
FEATURES = 64
GROWTH_PAIRS = (
  ('additive', 'factored'),
  ('additive', 'pallas_additive'),
  ('scaled_dot', 'flash'),
  ('scaled_dot', 'cudnn'),
  ('scaled_dot', 'splash'),
)


class Bound(NamedTuple):
  """The operation that bounds the speed of a score.

  Attributes:
    operation: a case of limits.machine_limits.
    forward: its units, such as FLOP, for each (query, key, feature) in the forward pass.
    forward_and_backward: the same in both passes together.
  """

  operation: str
  forward: int
  forward_and_backward: int


BOUNDS = {
  'additive': Bound('tanh', 1, 3),
  'coverage': Bound('tanh', 1, 2),
  'location_sensitive': Bound('tanh', 1, 2),
  'scaled_dot': Bound('matrix product', 4, 14),
}
# axis that grows -> its sizes, and a function from a size to batch, heads, T, S
GROWTH = {
  'T=S': ([2**power for power in range(6, 14)], lambda size: (1, 1, size, size)),
  'B': ([1, 2, 4, 8, 16, 32], lambda size: (size, 1, 512, 512)),
  'N': ([1, 2, 4, 8, 16], lambda size: (1, size, 512, 512)),
}
FITTED_POINTS = 4  # number of largest sizes to which the exponent of the growth is fitted
# score, alignment, features, implementations that 'auto' may select, (batch, T = S) in increasing order of T
CROSSING = (
  ('additive', 'softmax', 256, ('factored', 'pallas_additive'), ((128, 8), (128, 14), (64, 32), (8, 128), (1, 512))),
  ('scaled_dot', 'softmax', 64, ('flash', 'cudnn'), ((64, 32), (32, 64), (16, 128), (8, 256), (8, 512), (8, 1024))),
  ('scaled_dot', 'sink_softmax', 64, ('flash',), ((16, 128), (8, 256), (8, 512), (8, 1024))),
  ('scaled_dot', 'scalable_softmax', 64, ('flash',), ((16, 128), (8, 256), (8, 512), (8, 1024))),
  ('scaled_dot', 'capped_softmax', 64, ('flash',), ((16, 128), (8, 256), (8, 512), (8, 1024))),
  ('elu_dot', 'proportional', 64, ('linear',), ((64, 32), (32, 64), (16, 128), (8, 256), (8, 512), (8, 1024))),
  ('general', 'local_m(width=10)', 256, ('window',), ((16, 128), (8, 256), (8, 512), (4, 1024))),
  ('coverage', 'softmax', 256, ('chunked',), ((128, 8), (128, 14), (64, 32), (8, 128))),
)
ACCELERATOR_BATCHES = 16  # on an accelerator batches of CROSSING are this many times as large
SOFTMAX = aj.ALIGNMENTS['softmax']


def make_inputs(
  dtype: str,
  score: str,
  batch: int,
  heads: int,
  queries: int,
  size: int,
  features: int,
  alignment: str = 'softmax',
):
  """Returns parameters without projections, and query, key and value [B, N, T or S, F] of this dtype.

  Args:
    dtype: 'float32' or 'bfloat16'.
    score: a key of SCORES.
    batch: B.
    heads: N.
    queries: T.
    size: S.
    features: F.
    alignment: a spec of ALIGNMENTS; its parameters have their initial values, those of the score are random.
  """
  rng = np.random.default_rng(0)
  widths = {'query': features, 'key': features, 'value': features, 'features': features}
  params = aj.init_params(jax.random.key(0), score=score, alignment=alignment, **widths)
  params.pop('query', None)
  params.pop('key', None)
  params['score'] = {name: jnp.asarray(rng.normal(size=p.shape), p.dtype) / 16 for name, p in params['score'].items()}
  query, key, value = (
    jnp.asarray(rng.normal(size=(batch, heads, steps, features)), dtype) for steps in (queries, size, size)
  )
  return params, query, key, value


def attention(score: str, alignment: str, implementation: str) -> Callable:
  """Returns aj.attend without weights.

  Args:
    score: a key of SCORES.
    alignment: a spec of ALIGNMENTS.
    implementation: a key of IMPLEMENTATIONS.
  """
  return functools.partial(
    aj.attend, score=score, alignment=alignment, implementation=implementation, return_weights=False
  )


def forward(score: str, implementation: str, causal: bool = False, alignment: str = 'softmax') -> Callable:
  """Returns (params, query, key, value) -> context.

  Args:
    score: a key of SCORES.
    implementation: a key of IMPLEMENTATIONS.
    causal: whether the mask is causal; otherwise nothing is masked.
    alignment: a spec of ALIGNMENTS.
  """

  attend = attention(score, alignment, implementation)

  def context(params, query, key, value):
    mask = aj.Mask.causal() if causal else None
    return attend(query, key, value, mask, params=params).context

  return context


def forward_and_backward(score: str, implementation: str, causal: bool = False, alignment: str = 'softmax') -> Callable:
  """Returns (params, query, key, value) -> Σ sin(context), and its gradients with respect to all four.

  Arguments: see `forward`.
  """
  context = forward(score, implementation, causal, alignment)
  return jax.value_and_grad(lambda *inputs: jnp.sum(jnp.sin(context(*inputs))), argnums=(0, 1, 2, 3))


PASSES = {'forward': forward, 'forward and backward': forward_and_backward}


def unsupported_reason(
  bench: BenchmarkContext,
  score: str,
  implementation: str,
  alignment: str = 'softmax',
  mask: aj.Mask | None = None,
  sizes: tuple[int, ...] = (1, 1, 16, 16, FEATURES),
) -> str:
  """Returns why this machine cannot measure an implementation; '' if it can.

  Args:
    bench: settings, of which the dtype is read.
    score: a key of SCORES.
    implementation: a key of IMPLEMENTATIONS.
    alignment: a spec of ALIGNMENTS.
    mask: a mask for `sizes`.
    sizes: B, N, T, S and F.
  """
  try:
    params, *inputs = make_inputs(bench.dtype, score, *sizes, alignment)
    attend = attention(score, alignment, implementation)
    jax.eval_shape(lambda params, *inputs: attend(*inputs, mask, params=params), params, *inputs)
  except aj.UserError as error:
    return str(error)
  return ''


def kernels(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times every implementation of CASES, forward, and forward and backward."""
  rates = {timing.case: timing.rate for timing in machine_limits(bench)}
  bench.log('compiling kernels')
  compiled = bench.compile_sides(_makers(bench))
  for case, (score, causal, *sizes) in CASES.items():
    inputs = make_inputs(bench.dtype, score, *sizes)
    log = bench.log if bench.torch_compile else None
    torch_sides = peers.attention(log, score, causal, *inputs[1:], inputs[0]['score'])
    for name in PASSES:
      bench.log(f'{case}: {name}')
      sides = {key[-1]: side for key, side in compiled.items() if key[:2] == (case, name)}
      sides |= {side: passes[name] for side, passes in torch_sides.items()}
      timings = compare('kernels', f'{case}, {name}', sides, repeats=bench.repeats)
      yield from timings
      if timings:
        yield _limit(timings[0], rates, score, causal, sizes, name != 'forward')


def _makers(bench: BenchmarkContext) -> dict[tuple[str, str, str], Callable[[], Side]]:
  """Returns (case, pass, implementation) -> a function that makes the side."""
  makers = {}
  for case, (score, causal, *sizes) in CASES.items():
    inputs = make_inputs(bench.dtype, score, *sizes)
    for implementation in _implementations(bench, score):
      for name, make_fn in PASSES.items():
        makers[case, name, implementation] = functools.partial(
          jit_side, make_fn(score, implementation, causal), *inputs
        )
  return makers


def _implementations(bench: BenchmarkContext, score: str) -> list[str]:
  """Returns the implementations of a score with softmax that this machine supports in the dtype of `bench`."""
  return [
    name
    for name, implementation in aj.IMPLEMENTATIONS.items()
    if not implementation.unsupported_reason(aj.SCORES[score], SOFTMAX) and not unsupported_reason(bench, score, name)
  ]


def _limit(
  first: Timing,
  rates: Mapping[str, float],
  score: str,
  causal: bool,
  sizes: Sequence[int],
  includes_backward: bool,
) -> Timing:
  """Returns the time that the bounding operation of a score alone would take at the rate of this machine.

  Args:
    first: the timing of the first side of the case.
    rates: operations per second, by name.
    score: a key of BOUNDS.
    causal: whether the mask is causal, which leaves half of the pairs.
    sizes: batch, heads, T, S, features.
    includes_backward: whether the case includes the backward pass.
  """
  bound = BOUNDS[score]
  per_entry = bound.forward_and_backward if includes_backward else bound.forward
  amount = per_entry * np.prod(sizes, dtype=float) / (2 if causal else 1)
  seconds = amount / rates[bound.operation]
  return dataclasses.replace(
    first,
    side=f'limit: {bound.operation}',
    low=seconds,
    median=seconds,
    high=seconds,
    speed=first.median / seconds,
    memory=None,
  )


def crossing(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times each implementation of CROSSING beside the definition, to find the size from which it is faster.

  Timings include the backward pass.
  """
  bench.log('compiling candidates')
  compiled = bench.compile_sides(crossing_makers(bench))
  for case in dict.fromkeys(case for case, _ in compiled):
    bench.log(case)
    sides = {name: side for (side_case, name), side in compiled.items() if side_case == case}
    yield from compare('crossing', case, sides, repeats=bench.repeats)


def crossing_makers(bench: BenchmarkContext) -> dict[tuple[str, str], Callable[[], Side]]:
  """Returns (case, implementation) -> a function that makes the side of CROSSING."""
  factor = 1 if jax.default_backend() == 'cpu' else ACCELERATOR_BATCHES
  makers = {}
  for score, alignment, features, candidates, sizes in CROSSING:
    supported = [name for name in candidates if not unsupported_reason(bench, score, name, alignment)]
    for batch, size in sizes:
      inputs = make_inputs(bench.dtype, score, batch * factor, 1, size, size, features, alignment)
      case = f'{score}, {alignment}, B={batch * factor} T=S={size} F={features}'
      for name in ('xla', *supported):
        fn = forward_and_backward(score, name, alignment=alignment)
        makers[case, name] = functools.partial(jit_side, fn, *inputs)
  return makers


def growth(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times forward and backward while one axis after the other grows, see GROWTH."""
  for score, implementation in GROWTH_PAIRS:
    if reason := unsupported_reason(bench, score, implementation):
      bench.log(f'growth of {score} by {implementation} is left out: {reason}')
      continue
    for axis in GROWTH:
      yield from _growth_along(bench, score, implementation, axis)


def _growth_along(bench: BenchmarkContext, score: str, implementation: str, axis: str) -> list[Timing]:
  """Returns timings up to the largest size that runs.

  The note of the last has the exponent of the growth if there are at least FITTED_POINTS timings.
  """
  sizes, shape = GROWTH[axis]
  timings = []
  for size in sizes:
    bench.log(f'growth of {score} by {implementation}: {axis} = {size}')
    inputs = make_inputs(bench.dtype, score, *shape(size), FEATURES)
    case = f'{score} {axis}={size}'
    maker = functools.partial(jit_side, forward_and_backward(score, implementation), *inputs)
    compiled = bench.compile_sides({('growth', case, implementation): maker})
    if not compiled:  # larger sizes would fail too
      break
    sides = {key[-1]: side for key, side in compiled.items()}
    timings += compare('growth', case, sides, repeats=max(2, bench.repeats // 2))
  if len(timings) < FITTED_POINTS:
    return timings
  fitted = timings[-FITTED_POINTS:]
  fitted_sizes = sizes[: len(timings)][-FITTED_POINTS:]
  time_exponent = fit_exponent(fitted_sizes, [timing.median for timing in fitted])
  note = f'with {axis}, time grows to the power {time_exponent:.2f}'
  if all(timing.memory for timing in fitted):  # None is unknown; 0 has no logarithm
    note += f', memory {fit_exponent(fitted_sizes, [timing.memory for timing in fitted]):.2f}'
  note += f', fitted to the last {FITTED_POINTS}'
  bench.log(f'{score} by {implementation}: {note}')
  return [*timings[:-1], dataclasses.replace(timings[-1], note=note)]
