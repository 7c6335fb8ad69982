"""Poolings against literal loops over the formulas of their papers, and what is behind a mask."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.modules.attention import Attention
from attention_jax.modules.pooling import POOLINGS, AttentionPooling
from tests.modules.helpers import assert_close, assert_same, draw, variables

MEMORY, MASK = draw(3, 5, 7), jnp.arange(5)[None] < jnp.array([5, 3, 0])[:, None]
FINAL = draw(3, 11)
DOT = Attention('dot', features=13)


@pytest.mark.parametrize(('hops', 'bias'), [(1, True), (3, False)], ids=['yang2016', 'lin2017'])
def test_attention_is_the_formula_of_the_papers(hops, bias):
  pooling = AttentionPooling(DOT, hops=hops, bias=bias)
  params = variables(pooling, MEMORY, MASK, FINAL)
  own = params['params']
  vector, weights = pooling.apply(params, MEMORY, MASK, FINAL)
  assert vector.shape == (3, hops * 7) and weights.shape == (3, hops, 5)
  for row, length in ((0, 5), (1, 3)):
    for hop in range(hops):
      powers, total = [], np.zeros(7)
      for s in range(length):
        u = np.tanh(MEMORY[row, s] @ own['hidden']['kernel'] + (own['hidden']['bias'] if bias else 0.0))
        powers.append(math.exp(float(own['sought'][hop] @ u)))
      for s in range(length):
        total += powers[s] / sum(powers) * np.asarray(MEMORY[row, s])
      assert_close(vector[row, hop * 7 : (hop + 1) * 7], total)
      assert_close(weights[row, hop, :length], np.array(powers) / sum(powers))
  assert not vector[2].any() and not weights[2].any()


@pytest.mark.parametrize('score', ['additive', 'scaled_dot', 'general', 'cosine', 'location_sensitive'])
@pytest.mark.parametrize('alignment', ['softmax', 'sparsemax', 'sigmoid'])
def test_any_score_and_alignment_does(score, alignment):
  pooling = AttentionPooling(Attention(score, alignment, features=12, heads=2), hops=2, hidden=score != 'additive')
  params = variables(pooling, MEMORY, MASK, FINAL)
  vector, weights = pooling.apply(params, MEMORY, MASK, FINAL)
  assert vector.shape == (3, 2 * 12) and weights.shape == (3, 4, 5) and np.isfinite(vector).all()
  assert not weights[1, :, 3:].any() and not weights[2].any()


@pytest.mark.parametrize('name', POOLINGS)
def test_what_is_behind_the_mask_changes_nothing(name):
  pooling = POOLINGS[name](DOT)
  params = variables(pooling, MEMORY, MASK, FINAL)
  other = jnp.where(MASK[..., None], MEMORY, 100.0)
  whole = pooling.apply(params, MEMORY, MASK, FINAL)
  assert_same(whole, pooling.apply(params, other, MASK, FINAL))
  assert not whole[0][2].any() and not whole[1][2].any() and not whole[1][1, :, 3:].any()
  short = pooling.apply(params, MEMORY[1:2, :3], MASK[1:2, :3], FINAL[1:2])
  assert_close(whole[0][1:2], short[0])
  np.testing.assert_allclose(whole[1][:2].sum(-1), 1, rtol=1e-5)


def test_plain_ones_are_what_they_are_called():
  given = MEMORY, MASK, FINAL
  real = np.asarray(MEMORY[1, :3])
  found = {name: POOLINGS[name](DOT).apply({}, *given)[0][1] for name in ('mean', 'sum', 'max', 'last')}
  for name, wanted in {'mean': real.mean(0), 'sum': real.sum(0), 'max': real.max(0), 'last': FINAL[1]}.items():
    assert_close(found[name], wanted)
