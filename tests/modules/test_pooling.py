"""Poolings against literal loops over the formulas of their papers, and masks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.modules.attention import Attention
from attention_jax.modules.pooling import POOLINGS, AttentionPooling
from tests.modules.helpers import assert_close, assert_same, draw, variables

MEMORY = draw(3, 5, 7)
MASK = jnp.arange(5)[None] < jnp.array([5, 3, 0])[:, None]
FINAL = draw(3, 11)
DOT = Attention('dot', features=13)


@pytest.mark.long
@pytest.mark.parametrize('options', [{}, {'hops': 3, 'bias': False}], ids=['yang2016', 'lin2017'])
def test_attention_equals_the_formulas_of_the_papers(options):
  pooling = AttentionPooling(DOT, **options)
  hops, bias = options.get('hops', 1), options.get('bias', True)
  params = variables(pooling, MEMORY, MASK, FINAL)
  p, memory = jax.tree.map(np.asarray, (params['params'], MEMORY))
  vector, weights = jax.jit(pooling.apply)(params, MEMORY, MASK, FINAL)
  assert vector.shape == (3, hops * 7) and weights.shape == (3, hops, 5)
  for row, length in ((0, 5), (1, 3)):
    for hop in range(hops):
      powers = []
      total = np.zeros(7)
      for s in range(length):
        u = np.tanh(memory[row, s] @ p['hidden']['kernel'] + (p['hidden']['bias'] if bias else 0.0))
        powers.append(math.exp(float(p['queries'][hop] @ u)))
      for s in range(length):
        total += powers[s] / sum(powers) * memory[row, s]
      assert_close(vector[row, hop * 7 : (hop + 1) * 7], total)
      assert_close(weights[row, hop, :length], np.array(powers) / sum(powers))
  assert not vector[2].any() and not weights[2].any()


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment'),
  [
    pytest.param(score, alignment, marks=[pytest.mark.product] if i % 3 != j else [])
    for i, score in enumerate(['additive', 'scaled_dot', 'general', 'cosine', 'location_sensitive'])
    for j, alignment in enumerate(['softmax', 'sparsemax', 'sigmoid'])
  ],
)
def test_attention_pools_with_several_scores_and_alignments(score, alignment):
  pooling = AttentionPooling(Attention(score, alignment, features=12, heads=2), hops=2, hidden=score != 'additive')
  params = variables(pooling, MEMORY, MASK, FINAL)
  vector, weights = jax.jit(pooling.apply)(params, MEMORY, MASK, FINAL)
  assert vector.shape == (3, 2 * 12) and weights.shape == (3, 4, 5) and np.isfinite(vector).all()
  assert not weights[1, :, 3:].any() and not weights[2].any()


@pytest.mark.long
@pytest.mark.parametrize('name', POOLINGS)
def test_masked_positions_do_not_change_results_or_gradients(name):
  pooling = POOLINGS[name](DOT)
  params = variables(pooling, MEMORY, MASK, FINAL)

  def loss(params, memory, mask, final):
    vector, weights = pooling.apply(params, memory, mask, final)
    return jnp.sum(vector**2), (vector, weights)

  run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  gradients, (vector, weights) = run(params, MEMORY, MASK, FINAL)
  for filler in (100.0, jnp.nan):
    other_padding = jnp.where(MASK[..., None], MEMORY, filler)
    assert_same(run(params, other_padding, MASK, FINAL), (gradients, (vector, weights)))
  assert not gradients[1][2].any() and not gradients[1][1, 3:].any()
  assert not vector[2].any() and not weights[2].any() and not weights[1, :, 3:].any()
  _, (unpadded_vector, _) = run(params, MEMORY[1:2, :3], MASK[1:2, :3], FINAL[1:2])
  assert_close(vector[1:2], unpadded_vector)
  np.testing.assert_allclose(weights[:2].sum(-1), 1, rtol=1e-5)


def test_poolings_without_parameters_equal_their_formulas():
  row = np.asarray(MEMORY[1, :3])
  expected = {'mean': row.mean(0), 'sum': row.sum(0), 'max': row.max(0), 'last': FINAL[1]}
  for name, vector in expected.items():
    vectors, _ = POOLINGS[name](DOT).apply({}, MEMORY, MASK, FINAL)
    assert_close(vectors[1], vector)
