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
from attention_jax.tokens import BOS, EOS
from tests.decoding.helpers import (
  make_toy_model,
)
from tests.modules.helpers import assert_same

WORD, OTHER_WORD = 3, 4  # ids of words in the tables of probabilities below


@pytest.mark.long
def test_coverage_is_reordered_with_its_beam():
  """The second beam overtakes the first one, and each beam keeps its coverage."""
  probabilities = np.full((3, 5, 5), 1e-12)
  probabilities[0, BOS, [WORD, OTHER_WORD]] = 0.6, 0.4
  probabilities[1, WORD, [WORD, OTHER_WORD]] = 0.5
  probabilities[1, OTHER_WORD, WORD] = 1.0
  probabilities[2, :, EOS] = 1.0
  table = jnp.log(jnp.asarray(probabilities, jnp.float32))
  weights = np.zeros((3, 5, 2), np.float32)
  weights[1, WORD] = (0.5, 0.75)
  weights[1, OTHER_WORD] = (0.5, 0.0)
  weights[2] = (0.75, 0.0)

  def step(carry, token, memory):
    return carry + 1, (table[carry, token], jnp.asarray(weights)[carry, token])

  @functools.partial(jax.jit, static_argnames='beta')
  def run(carry, beta):
    return search.beam(step, carry, (), beams=2, max_length=3, ranking=Ranking(alpha=0.0, beta=beta))

  without_penalty = run(jnp.zeros((1,), jnp.int32), 0.0)
  assert without_penalty.tokens[0].tolist() == [[OTHER_WORD, WORD, EOS], [WORD, WORD, EOS]]
  hypotheses = run(jnp.zeros((1,), jnp.int32), 0.5)
  assert hypotheses.tokens[0].tolist() == [[WORD, WORD, EOS], [OTHER_WORD, WORD, EOS]]
  # The coverage of the first position is more than 1; that of the second one is 0.75 or 0.
  expected = np.log([0.3, 0.4]) + 0.5 * np.log([0.75, MIN_COVERAGE])
  np.testing.assert_allclose(hypotheses.scores[0], expected, rtol=1e-5)
  np.testing.assert_allclose(hypotheses.log_probs[0], np.log([0.3, 0.4]), rtol=1e-5)


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
@pytest.mark.parametrize(
  ('gamma', 'lengths', 'scores'),
  [(0.0, [1, 2], (0.6, 0.4)), (0.5, [1, 2], (0.6, 0.4)), (1.0, [2, 1], (0.4, 0.36))],
)
def test_eos_normalisation_penalises_early_ends(gamma, lengths, scores):
  """The short output, which is more probable, ranks first unless its EOS counts twice (gamma = 1)."""
  probabilities = np.full((2, 4), 1e-12)
  probabilities[0, [EOS, WORD]] = 0.6, 0.4
  probabilities[1, EOS] = 1.0
  table = jnp.log(jnp.asarray(probabilities, jnp.float32))

  def step(carry, token, memory):
    return carry + 1, (table[carry], jnp.zeros((*carry.shape, 2)))

  @jax.jit
  def run(carry):
    return search.beam(step, carry, (), beams=2, max_length=2, ranking=Ranking(alpha=0.0, gamma=gamma))

  hypotheses = run(jnp.zeros((1,), jnp.int32))
  assert hypotheses.lengths[0].tolist() == lengths
  np.testing.assert_allclose(hypotheses.scores[0], np.log(scores), rtol=1e-5)


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
