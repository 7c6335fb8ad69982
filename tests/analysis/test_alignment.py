"""Alignment scores against counts done by hand; links, entropy and the Pharaoh format."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax import analysis
from attention_jax.errors import UserError

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@pytest.mark.parametrize(
  ('links', 'sure', 'possible', 'expected'),
  [
    ([(0, 0), (1, 1)], [(0, 0), (1, 1)], None, 0.0),
    ([(0, 0), (1, 2)], [(0, 0)], [(1, 2)], 0.0),  # a possible link costs nothing
    ([(0, 0), (2, 2)], [(0, 0), (1, 1)], [(2, 2)], 1 - (1 + 2) / 4),
    ([(0, 0), (0, 0)], [(0, 0)], None, 0.0),  # repeated pairs count once
    ([], [], None, 0.0),
    ([], [], [(0, 0)], 0.0),
    ([], [(0, 0)], None, 1.0),
    ([(0, 0), (1, 1)], [], [(0, 0)], 0.5),
  ],
)
def test_error_rate_by_hand(links, sure, possible, expected):
  assert analysis.alignment_error_rate(iter(links), iter(sure), possible and iter(possible)) == pytest.approx(expected)


@given(PAIRS, PAIRS, PAIRS)
def test_error_rate_is_the_formula(links, sure, possible):
  a, s, p = set(links), set(sure), set(possible) | set(sure)
  expected = 1 - (len(a & s) + len(a & p)) / (len(a) + len(s)) if a or s else 0.0
  assert analysis.alignment_error_rate(links, sure, possible) == pytest.approx(expected)


def test_corpus_sums_counts_over_sentences():
  links, sure = [[(0, 0)], [(0, 0), (1, 1), (2, 2)]], [[(1, 1)], [(0, 0), (1, 1)]]
  scores = analysis.alignment_scores(links, sure, possible=[[], [(2, 2)]])
  assert scores == pytest.approx((1 - (2 + 3) / (4 + 3), 3 / 4, 2 / 3, 4))
  assert analysis.alignment_scores([], []) == (0.0, 1.0, 1.0, 0)
  with pytest.raises(UserError, match='links for 2 sentences, sure for 1'):
    analysis.alignment_scores(links, sure[:1])


def test_links_skip_empty_rows_eos_and_padding():
  weights = np.array([[0.1, 0.7, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.8, 0.0], [0.9, 0.0, 0.1, 0.0]])
  assert analysis.links_from_weights(weights, source_length=2, target_length=3) == ((1, 0),)  # 2 is the EOS
  assert analysis.links_from_weights(weights, source_length=3, target_length=4) == ((1, 0), (2, 2), (0, 3))
  assert analysis.links_from_weights(weights[:, :2], source_length=2, target_length=1) == ((1, 0),)
  assert analysis.links_from_weights(weights, source_length=3, target_length=0) == ()
  with pytest.raises(UserError, match=r'T >= 5 and S >= 2, got shape \[4, 4\]'):
    analysis.links_from_weights(weights, source_length=2, target_length=5)


def test_merged_weights_by_hand():
  weights = [[0.1, 0.2, 0.3, 0.4, 0.0], [0.5, 0.1, 0.0, 0.4, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0, 1.0]]
  merged = analysis.merge_weights(np.array(weights, np.float32), source_words=[0, 0, 1, 1], target_words=[0, 0, 1])
  np.testing.assert_allclose(merged, [[0.45, 0.55, 0.0], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]], rtol=1e-6)
  gaps = analysis.merge_weights(weights, [0, -1, 2, -1], [1, -1, 1])  # spaces, and words without a token of their own
  np.testing.assert_allclose(gaps, [[0, 0, 0, 0], [0.15, 0, 0.25, 0.1], [0, 0, 0, 1]], rtol=1e-6)
  np.testing.assert_array_equal(analysis.merge_weights(weights, range(4), range(3)), weights)
  np.testing.assert_array_equal(analysis.merge_weights([[0.3]], [], []), [[0.3]])
  with pytest.raises(UserError, match=r'of 4 source and 2 target tokens must be \[3, 5\], .* got shape \[4, 5\]'):
    analysis.merge_weights(weights, [0, 0, 1, 1], [0, 1])


def test_entropy_in_nats_without_empty_rows():
  weights = np.array([[[1.0, 0, 0, 0], [0, 0, 0, 0]], [[0.25] * 4, [0.2, 0.2, 0, 0]]], np.float32)
  np.testing.assert_allclose(analysis.entropy(weights), [0.0, np.log(4), np.log(2)], rtol=1e-6)


@pytest.mark.parametrize(
  ('heaviest', 'onward'),
  [
    ([0, 0, 2, 1, 1], [True, True, False, True]),
    ([2, 1, 0], [False, False]),
    ([2, None, 0, 1], [True]),  # nothing is attended to: no pair on either side
    ([2, 3, 0, 1], [True]),  # 3 is the EOS
    ([1, None, 0, 3], []),
    ([2], []),
    ([], []),
  ],
)
def test_monotonicity_by_hand(heaviest, onward):
  weights = np.full((len(heaviest) + 1, 6), 0.1)  # the last row is the EOS, the last two columns padding
  for row, best in zip(weights, heaviest, strict=False):
    row[:] = 0 if best is None else row + 0.5 * (np.arange(6) == best)
  found = analysis.monotonicity(weights, source_length=3, target_length=len(heaviest))
  assert found.dtype == bool and found.tolist() == onward


@given(PAIRS)
def test_pharaoh_round_trip(links):
  assert analysis.parse_pharaoh(analysis.format_pharaoh(links)) == tuple(sorted(set(links)))


@pytest.mark.parametrize('line', ['0-', '0-0 1:2', 'a-b', '-1-2', '²-1', '0-0,1-1'])
def test_pharaoh_names_the_place(line):
  with pytest.raises(UserError, match=r'^a\.tsv:7: cannot read the link'):
    analysis.parse_pharaoh(line, where='a.tsv:7')
