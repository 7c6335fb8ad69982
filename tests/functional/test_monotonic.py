"""Monotonic alignments that project the values: the whole of attention against the literal loops of alignment_cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from tests.functional.alignment_cases import ALIGNMENTS_BY_NAME, TEST_TIME_CASES
from tests.functional.cases import S, T
from tests.functional.helpers import attend, make_problem

REFERENCES = {
  'mocha(width=2)': functools.partial(TEST_TIME_CASES[1].reference, width=2),
  'forward_agent': ALIGNMENTS_BY_NAME['forward_agent'].reference,
}


@pytest.mark.parametrize('alignment', REFERENCES)
def test_attention_equals_the_loop_of_the_paper(alignment):
  problem = make_problem('dot', alignment)
  attended = jax.jit(functools.partial(attend, 'dot', alignment))(problem)
  params, queries, keys, values = jax.tree.map(lambda x: np.asarray(x, np.float64), problem)
  learned = {name: param for name, param in params['alignment'].items() if name != 'u'}
  learned['remembered'] = values @ params['alignment']['u']
  state = jax.tree.map(np.asarray, aj.ALIGNMENTS[alignment.split('(')[0]].init_state(S, jnp.float32))
  weights = np.zeros((T, S))
  for t, query in enumerate(queries):
    weights[t], state = REFERENCES[alignment](keys @ query, np.ones(S, bool), query=query, state=state, **learned)
  assert weights.any()
  np.testing.assert_allclose(attended.weights, weights, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(attended.context, weights @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('alignment', REFERENCES)
def test_a_memory_may_contain_the_projected_values(alignment):
  """`remember` projects the values once if it receives the alignment; otherwise every step projects them."""
  problem = make_problem('dot', alignment)

  @jax.jit
  def run(problem):
    def scan(memory):
      def step(carry, query):
        return aj.attend_step('dot', alignment, problem.params, carry, query, memory)

      return jax.lax.scan(step, aj.init_carry('dot', alignment, S), problem.query)[1]

    plain = aj.remember(problem.key, problem.value, params=problem.params)
    named = aj.remember(problem.key, problem.value, params=problem.params, alignment=alignment)
    return plain.remembered, named.remembered, scan(plain), scan(named), attend('dot', alignment, problem)

  unprojected, projected, *results = run(problem)
  assert unprojected is None
  np.testing.assert_allclose(projected, problem.value @ problem.params['alignment']['u'], rtol=1e-5, atol=1e-5)
  for attended in results:
    assert attended.weights.shape == (T, S)
    np.testing.assert_allclose(attended.weights, results[-1].weights, rtol=1e-5, atol=1e-6)
