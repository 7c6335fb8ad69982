"""Rankings of hypotheses equal their formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.decoding.ranking import DEFAULT_RANKING, LENGTH_PENALTIES, MIN_COVERAGE, Ranking
from attention_jax.errors import UserError
from attention_jax.tokens import EOS
from tests.decoding.helpers import make_toy_model
from tests.modules.helpers import assert_same


@pytest.mark.long
def test_models_without_attention_can_be_ranked_by_coverage():
  @functools.partial(jax.jit, static_argnames='ranking')
  def run(model, ranking):
    def step(carry, token, memory):
      carry, (logits, weights) = model.step(carry, token, memory)
      return carry, (logits, jnp.zeros_like(weights))

    options = {'ranking': ranking, 'source_mask': model.mask}
    return search.beam(step, model.first_carry(), (model.memory, model.eos_bias), beams=3, max_length=4, **options)

  plain = run(make_toy_model(), DEFAULT_RANKING)
  ranked = run(make_toy_model(), Ranking(beta=2.0))
  assert_same(ranked.tokens, plain.tokens)
  penalty = 2.0 * math.log(MIN_COVERAGE) * make_toy_model().mask.sum(-1, keepdims=True)
  np.testing.assert_allclose(ranked.scores, plain.scores + penalty, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('ranking', [Ranking(beta=10_000), Ranking(gamma=10_000)], ids=['beta', 'gamma'])
def test_hypotheses_exist_whatever_their_penalty(ranking):
  """The largest penalties of a long source without attention, and of an EOS of probability e^-100."""

  def step(carry, token, memory):
    return carry, (jnp.zeros((1, 5)).at[:, EOS].set(-100.0), jnp.zeros((1, 8000)))

  hypotheses = jax.jit(lambda: search.beam(step, jnp.zeros((1, 1)), (), beams=1, max_length=1, ranking=ranking))()
  assert hypotheses.lengths.tolist() == [[1]] and hypotheses.tokens.tolist() == [[[EOS]]]
  assert -1e12 < hypotheses.scores[0, 0] < -1e9


@pytest.mark.long
@pytest.mark.parametrize(('name', 'expected'), [('wu2016', [1.5**0.6, 3**0.6]), ('power', [4**0.6, 13**0.6])])
def test_length_penalties_equal_their_formulas(name, expected):
  penalty = LENGTH_PENALTIES[name]
  assert penalty(1, 0.6) == 1 and penalty(7, 0.0) == 1
  np.testing.assert_allclose(penalty(jnp.asarray([4, 13]), 0.6), expected, rtol=1e-6)
  assert penalty(jnp.asarray([0]), 0.6) > 0  # filler rows


def test_an_unknown_length_penalty_raises():
  with pytest.raises(UserError, match=r"unknown length penalty 'mean'; expected one of: power, wu2016"):
    Ranking(length_penalty='mean')


@pytest.mark.parametrize(('name', 'high'), [('alpha', 10), ('beta', 10_000), ('gamma', 10_000)])
@pytest.mark.parametrize('value', [-0.1, 1e5, math.inf, math.nan])
def test_rankings_out_of_range_raise(name, high, value):
  expected = 'finite' if math.isinf(value) else f'at least 0 and at most {high}'
  with pytest.raises(UserError, match=f'ranking.{name} must be {expected}, got {value}'):
    Ranking(**{name: value})
