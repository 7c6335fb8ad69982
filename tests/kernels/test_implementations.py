"""Every implementation beside 'xla' computes what 'xla' does, in value and gradient, or says why it cannot."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import lookup
from attention_jax.kernels import chunked
from tests.functional.alignment_cases import PAIRS
from tests.functional.cases import S, T
from tests.functional.problems import assert_same, attend, loss, problem
from tests.modules.quick import quick_jit

CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


def accepts(name, score, alignment):
  rows = lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')
  return not aj.IMPLEMENTATIONS[name].refuse(*rows)


# Every row under every implementation; the rest of the product is swept by `make test-all`.
TANH_SUMS = itertools.cycle(name for name, row in aj.SCORES.items() if row.tanh_sum)
OFTEN = {*zip(TANH_SUMS, aj.ALIGNMENTS, strict=False), *((score, 'softmax') for score in aj.SCORES)}
OTHERS = [(name, *pair) for name in aj.IMPLEMENTATIONS if name != 'xla' for pair in PAIRS]
ACCEPTED = [
  case if case[0] == 'window' or case[1:] in OFTEN else pytest.param(*case, marks=pytest.mark.product)
  for case in OTHERS
  if accepts(*case)
]
REFUSED = [case for case in OTHERS if not accepts(*case)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr(chunked, 'BLOCK', 2 * S)


@pytest.mark.parametrize(('name', 'score', 'alignment'), ACCEPTED)
def test_it_equals_xla(name, score, alignment):
  given, rng = problem(score, alignment, batch=(2,)), np.random.default_rng(1)
  shared = jnp.stack([jnp.ones((2, 1, S), bool), aj.padding_mask(jnp.asarray([S, 3]), S)[:, None]])
  own = jnp.asarray(rng.random((2, 2, T, S)) < 0.5).at[0, 0, 1].set(False)  # one query may look nowhere
  bias = jnp.asarray(rng.normal(size=(2, 2, T, S)), jnp.float32).at[1, 0, 1, 2].set(-jnp.inf)

  @quick_jit
  def both(given):
    ways = {}
    for implementation in ('xla', name):

      def run(mask, bias, chosen=implementation):
        way = lambda given: loss(score, alignment, given, mask, bias=bias, implementation=chosen)
        return jax.value_and_grad(way, has_aux=True)(given)

      ways[implementation] = jax.vmap(run, in_axes=(0, None))(shared, None), jax.vmap(run)(own, bias)
    return ways

  ways = both(given)
  assert_same(ways[name], ways['xla'], **CLOSE)


@pytest.mark.parametrize(('name', 'score', 'alignment'), REFUSED[:: len(REFUSED) // 12])
def test_what_it_cannot_compute_it_refuses(name, score, alignment):
  with pytest.raises(aj.UserError, match=f"implementation '{name}' cannot compute this: "):
    attend(score, alignment, problem(score, alignment), implementation=name)


@pytest.mark.parametrize('alignment', ['local_m(width=2)', 'local_p(width=2)'])
def test_the_window_reads_its_window_and_nothing_else(alignment):
  seen = []

  def counted(query, key):
    seen.append(key.shape[0])
    return key @ query

  row = aj.Row(counted, pointwise=True)
  draw = lambda *shape: jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
  params = aj.init_params(jax.random.key(0), score=row, alignment=alignment, query=5, key=5, features=3)
  given = draw(T, 5), draw(500, 5), draw(500, 2)
  options = {'score': row, 'alignment': alignment, 'params': params}
  attended = aj.attend(*given, **options, implementation='window')
  assert seen == [5]
  assert_same(attended, aj.attend(*given, **options), **CLOSE)


@pytest.mark.parametrize('size', [1, 2, 5])
def test_a_memory_shorter_than_the_window(size):
  given = problem('dot', 'local_p(width=4)', size=size)
  ways = [attend('dot', 'local_p(width=4)', given, implementation=name) for name in ('xla', 'window')]
  assert_same(*ways, **CLOSE)
