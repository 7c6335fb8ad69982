"""Additive attention in Pallas, interpreted: the definition's numbers and gradients, and why it refuses the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from attention_jax.functional.table import lookup
from attention_jax.kernels import pallas_additive
from tests.functional.helpers import Problem, assert_same, attend, loss, make_problem

T, S = 19, 37  # no multiples of a tile; more than one block of queries, more than one span of keys
CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


@pytest.fixture
def interpreted():
  with pallas_additive.compile_for('interpret'):
    yield


def random(*shape):
  return np.random.default_rng(1).normal(size=shape)


def own_mask():
  """A mask for every query; query 3 of the first sequence may look nowhere."""
  return jnp.asarray(random(2, T, S) < 0.3).at[0, 3].set(False)


def padding():
  return aj.padding_mask(jnp.asarray([S, 5]), S)[:, None]


def bias():
  """Somewhere -inf, and everywhere for query 4."""
  return jnp.asarray(random(2, T, S), jnp.float32).at[0, 1, 2].set(-jnp.inf).at[1, 4].set(-jnp.inf)


def both(score, given, mask, bias=None, alignment='softmax', **options):
  """(loss, attended), gradients of the problem and the bias: of the definition and of the kernels."""

  def way(implementation):
    total = functools.partial(loss, score, alignment, implementation=implementation, **options)
    run = jax.value_and_grad(lambda given, bias: total(given, mask, bias=bias), argnums=(0, 1), has_aux=True)
    return jax.jit(run)(given, bias)

  return way('xla'), way('pallas_additive')


def computed(score, given, mask, **options):
  return jax.jit(lambda given: attend(score, 'softmax', given, mask, **options))(given)


@pytest.mark.parametrize(
  ('score', 'alignment', 'mask', 'bias'),
  [
    ('additive', 'softmax', None, None),
    ('normed_additive', 'softmax', padding(), None),
    ('concat', 'softmax', own_mask(), None),
    ('offset_additive', 'softmax(temperature=0.5)', padding(), bias()),
    ('concat', 'softmax', own_mask(), bias()),
  ],
)
def test_it_equals_the_definition(interpreted, score, alignment, mask, bias):
  definition, ours = both(score, make_problem(score, alignment, (2,), T, S), mask, bias, alignment)
  assert_same(ours, definition, **CLOSE)


@pytest.mark.parametrize('weights', [True, False])
def test_it_drops_the_weights_that_the_definition_drops(interpreted, weights):
  row = aj.with_dropout(lookup('softmax(temperature=0.5)', aj.ALIGNMENTS, 'alignment'), 0.4)
  given, options = make_problem('additive', 'softmax', (2,), T, S), {'rng': jax.random.key(5), 'deterministic': False}
  definition, ours = both('additive', given, own_mask(), bias(), row, **options, return_weights=weights)
  assert_same(ours, definition, **CLOSE)
  if weights:
    assert 0.2 < np.mean(ours[0][1].weights[1, :2, :5] == 0) < 0.95
  still = both('additive', given, padding(), None, row, deterministic=True)
  assert_same(still[1], both('additive', given, padding(), None, 'softmax(temperature=0.5)')[1])


def test_batch_and_heads_and_contexts_alone(interpreted):
  given = make_problem('normed_additive', 'softmax', (2, 3), T, S)
  ways = [
    computed('normed_additive', given, padding()[:, None], implementation=name, return_weights=weights)
    for name, weights in (('xla', True), ('pallas_additive', False))
  ]
  assert ways[1].weights is None
  np.testing.assert_allclose(ways[1].context, ways[0].context, **CLOSE)


def test_who_may_look_nowhere_gets_nothing(interpreted):
  given = make_problem('additive', 'softmax', (2,), T, S)
  (_, attended), slopes = both('additive', given, jnp.zeros((2, 1, S), bool))[1]
  assert not any(np.any(x) for x in jax.tree.leaves((attended, slopes)))


def test_what_stands_behind_the_mask_does_not_matter(interpreted):
  given = make_problem('additive', 'softmax', (2,), T, S)
  spoilt = given._replace(key=given.key.at[1, 5:].set(jnp.nan), value=given.value.at[1, 5:].set(jnp.inf))
  assert_same(both('additive', spoilt, padding())[1], both('additive', given, padding())[1])


def test_what_is_seen_and_is_no_number_shows(interpreted):
  given = make_problem('additive', 'softmax', (2,), T, S)
  given = given._replace(key=given.key.at[1, 2, 0].set(jnp.nan))
  ways = [computed('additive', given, padding(), implementation=name) for name in ('xla', 'pallas_additive')]
  assert jnp.isnan(ways[0].context[1]).all() and not jnp.isnan(ways[0].context[0]).any()
  np.testing.assert_allclose(ways[1].context, ways[0].context, **CLOSE)
  np.testing.assert_array_equal(jnp.isnan(ways[1].weights).any(-1), jnp.isnan(ways[0].weights).any(-1))


def test_bfloat16_comes_out_as_it_went_in_and_is_float32_inside(interpreted):
  given = make_problem('normed_additive', 'softmax', (2,), T, S, dtype=jnp.bfloat16)
  # Projected beforehand: from here on nothing is rounded.
  query, key = given.query @ given.params['query'], given.key @ given.params['key']
  given = given._replace(params={'score': given.params['score']}, query=query, key=key)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), given)
  ours = computed('normed_additive', given, padding(), implementation='pallas_additive')
  wanted = computed('normed_additive', exact, padding())
  assert (ours.context.dtype, ours.weights.dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(ours.weights, wanted.weights, atol=0.02)
  np.testing.assert_allclose(ours.context.astype(jnp.float32), wanted.context, atol=0.05)


@pytest.mark.parametrize(('steps', 'size'), [(1, 1), (0, 3)])
def test_one_query_and_one_position_and_none(interpreted, steps, size):
  definition, ours = both('additive', make_problem('additive', 'softmax', (2,), steps, size), None)
  assert_same(ours, definition, **CLOSE)


@pytest.mark.parametrize('size', [-1e9, 8e7])
def test_scores_that_are_all_large(interpreted, size):
  """Beside them a sum of exponentials cannot be told; -1e9 is what queries of padding see by a bias."""
  large = jnp.zeros((2, T, S)).at[:, 2].set(size).at[0].set(size)
  definition, ours = both('additive', make_problem('additive', 'softmax', (2,), T, S), None, large)
  assert_same(ours, definition, **CLOSE)
  np.testing.assert_allclose(ours[0][1].weights.sum(-1), 1, rtol=1e-5)


def test_float64_is_not_rounded_but_refused(interpreted):
  with jax.enable_x64(True), pytest.raises(aj.UserError, match='float32'):
    given = make_problem('additive', 'softmax', (), 2, 3, dtype=jnp.float64)
    attend('additive', 'softmax', given, implementation='pallas_additive')


def refusal(score, alignment='softmax'):
  rows = lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')
  return pallas_additive.unsupported_reason(*rows)


def test_it_says_what_it_cannot_compute(interpreted):
  assert 'tanh' in refusal('scaled_dot')
  for alignment in ('sigmoid', 'sparsemax', 'hard', 'coverage_penalised'):
    assert refusal('additive', alignment) == 'the alignment is not softmax'
  for alignment in ('softmax', 'softmax(temperature=2.0)', aj.alignments.softmax):
    assert not refusal('additive', alignment)


def test_a_machine_without_accelerator_is_told_so():
  needs = 'needs a GPU or a TPU, this machine has cpu' if jax.default_backend() == 'cpu' else ''
  assert refusal('additive') == needs


@pytest.mark.parametrize(('target', 'platform', 'call'), [('gpu', 'cuda', 'triton'), ('tpu', 'tpu', 'tpu_custom_call')])
def test_the_kernels_are_lowered_for_accelerators_from_here(target, platform, call):
  """Also on a mesh, whose axes the interpreter of kernels does not know."""
  params, *arrays = make_problem('additive', 'softmax', (2,), T, S)

  def slopes(params, *arrays):
    total = lambda params: loss('additive', 'softmax', Problem(params, *arrays), implementation='pallas_additive')[0]
    return jax.grad(total)(params)

  mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.shard_map(slopes, mesh=mesh, in_specs=(P(), P('data'), P('data'), P('data')), out_specs=P())
  with pallas_additive.compile_for(target):
    made = jax.jit(sharded).trace(params, *arrays).lower(lowering_platforms=(platform,)).as_text()
  kernels = [line for line in made.splitlines() if 'custom_call' in line and call in line]
  assert len(kernels) == 4  # contexts, weights, sums over keys, sums over queries
