"""Attention by itself: every implementation beside the plain formula and PyTorch, and how time grows with length."""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from experiments.benchmarks import peers
from experiments.benchmarks.measure import Timing, compare, exponent, jitted

# case: score, whether the mask is causal, batch, heads, T, S, features
CASES = {
  'additive, B=1 T=S=512 F=256': ('additive', False, 1, 1, 512, 512, 256),
  'additive, B=32 T=S=64 F=256': ('additive', False, 32, 1, 64, 64, 256),
  'scaled_dot, B=1 N=8 T=S=2048 D=64': ('scaled_dot', False, 1, 8, 2048, 2048, 64),
  'scaled_dot, causal, B=1 N=8 T=S=2048 D=64': ('scaled_dot', True, 1, 8, 2048, 2048, 64),
}
LONGEST = 8192
# candidate of kernels.auto: score, alignment, features, (batch, T = S) from small to large
CROSSING = {
  'factored': ('additive', 'softmax', 256, ((128, 8), (128, 14), (64, 32))),
  'flash': ('scaled_dot', 'softmax', 64, ((16, 128), (8, 256), (8, 512), (8, 1024))),
  'window': ('general', 'local_m(width=10)', 256, ((64, 32), (32, 64), (16, 128), (8, 256))),
}
SOFTMAX = aj.ALIGNMENTS['softmax']


def problem(score: str, batch: int, heads: int, queries: int, size: int, features: int):
  """Parameters without projections, and query, key and value [B, N, T or S, F]."""
  rng = np.random.default_rng(0)
  draw = lambda steps: jnp.asarray(rng.normal(size=(batch, heads, steps, features)), jnp.float32)
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


def kernels(say, repeats: int) -> list[Timing]:
  timings = []
  for case, (score, causal, *sizes) in CASES.items():
    implementations = [name for name, way in aj.IMPLEMENTATIONS.items() if not way.refuse(aj.SCORES[score], SOFTMAX)]
    given = problem(score, *sizes)
    theirs = peers.attention(say, score, causal, *(np.asarray(x) for x in given[1:]), given[0]['score'])
    for name, way, theirs_way in (('forward', forward, 'forward'), ('forward and backward', backward, 'backward')):
      say(f'{case}: {name}')
      sides = {}
      for implementation in implementations:
        try:
          sides[implementation] = jitted(way(score, implementation, causal), *given)
        except aj.UserError as error:  # cudnn computes in bfloat16 alone
          say(f'left out: {error}')
      sides |= {side: runs[theirs_way] for side, runs in theirs.items()}
      timings += compare('kernels', f'{case}, {name}', sides, repeats=repeats)
  return timings


def crossing(say, repeats: int) -> list[Timing]:
  """From which size on each candidate of 'auto' is faster than the definition, forward and backward."""
  timings = []
  for name, (score, alignment, features, sizes) in CROSSING.items():
    for batch, size in sizes:
      say(f'{name} beside the definition, T = S = {size}')
      given = problem(score, batch, 1, size, size, features)
      way = lambda implementation: jitted(backward(score, implementation, alignment=alignment), *given)  # noqa: B023
      sides = {'xla': way('xla'), name: way(name)}
      timings += compare('crossing', f'{score}, {alignment}, B={batch} T=S={size} F={features}', sides, repeats=repeats)
  return timings


def growth(say, repeats: int) -> list[Timing]:
  """Forward and backward of one sequence with T = S = 64 ... LONGEST."""
  timings = []
  for score, implementation, features in (('additive', 'factored', 64), ('scaled_dot', 'flash', 64)):
    sizes, seconds = [], []
    for power in range(6, LONGEST.bit_length()):
      size = 2**power
      say(f'growth of {score} by {implementation}: T = S = {size}')
      given = problem(score, 1, 1, size, size, features)
      side = jitted(backward(score, implementation), *given)
      timings += compare('growth', f'{score} T=S={size}', {implementation: side}, repeats=max(2, repeats // 2))
      sizes.append(size)
      seconds.append(timings[-1].median)
    say(f'{score} by {implementation}: time grows with the length to the power {exponent(sizes[3:], seconds[3:]):.2f}')
  return timings
