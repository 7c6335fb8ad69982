"""Monotonic alignments that project the values: the whole of attention against the papers' loops."""

import functools

import jax
import numpy as np
import pytest

import attention_jax as aj
from tests.functional.cases import S, T
from tests.functional.helpers import attend, make_problem

ALIGNMENTS = ('mocha(width=2)', 'forward_agent')


def softmax(scores):
  powers = np.exp(scores - np.max(scores))
  return powers / powers.sum()


def unit(params, query, vector):
  """vᵀ tanh(Wᵀ q + Uᵀ h + b), with the parameters of one alignment."""
  return params['v'] @ np.tanh(query @ params['w'] + vector @ params['u'] + params['bias'])


def mocha(params, scores, queries, values):
  """Hard decoding of Chiu & Raffel 2018, algorithm 1, with chunks of two positions."""
  position = 0
  for t, query in enumerate(queries):
    weights = np.zeros(len(values))
    stops = [s for s in range(position, len(values)) if scores[t, s] > 0]
    if stops:
      position = stops[0]
      chunk = range(max(0, position - 1), position + 1)
      weights[list(chunk)] = softmax([unit(params, query, values[s]) for s in chunk])
    else:
      position = len(values)
    yield weights


def forward_agent(params, scores, queries, values):
  """Zhang, Ling & Dai 2018, algorithm 2."""
  previous = np.eye(len(values))[0]
  move = 0.5
  for t, query in enumerate(queries):
    y = softmax(scores[t])
    moved = np.concatenate([[0], previous[:-1]])
    weights = ((1 - move) * previous + move * moved) * y
    previous = weights / weights.sum()
    move = 1 / (1 + np.exp(-unit(params, query, previous @ values) - params['offset']))
    yield previous


@pytest.mark.parametrize(('alignment', 'loop'), [(ALIGNMENTS[0], mocha), (ALIGNMENTS[1], forward_agent)])
def test_attention_equals_the_loop_of_the_paper(alignment, loop):
  problem = make_problem('dot', alignment)
  attended = jax.jit(functools.partial(attend, 'dot', alignment))(problem)
  params, queries, keys, values = jax.tree.map(lambda x: np.asarray(x, np.float64), problem)
  weights = np.stack(list(loop(params['alignment'], queries @ keys.T, queries, values)))
  assert weights.any()
  np.testing.assert_allclose(attended.weights, weights, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(attended.context, weights @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('alignment', ALIGNMENTS)
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
