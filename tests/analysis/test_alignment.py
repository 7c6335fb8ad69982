"""Alignment scores, links, merged weights, entropy and monotonicity, against values computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax import analysis
from attention_jax.errors import UserError

LINKS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@pytest.mark.parametrize(
  ('links', 'sure', 'possible', 'expected'),
  [
    ([(0, 0), (1, 2)], [(0, 0)], [(1, 2)], 0.0),  # a predicted possible link is no error
    ([(0, 0), (2, 2)], [(0, 0), (1, 1)], [(2, 2)], 1 - (1 + 2) / 4),
    ([(0, 0), (0, 0)], [(0, 0)], None, 0.0),  # repeated pairs count once
    ([], [], [(0, 0)], 0.0),
    ([], [(0, 0)], None, 1.0),
  ],
)
def test_error_rate_equals_that_by_hand(links, sure, possible, expected):
  possible = None if possible is None else iter(possible)
  assert analysis.alignment_error_rate(iter(links), iter(sure), possible) == pytest.approx(expected)


@given(LINKS, LINKS, LINKS)
def test_error_rate_equals_the_formula(links, sure, possible):
  a = set(links)
  s = set(sure)
  p = set(possible) | s
  expected = 1 - (len(a & s) + len(a & p)) / (len(a) + len(s)) if a or s else 0.0
  assert analysis.alignment_error_rate(links, sure, possible) == pytest.approx(expected)


def test_corpus_scores_sum_counts_over_sentences():
  links = [[(0, 0)], [(0, 0), (1, 1), (2, 2)]]
  sure = [[(1, 1)], [(0, 0), (1, 1)]]
  scores = analysis.alignment_scores(links, sure, possible=[[], [(2, 2)]])
  assert scores == pytest.approx((1 - (2 + 3) / (4 + 3), 3 / 4, 2 / 3, 4))
  assert analysis.alignment_scores([], []) == (0.0, 1.0, 1.0, 0)
  with pytest.raises(UserError, match='links for 2 sentences, sure for 1'):
    analysis.alignment_scores(links, sure[:1])


def test_links_skip_zero_rows_eos_and_padding():
  weights = np.array([[0.1, 0.7, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.8, 0.0], [0.9, 0.0, 0.1, 0.0]])
  assert analysis.links_from_weights(weights, source_length=2, target_length=3) == ((1, 0),)  # column 2 is the EOS
  assert analysis.links_from_weights(weights, source_length=1, target_length=3) == ((0, 2),)  # 2 and 3 are padding
  assert analysis.links_from_weights(weights, source_length=3, target_length=4) == ((1, 0), (2, 2), (0, 3))
  assert analysis.links_from_weights(weights[:, :2], source_length=2, target_length=1) == ((1, 0),)
  assert analysis.links_from_weights(weights, source_length=3, target_length=0) == ()
  with pytest.raises(UserError, match=r'T >= 5 and S >= 2, got shape \[4, 4\]'):
    analysis.links_from_weights(weights, source_length=2, target_length=5)


def test_merged_weights_equal_those_by_hand():
  weights = [[0.1, 0.2, 0.3, 0.4, 0.0], [0.5, 0.1, 0.0, 0.4, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0, 1.0]]
  merged = analysis.merge_weights(np.array(weights, np.float32), source_words=[0, 0, 1, 1], target_words=[0, 0, 1])
  np.testing.assert_allclose(merged, [[0.45, 0.55, 0.0], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]], rtol=1e-6)
  # Tokens of no word, and words without tokens.
  with_gaps = analysis.merge_weights(weights, [0, -1, 2, -1], [1, -1, 1])
  np.testing.assert_allclose(with_gaps, [[0, 0, 0, 0], [0.15, 0, 0.25, 0.1], [0, 0, 0, 1]], rtol=1e-6)
  np.testing.assert_array_equal(analysis.merge_weights(weights, range(4), range(3)), weights)
  np.testing.assert_array_equal(analysis.merge_weights([[0.3]], [], []), [[0.3]])
  with pytest.raises(UserError, match=r'of 4 source and 2 target tokens must be \[3, 5\], .* got shape \[4, 5\]'):
    analysis.merge_weights(weights, [0, 0, 1, 1], [0, 1])


def test_entropy_in_nats_skips_zero_rows():
  weights = np.array([[[1.0, 0, 0, 0], [0, 0, 0, 0]], [[0.25] * 4, [0.2, 0.2, 0, 0]]], np.float32)
  np.testing.assert_allclose(analysis.entropy(weights), [0.0, np.log(4), np.log(2)], rtol=1e-6)
  assert all(analysis.entropy(np.ones(shape)).shape == (0,) for shape in [(0, 3), (2, 0), (2, 4, 0)])


@pytest.mark.parametrize(
  ('largest', 'expected'),
  [
    ([0, 0, 2, 1, 1], [True, True, False, True]),
    ([2, 1, 0], [False, False]),
    ([2, None, 0, 1], [True]),  # a row of zeros is part of no pair
    ([2, 3, 0, 1], [True]),  # 3 is the EOS
    ([1, None, 0, 3], []),
    ([2], []),
    ([], []),
  ],
)
def test_monotonicity_equals_that_by_hand(largest, expected):
  weights = np.full((len(largest) + 1, 6), 0.1)  # the last row is the EOS, the last two columns are padding
  for row, best in zip(weights, largest, strict=False):
    row[:] = 0 if best is None else row + 0.5 * (np.arange(6) == best)
  result = analysis.monotonicity(weights, source_length=3, target_length=len(largest))
  assert result.dtype == bool
  assert result.tolist() == expected


@given(LINKS)
def test_pharaoh_functions_are_exported(links):
  assert analysis.parse_pharaoh(analysis.format_pharaoh(links)) == tuple(sorted(set(links)))
