"""Every implementation beside 'xla' computes what 'xla' does, in value and gradient, or says why it cannot."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import Pointwise, TanhSum, lookup
from attention_jax.kernels import auto, chunked
from tests.functional.alignment_cases import PAIRS
from tests.functional.cases import S, T
from tests.functional.helpers import assert_same, attend, loss, make_problem

CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


def accepting(score, alignment):
  """The implementations beside 'xla' that compute this pair."""
  rows = lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')
  return [name for name, made in aj.IMPLEMENTATIONS.items() if name != 'xla' and not made.unsupported_reason(*rows)]


# Every score under every implementation, and alignments of each kind with a sum of tanh that 'factored' takes: over all
# scores, by their threshold, in a window, one query after the other. `make test-all` sweeps the rest of the product.
KINDS = (
  'softmax',
  'sigmoid',
  'sparsemax',
  'entmax',
  'coverage_penalised',
  'local_m(width=2)',
  'local_p(width=2)',
  'monotonic',
  'mocha(width=2)',
  'addressing',
)
EVERY_SCORE, EVERY_ALIGNMENT = (list(dict.fromkeys(names)) for names in zip(*PAIRS, strict=True))
TANH_SUMS = [score for score in EVERY_SCORE if isinstance(lookup(score, aj.SCORES, 'score').form, TanhSum)]
OFTEN = {*zip(itertools.cycle(TANH_SUMS), KINDS, strict=False)}
OFTEN |= {(score, EVERY_ALIGNMENT[0]) for score in EVERY_SCORE if score not in TANH_SUMS}
SHARING = ('additive', 'scaled_dot')  # scores whose masks are looked at in each of the ways that they may be given
SWEPT = [pair if pair in OFTEN else pytest.param(*pair, marks=pytest.mark.product) for pair in PAIRS]
REFUSED = [(n, *pair) for n in aj.IMPLEMENTATIONS for pair in PAIRS if n != 'xla' and n not in accepting(*pair)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr(chunked, 'BLOCK', 2 * S)
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': dict.fromkeys(auto.CANDIDATES, 0)})


@pytest.mark.parametrize(('score', 'alignment'), SWEPT)
def test_it_equals_xla(score, alignment):
  given, rng = make_problem(score, alignment, batch=(2,)), np.random.default_rng(1)
  shared = jnp.stack([jnp.ones((2, 1, S), bool), aj.padding_mask(jnp.asarray([S, 3]), S)[:, None]])
  own = jnp.asarray(rng.random((2, 2, T, S)) < 0.5).at[0, 0, 1].set(False)  # one query may look nowhere
  bias = jnp.asarray(rng.normal(size=(2, 2, T, S)), jnp.float32).at[1, 0, 1, 2].set(-jnp.inf)

  several_kinds = score in SHARING or 'window' in accepting(score, alignment)
  # 'auto' is one of the others.
  names = [name for name in accepting(score, alignment) if name != 'auto' or several_kinds]

  @jax.jit
  def every(given):
    ways = {}
    for implementation in ('xla', *names):

      def run(mask, bias, chosen=implementation):
        way = lambda given: loss(score, alignment, given, mask, bias=bias, implementation=chosen)
        return jax.value_and_grad(way, has_aux=True)(given)

      ways[implementation] = jax.vmap(run)(own, bias)
      if several_kinds:
        ways[implementation] = ways[implementation], jax.vmap(run, in_axes=(0, None))(shared, None)
    return ways

  ways = every(given)
  for way in ways.values():
    assert_same(way, ways['xla'], **CLOSE)


@pytest.mark.parametrize(('name', 'score', 'alignment'), REFUSED[:: len(REFUSED) // 12])
def test_what_it_cannot_compute_it_refuses(name, score, alignment):
  with pytest.raises(aj.UserError, match=f"implementation '{name}' cannot compute this: "):
    attend(score, alignment, make_problem(score, alignment), implementation=name)


@pytest.mark.parametrize('alignment', ['local_m(width=2)', 'local_p(width=2)'])
def test_the_window_reads_its_window_and_nothing_else(alignment):
  seen = []

  def counted(query, key):
    seen.append(key.shape[0])
    return key @ query

  row = aj.Row(counted, form=Pointwise())
  draw = lambda *shape: jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
  params = aj.init_params(jax.random.key(0), score=row, alignment=alignment, query=5, key=5, features=3)
  given = draw(T, 5), draw(500, 5), draw(500, 2)
  options = {'score': row, 'alignment': alignment, 'params': params}
  attended = aj.attend(*given, **options, implementation='window')
  assert seen == [5]
  assert_same(attended, aj.attend(*given, **options), **CLOSE)


@pytest.mark.parametrize('size', [1, 2, 5])
def test_a_memory_shorter_than_the_window(size):
  given = make_problem('dot', 'local_p(width=4)', size=size)
  ways = [attend('dot', 'local_p(width=4)', given, implementation=name) for name in ('xla', 'window')]
  assert_same(*ways, **CLOSE)


def test_auto_chooses_by_pair_and_size(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100}})
  rows = lambda score, alignment: (lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment'))
  of = lambda score, alignment, scores: auto.choose_implementation(*rows(score, alignment), scores)
  assert [of('additive', 'softmax', n) for n in (99, 100)] == ['xla', 'factored']
  assert [of('additive', 'local_m', n) for n in (99, 149, 150)] == ['xla', 'factored', 'window']
  assert of('dot', 'softmax', 10**6) == 'xla'
  assert auto.describe_choice(*rows('additive', 'softmax')) == 'xla, from T S = 100 on factored'
  assert auto.describe_choice(*rows('location', 'hard')) == 'xla'
  # Where nothing is faster, and [T, S, F] of all queries would be too much.
  assert auto.describe_choice(*rows('location_sensitive', 'softmax')) == f'xla, from T S = {2**7} on chunked'
  monkeypatch.setattr(auto, 'MIN_SCORES', {'gpu': {'factored': 0}})  # nothing was measured on a CPU
  assert of('additive', 'softmax', 10**6) == 'xla' and of('additive', 'softmax', 2**20) == 'chunked'


def test_auto_runs_what_it_chooses(monkeypatch):
  given, seen = make_problem('additive', 'softmax'), []
  monkeypatch.setattr(auto.factored, 'attend', lambda *args, **options: seen.append(1) or aj.Attended(0.0, None))
  attend('additive', 'softmax', given, implementation='auto')
  assert seen


@pytest.mark.parametrize(('name', 'kind'), [('flash', 'softmax'), ('window', 'local_m(width=2)')])
def test_another_function_at_test_time_is_not_ignored(name, kind):
  row = lookup(kind, aj.ALIGNMENTS, 'alignment')
  assert not aj.IMPLEMENTATIONS[name].unsupported_reason(aj.SCORES['dot'], row)
  assert aj.IMPLEMENTATIONS[name].unsupported_reason(
    aj.SCORES['dot'], row._replace(at_test=aj.ALIGNMENTS['hardmax'].fn)
  )


WAYS = [
  ('xla', 'dot', 'monotonic'),
  ('chunked', 'dot', 'sparsemax'),
  ('factored', 'additive', 'softmax'),
  ('flash', 'scaled_dot', 'softmax'),
  ('window', 'dot', 'local_m(width=2)'),
]


@pytest.mark.parametrize(('name', 'score', 'alignment'), WAYS)
def test_a_mask_and_a_bias_that_all_sequences_share(name, score, alignment):
  given, rng = make_problem(score, alignment, batch=(2, 3)), np.random.default_rng(1)
  mask = jnp.asarray(rng.random((2, 3, T, S)) < 0.6).at[0, 0, 1].set(False)
  bias = jnp.asarray(rng.normal(size=(2, 3, T, S)), jnp.float32).at[0, 0, 1, 2].set(-jnp.inf)

  @jax.jit
  def run(mask, bias):
    way = lambda given, bias: loss(score, alignment, given, mask, bias=bias, implementation=name)
    return jax.value_and_grad(way, argnums=(0, 1), has_aux=True)(given, bias)

  for some in (np.s_[:1, :1], np.s_[0], np.s_[:, :1], np.s_[0, 0]):
    found, (to_given, to_bias) = run(mask[some], bias[some])
    whole, back = jax.vjp(lambda bias: jnp.broadcast_to(bias, (2, 3, T, S)), bias[some])
    wanted, (to_given_whole, to_whole) = run(jnp.broadcast_to(mask[some], (2, 3, T, S)), whole)
    assert_same((found, to_given, to_bias), (wanted, to_given_whole, *back(to_whole)), **CLOSE)


@pytest.mark.parametrize(('name', 'score', 'alignment'), WAYS)
def test_no_queries_at_all(name, score, alignment):
  given = make_problem(score, alignment, batch=(2,), queries=0)
  (total, attended), slopes = jax.value_and_grad(
    lambda given: loss(score, alignment, given, implementation=name), has_aux=True
  )(given)
  assert total == 0 and attended.weights.shape == (2, 0, S) and attended.context.shape[:2] == (2, 0)
  assert not any(jnp.any(x) for x in jax.tree.leaves(slopes))


def test_chunks_hold_a_part_of_what_a_score_makes_of_queries_keys_and_features():
  wide = 128
  sizes = {'query': wide, 'key': wide, 'features': wide}
  params = jax.eval_shape(lambda: aj.init_params(jax.random.key(0), score='additive', **sizes))
  x = jax.ShapeDtypeStruct((512, wide), jnp.float32)

  def memory(implementation):
    total = lambda p, x: aj.attend(
      x, x, x, score='additive', alignment='sparsemax', params=p, implementation=implementation, return_weights=False
    ).context.sum()
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  of_all = 4 * 512 * 512 * wide
  assert memory('xla') > of_all > 1.5 * memory('chunked')
