"""The expected utility of a hypothesis is the mean metric against all hypotheses, itself included."""

import numpy as np
import pytest

from attention_jax.decoding.minimum_bayes_risk import Candidates, combine_hypotheses, expected_utility
from attention_jax.errors import UserError


def test_expected_utility_is_the_mean_metric_over_all_references():
  texts = ['a b c d', 'a b c e', 'x', 'a b c d']
  assert expected_utility(texts, 'exact_match') == [50, 25, 25, 50]
  chrf = expected_utility(texts, 'chrf')
  assert np.argmax(chrf) == 0 and chrf[0] == chrf[3] > chrf[1] > chrf[2]
  assert expected_utility(['a', 'b'], 'ter') == [-50, -50]  # an error rate, for which lower is better
  weighted = expected_utility(['a', 'b'], 'exact_match', [-700.0 + np.log(3), -700.0])
  np.testing.assert_allclose(weighted, [75, 25])
  # A line that is too long has no hypotheses.
  assert expected_utility([], 'exact_match') == expected_utility([], 'exact_match', []) == []
  with pytest.raises(UserError, match="unknown metric 'blue'"):
    expected_utility(texts, 'blue')


def test_expected_utility_of_short_lines_is_not_zero():
  utilities = expected_utility(['a b c', 'a b c', 'a b d'], 'bleu(tokenize="none")')
  assert utilities[0] == utilities[1] > utilities[2] > 0


@pytest.mark.parametrize(
  ('metric', 'equal', 'different'), [('character_error_rate', 0, -100), ('exact_match', 100, 0), ('chrf', 100, 0)]
)
def test_an_empty_line_equals_itself_and_differs_from_any_other(metric, equal, different):
  assert expected_utility(['', 'b'], metric)[0] == pytest.approx((equal + different) / 2)


def test_texts_of_several_systems_are_combined_by_vote_or_by_another_metric():
  texts = [['a b c d', 'x', 'p'], ['a b c e', 'y', 'q'], ['a b x e', 'y', 'r'], ['a b c d', 'z', 'q']]
  systems = [[Candidates([text]) for text in lines] for lines in texts]
  assert combine_hypotheses(systems, 'exact_match') == ['a b c d', 'y', 'q']
  assert combine_hypotheses(systems[:3], 'exact_match') == ['a b c d', 'y', 'p']  # of equal utilities the first
  assert combine_hypotheses(systems[:3], 'token_error_rate') == ['a b c e', 'y', 'p']  # nearest to all three


def test_hypotheses_of_several_systems_are_weighted_by_their_probabilities():
  first = Candidates(['p', 'q'], np.log([0.5, 0.3]).tolist())  # scaled to 5/8 and 3/8
  second = Candidates(['q', 'r'], np.log([0.04, 0.05]).tolist())  # scaled to 4/9 and 5/9
  assert combine_hypotheses([[first], [second]], 'exact_match') == ['q']
  assert combine_hypotheses([[first]], 'exact_match') == ['p']
  samples = Candidates(['r', 'q', 'r', 'r'])
  assert combine_hypotheses([[first], [samples]], 'exact_match') == ['r']
