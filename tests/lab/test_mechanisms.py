"""Pages about one mechanism: costs by hand, weights of the example, text from the tables."""

import numpy as np
import pytest

from lab.mechanism_advice import ADVICE
from lab.mechanisms import KINDS, LINKS, SOURCE, TARGET, Mechanism, example_weights, mechanism_page

S = D = 256  # sizes of the section on cost


def mechanism(kind, name):
  return Mechanism(kind, name, KINDS[kind][name])


# Products of the score and of the context, a multiplication and an addition per term; parameters of the row.
COSTS = {
  ('score', 'dot'): (2 * S * D + 2 * S * D, 0),
  ('score', 'general'): (2 * D * D + 2 * S * D + 2 * S * D, D * D),
  ('score', 'additive'): (2 * S * D + 2 * S * D, D),
  ('alignment', 'softmax'): (2 * S * D + 2 * S * D, 0),
  # Projections of the values are computed once per memory, not for each query.
  ('alignment', 'mocha'): (2 * S * D + 2 * D * D + 2 * S * D + 2 * S * D, 2 * D * D + 2 * D),
  # The projected context, from which the next query computes its probability of moving on.
  ('alignment', 'forward_agent'): (2 * S * D + 2 * S * D + 2 * D * D + 2 * D + 2 * S * D, 2 * D * D + 2 * D + 1),
}


@pytest.mark.long
@pytest.mark.parametrize(('kind', 'name'), COSTS)
def test_a_page_has_the_cost_of_a_query(kind, name):
  flop, parameters = COSTS[kind, name]
  page = mechanism_page(mechanism(kind, name))
  assert f'| {flop:,} FLOP |' in page
  assert f'| parameters, all widths {D} | {parameters:,} |' in page


def test_a_page_has_equation_signature_options_and_advice(monkeypatch):
  page = mechanism_page(mechanism('alignment', 'local_p'))
  assert 'softmax over |s - p| ≤ D' in page
  assert 'local_p(scores [S], mask [S], *, query [Dq], w [Dq, F], v [F], width=10)' in page
  assert '`w` [query, features], `v` [features]' in page
  assert '`window`' in page and '`flash`' not in page
  assert ADVICE['alignment']['local_p'] in page
  assert '| at test time | unchanged |' in page
  assert '| at test time | unchanged |' not in mechanism_page(mechanism('alignment', 'hard'))
  assert '*, w [Dq+Dk, F], v [F])' in mechanism_page(mechanism('score', 'concat'))
  monkeypatch.delitem(ADVICE['score'], 'dot')
  assert 'When to use it' not in mechanism_page(mechanism('score', 'dot'))
  assert all(set(ADVICE[kind]) <= set(table) for kind, table in KINDS.items())


@pytest.mark.long
@pytest.mark.parametrize(('kind', 'name'), [('score', 'dot'), ('score', 'additive'), ('alignment', 'sparsemax')])
def test_weights_of_the_example_follow_its_links(kind, name):
  weights = example_weights(mechanism(kind, name))
  assert weights.shape == (len(TARGET), len(SOURCE))
  np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
  linked = [weights[target, source] for source, target in LINKS]
  assert np.mean(linked) > 0.5
