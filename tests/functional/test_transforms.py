"""attend under JAX's own transformations: each must give what the plain call gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from attention_jax.functional.attend import init_carry, project, zero_masked_memory
from attention_jax.functional.table import lookup
from tests.functional.alignment_cases import ALIGNMENT_CASES, CORE_PAIRS
from tests.functional.cases import SCORES_BY_NAME, S, T
from tests.functional.helpers import Problem, assert_same, attend, is_continuous, make_problem

BATCH = 8
MASK = aj.padding_mask(jnp.arange(BATCH), S)[:, None]
CLOSE = {'rtol': 1e-5, 'atol': 1e-6}

every_row = pytest.mark.parametrize(
  ('score', 'alignment'), CORE_PAIRS, ids=[f'{s}-{a}'.replace(' ', '') for s, a in CORE_PAIRS]
)
RECURRENT = [name for name, row in aj.SCORES.items() if row.is_recurrent]
SCANNED = [(score, 'softmax') for score in RECURRENT] + [('coverage', case.name) for case in ALIGNMENT_CASES]


@every_row
def test_every_transformation_gives_the_same(score, alignment):
  given = make_problem(score, alignment, batch=(BATCH,))
  arrays = (given.query, given.key, given.value, MASK)
  one = lambda query, key, value, mask: attend(score, alignment, Problem(given.params, query, key, value), mask)

  traces = []
  plain = jax.jit(lambda *arrays: (traces.append(1), one(*arrays))[1])
  expected = plain(*arrays)
  plain(*(x + 0 if x.dtype != bool else ~x for x in arrays))
  assert len(traces) == 1, 'the second call was compiled again'

  scanned = jax.jit(lambda *arrays: jax.lax.scan(lambda _, x: ((), one(*x)), (), arrays)[1])
  mesh = jax.make_mesh((BATCH,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P('data'), out_specs=P('data')))
  exported = export.export(plain)(*arrays).call
  for transformed in (jax.jit(jax.vmap(one)), scanned, sharded, exported):
    assert_same(transformed(*arrays), expected, **CLOSE)


@pytest.mark.parametrize(('score', 'alignment'), SCANNED)
def test_scanning_equals_stepping(score, alignment):
  score = SCORES_BY_NAME[score].name
  given = make_problem(score, alignment)
  mask = aj.padding_mask(5, S)
  rows = lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')
  memory = aj.Memory(project(given.key, given.params, 'key'), given.value, mask)
  memory = zero_masked_memory(memory)
  step = jax.jit(lambda carry, query: aj.attend_step(*rows, given.params, carry, query, memory))

  carry, steps = init_carry(*rows, S), []
  for query in given.query:
    carry, attended = step(carry, query)
    steps.append(attended)
  expected = attend(score, alignment, given, mask)
  assert_same(jax.tree.map(lambda *x: jnp.stack(x), *steps), expected, **CLOSE)
  np.testing.assert_array_equal(carry.previous, steps[-1].weights)
  np.testing.assert_allclose(carry.coverage, expected.weights.sum(0), **CLOSE)
  assert carry.step == T


@every_row
def test_queries_in_order_only_where_the_law_says_so(score, alignment):
  """A recurrent pair depends on earlier queries; every other pair must not."""
  given = make_problem(score, alignment)
  later = jax.jit(lambda query: attend(score, alignment, given._replace(query=query)).weights[-1])
  rows = lookup(score, aj.SCORES, ''), lookup(alignment, aj.ALIGNMENTS, '')
  looks_back = any(row.required_inputs & {'previous', 'coverage', 'state'} for row in rows)
  changed = np.any(later(given.query) != later(given.query.at[0].multiply(-3.0)))
  assert changed == looks_back or not is_continuous(alignment)
