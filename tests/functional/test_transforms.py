"""`attend` under JAX transformations: each must return what the plain call returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from tests.functional.alignment_cases import ALIGNMENT_CASES, CORE_PAIRS
from tests.functional.cases import SCORES_BY_NAME, S, T
from tests.functional.helpers import AttentionInputs, assert_same, attend, is_continuous, lookup_rows, make_problem
from tests.sampled_cases import sample_cases

BATCH = 8
MASK = aj.padding_mask(jnp.arange(BATCH), S)[:, None]
CLOSE = {'rtol': 1e-5, 'atol': 1e-6}

# A half of the pairs with continuous weights, and an eighth of all rows; `make test-all` tests all of them.
CONTINUOUS_PAIRS = [pair for pair in CORE_PAIRS if is_continuous(pair[1])]
half_of_the_continuous_pairs = pytest.mark.parametrize(('score', 'alignment'), sample_cases(CONTINUOUS_PAIRS, 2))
sampled_rows = pytest.mark.parametrize(('score', 'alignment'), sample_cases(CORE_PAIRS, 8))
RECURRENT = [name for name, row in aj.SCORES.items() if row.is_recurrent]
SCANNED = [(score, 'softmax') for score in RECURRENT] + [('coverage', case.name) for case in ALIGNMENT_CASES]


@sampled_rows
def test_transformations_do_not_change_the_result(score, alignment):
  problem = make_problem(score, alignment, batch=(BATCH,))
  arrays = (problem.query, problem.key, problem.value, MASK)

  def run(query, key, value, mask):
    return attend(score, alignment, AttentionInputs(problem.params, query, key, value), mask)

  traces = []

  @jax.jit
  def plain(*arrays):
    traces.append(1)
    return run(*arrays)

  expected = plain(*arrays)
  plain(*(x + 0 if x.dtype != bool else ~x for x in arrays))
  assert len(traces) == 1, 'the second call was compiled again'

  scanned = jax.jit(lambda *arrays: jax.lax.scan(lambda _, x: ((), run(*x)), (), arrays)[1])
  mesh = jax.make_mesh((BATCH,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P('data'), out_specs=P('data')))
  exported = export.export(plain)(*arrays).call
  for transformed in (jax.jit(jax.vmap(run)), scanned, sharded, exported):
    assert_same(transformed(*arrays), expected, **CLOSE)


@pytest.mark.long
@pytest.mark.parametrize(('score', 'alignment'), sample_cases(SCANNED, 4))
def test_scanning_equals_stepping(score, alignment):
  score = SCORES_BY_NAME[score].name
  problem = make_problem(score, alignment)
  mask = aj.padding_mask(5, S)
  memory = aj.remember(problem.key, problem.value, mask, params=problem.params)
  step = jax.jit(lambda carry, query: aj.attend_step(score, alignment, problem.params, carry, query, memory))

  carry = aj.init_carry(score, alignment, S)
  results = []
  for query in problem.query:
    carry, attended = step(carry, query)
    results.append(attended)
  expected = jax.jit(lambda problem: attend(score, alignment, problem, mask))(problem)
  assert_same(jax.tree.map(lambda *x: np.stack(x), *results), expected, **CLOSE)
  np.testing.assert_array_equal(carry.previous, results[-1].weights)
  np.testing.assert_allclose(carry.coverage, expected.weights.sum(0), **CLOSE)
  assert carry.step == T


@pytest.mark.long
@half_of_the_continuous_pairs
def test_only_recurrent_pairs_depend_on_earlier_queries(score, alignment):
  problem = make_problem(score, alignment)
  last_weights = jax.jit(lambda query: attend(score, alignment, problem._replace(query=query)).weights[-1])
  inputs = {name for row in lookup_rows(score, alignment) for name in row.required_inputs}
  depends_on_earlier = not inputs.isdisjoint({'previous', 'coverage', 'state'})
  changed_query = problem.query.at[0].multiply(-3.0)
  has_changed = np.any(last_weights(problem.query) != last_weights(changed_query))
  assert has_changed == depends_on_earlier
