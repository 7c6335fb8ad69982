"""Implementation 'pallas_additive', interpreted: equals the definition in value and gradient, or raises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from attention_jax.functional import programs
from attention_jax.functional.table import lookup
from attention_jax.kernels import pallas_additive
from attention_jax.kernels.target import compile_for
from tests.functional.helpers import AttentionInputs, assert_same, attend, lookup_rows, loss, make_problem

T, S = 19, 37  # no multiples of a tile; more than one block of queries, more than one span of keys
CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


@pytest.fixture
def interpreted():
  with compile_for('interpret'):
    yield


def draw(*shape):
  return np.random.default_rng(1).normal(size=shape)


def query_mask():
  """A mask per query; all positions of query 3 of the first sequence are masked."""
  return jnp.asarray(draw(2, T, S) < 0.3).at[0, 3].set(False)


def padding():
  return aj.padding_mask(jnp.asarray([S, 5]), S)[:, None]


def infinite_bias():
  """A bias with one entry of -inf, and with only -inf for query 4 of the second sequence."""
  return jnp.asarray(draw(2, T, S), jnp.float32).at[0, 1, 2].set(-jnp.inf).at[1, 4].set(-jnp.inf)


@functools.cache
def compiled(implementation, score='additive', alignment='softmax', **options):
  """Returns a compiled function (problem, bias, mask) -> ((loss, attended), gradients of the problem and the bias)."""

  def total(problem, bias, mask):
    options_of_call = {'bias': bias, 'implementation': implementation, 'rng': jax.random.key(5)} | options
    return loss(score, alignment, problem, mask, **options_of_call)

  return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def assert_equals_definition(problem, mask=None, bias=None, **options):
  """Asserts that values and gradients are finite and equal those of the definition, and returns what is attended."""
  kernels, definition = (compiled(name, **options)(problem, bias, mask) for name in ('pallas_additive', 'xla'))
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(definition))
  assert_same(kernels, definition, **CLOSE)
  return kernels[0][1]


def run_softmax(score, problem, mask, alignment='softmax', **options):
  return jax.jit(lambda problem: attend(score, alignment, problem, mask, **options))(problem)


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment', 'mask', 'bias'),
  [
    ('additive', 'softmax', None, None),
    ('normed_additive', 'softmax', padding(), None),
    ('concat', 'softmax', query_mask(), None),
    ('offset_additive', 'softmax(temperature=0.5)', padding(), infinite_bias()),
    ('concat', 'softmax', query_mask(), infinite_bias()),
  ],
)
def test_equals_definition(interpreted, score, alignment, mask, bias):
  """With values wider than a tile."""
  problem = make_problem(score, alignment, (2,), T, S)
  problem = problem._replace(value=jnp.asarray(draw(2, S, 37), jnp.float32))
  assert_equals_definition(problem, mask, bias, score=score, alignment=alignment)


@pytest.mark.long
@pytest.mark.parametrize('return_weights', [True, False])
def test_drops_the_same_weights_as_the_definition(interpreted, return_weights):
  row = aj.with_dropout(lookup('softmax(temperature=0.5)', aj.ALIGNMENTS, 'alignment'), 0.4)
  problem = make_problem('additive', 'softmax', (2,), T, S)
  options = {'alignment': row, 'deterministic': False, 'return_weights': return_weights}
  attended = assert_equals_definition(problem, query_mask(), infinite_bias(), **options)
  if return_weights:
    assert 0.3 < np.mean(attended.weights[query_mask()] == 0) < 0.5  # dropout at a rate of 0.4
  at_test, without_dropout = (
    run_softmax('additive', problem, padding(), alignment=name, implementation='pallas_additive')
    for name in (row, 'softmax(temperature=0.5)')
  )
  assert_same(at_test, without_dropout)


def test_contexts_of_heads_without_weights_equal_the_definition(interpreted):
  problem = make_problem('normed_additive', 'softmax', (2, 3), T, S)
  run = functools.partial(run_softmax, 'normed_additive', problem, padding()[:, None])
  definition = run(implementation='xla')
  kernels = run(implementation='pallas_additive', return_weights=False)
  assert kernels.weights is None
  np.testing.assert_allclose(kernels.context, definition.context, **CLOSE)


def test_masked_content_changes_nothing(interpreted):
  problem = make_problem('additive', 'softmax', (2,), T, S)
  changed = problem._replace(key=problem.key.at[1, 5:].set(jnp.nan), value=problem.value.at[1, 5:].set(jnp.inf))
  assert_same(*(compiled('pallas_additive')(inputs, None, padding()) for inputs in (changed, problem)))


@pytest.mark.long
def test_unmasked_nan_propagates_as_in_the_definition(interpreted):
  problem = make_problem('additive', 'softmax', (2,), T, S)
  problem = problem._replace(key=problem.key.at[1, 2, 0].set(jnp.nan))
  definition, kernels = (
    run_softmax('additive', problem, padding(), implementation=name) for name in ('xla', 'pallas_additive')
  )
  assert jnp.isnan(definition.context[1]).all()
  assert not jnp.isnan(definition.context[0]).any()
  np.testing.assert_allclose(kernels.context, definition.context, **CLOSE)
  np.testing.assert_array_equal(jnp.isnan(kernels.weights).any(-1), jnp.isnan(definition.weights).any(-1))


@pytest.mark.long
def test_bfloat16_inputs_are_computed_in_float32(interpreted):
  problem = make_problem('normed_additive', 'softmax', (2,), T, S, dtype=jnp.bfloat16)
  # Projected here in bfloat16, so that both computations begin with the same projections.
  query = problem.query @ problem.params['query']
  key = problem.key @ problem.params['key']
  problem = problem._replace(params={'score': problem.params['score']}, query=query, key=key)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), problem)
  actual = run_softmax('normed_additive', problem, padding(), implementation='pallas_additive')
  expected = run_softmax('normed_additive', exact, padding())
  assert (actual.context.dtype, actual.weights.dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(actual.weights, expected.weights, **CLOSE)
  np.testing.assert_allclose(actual.context.astype(jnp.float32), expected.context, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(('steps', 'size'), [(1, 1), (0, 3)])
def test_equals_definition_for_one_query_and_for_none(interpreted, steps, size):
  assert_equals_definition(make_problem('additive', 'softmax', (2,), steps, size))


@pytest.mark.parametrize('size', [-1e9, 8e7])
def test_equals_definition_for_scores_that_are_all_large(interpreted, size):
  """In float32, adding the log of a sum of exponentials to these scores changes nothing. A bias of -1e9 is common."""
  bias = jnp.zeros((2, T, S)).at[:, 2].set(size).at[0].set(size)
  attended = assert_equals_definition(make_problem('additive', 'softmax', (2,), T, S), None, bias)
  np.testing.assert_allclose(attended.weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('size', [jnp.inf, 3e38, -3e38])
def test_a_bias_that_is_or_becomes_infinite_counts_as_the_nearest_finite_score(interpreted, size):
  """The temperature makes a finite bias infinite. Only a bias that is -inf itself is a mask."""
  bias = jnp.zeros((2, T, S)).at[0, 1, :2].set(size).at[1, 4].set(size)
  problem = make_problem('additive', 'softmax', (2,), T, S)
  assert_equals_definition(problem, padding(), bias, alignment='softmax(temperature=0.5)')


def unsupported_reason(score, alignment='softmax'):
  return pallas_additive.unsupported_reason(*lookup_rows(score, alignment))


def test_only_sums_of_tanh_with_softmax_in_float32_are_supported_on_accelerators(interpreted):
  with compile_for('cpu'):
    assert unsupported_reason('additive') == 'needs a GPU or a TPU, got platform cpu'
  assert 'tanh' in unsupported_reason('scaled_dot')
  for alignment in ('sigmoid', 'sparsemax', 'hard', 'coverage_penalised'):
    assert unsupported_reason('additive', alignment) == 'the alignment is not softmax or has an edit'
  for alignment in ('softmax', 'softmax(temperature=2.0)', aj.alignments.softmax):
    assert not unsupported_reason('additive', alignment)
  with jax.enable_x64(True), pytest.raises(aj.UserError, match='float32'):
    problem = make_problem('additive', 'softmax', (), 2, 3, dtype=jnp.float64)
    attend('additive', 'softmax', problem, implementation='pallas_additive')


@pytest.mark.long
@pytest.mark.parametrize(('target', 'platform', 'call'), [('gpu', 'cuda', 'triton'), ('tpu', 'tpu', 'tpu_custom_call')])
def test_kernels_are_lowered_for_absent_accelerators(target, platform, call):
  """Lowers within a jax.shard_map: the interpreter of Pallas does not support the axes of a mesh."""
  params, *arrays = make_problem('additive', 'softmax', (2,), T, S)

  def gradients(params, *arrays):
    def total(params):
      return loss('additive', 'softmax', AttentionInputs(params, *arrays), implementation='pallas_additive')[0]

    return jax.grad(total)(params)

  mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P('data'), P('data'), P('data')), out_specs=P())
  with compile_for(target):
    lowered = jax.jit(sharded).trace(params, *arrays).lower(lowering_platforms=(platform,)).as_text()
  kernels = [line for line in lowered.splitlines() if 'custom_call' in line and call in line]
  assert len(kernels) == 4  # contexts, exponentials, sums over keys, sums over queries


def array_sizes(jaxpr):
  """Sizes of all arrays that a program computes, those of inner programs included, but not of Pallas' kernels."""
  sizes = []
  for equation in jaxpr.eqns:
    sizes += [variable.aval.size for variable in equation.outvars]
    if equation.primitive.name != 'pallas_call':
      sizes += [size for inner in jaxprs_in_params(equation.params) for size in array_sizes(inner)]
  return sizes


# Blocks of four tiles of 16 queries, and of one tile.
@pytest.mark.long
@pytest.mark.parametrize('score_limit', [4 * 16 * S, 1])
def test_gradients_in_blocks_of_queries_equal_those_of_a_single_block(interpreted, monkeypatch, score_limit):
  """No array [T, S] is computed."""
  steps = 150
  problem = make_problem('additive', 'softmax', (), steps, S)
  mask = aj.padding_mask(jnp.asarray([30]), S)
  options = {'implementation': 'pallas_additive', 'return_weights': False}
  gradients = jax.grad(lambda problem: loss('additive', 'softmax', problem, mask, **options)[0])
  expected = jax.jit(lambda problem: gradients(problem))(problem)  # jit of `gradients` itself would cache its trace
  monkeypatch.setattr(pallas_additive, 'MAX_BLOCK_SCORES', score_limit)
  programs.forget_programs()
  assert max(array_sizes(jax.make_jaxpr(gradients)(problem).jaxpr)) < steps * S
  assert_same(jax.jit(lambda problem: gradients(problem))(problem), expected, **CLOSE)


@pytest.mark.long
def test_gradients_in_blocks_equal_the_definition_with_mask_bias_and_dropout_per_query(interpreted, monkeypatch):
  monkeypatch.setattr(pallas_additive, 'MAX_BLOCK_SCORES', 1)
  row = aj.with_dropout(lookup('softmax(temperature=0.5)', aj.ALIGNMENTS, 'alignment'), 0.4)
  compiled.cache_clear()  # the programs of earlier tests have larger blocks
  problem = make_problem('additive', 'softmax', (2,), T, S)
  assert_equals_definition(problem, query_mask(), infinite_bias(), alignment=row, deterministic=False)
  compiled.cache_clear()
