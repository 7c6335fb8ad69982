"""Coverage, distance and lag of weights, against values computed by hand."""

import numpy as np
import pytest

from attention_jax import analysis

WEIGHTS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_coverage_is_the_sum_over_queries_and_distances_are_weighted_means():
  np.testing.assert_array_equal(analysis.coverage(WEIGHTS), [1, 0.5, 0.5, 0])
  # The diagonal from (0, 0) to (2, 3) passes position 1.5 at query 1.
  np.testing.assert_allclose(analysis.distance(WEIGHTS), [0, 0.5, np.nan])
  np.testing.assert_allclose(analysis.distance(WEIGHTS[::-1]), [np.nan, 0.5, 3])
  np.testing.assert_allclose(analysis.distance(WEIGHTS, np.arange(3)), [0, 0.5, np.nan])
  np.testing.assert_allclose(analysis.distance(0.25 * WEIGHTS, np.array([2, 0, 0])), [2, 1.5, np.nan])


def weights_at(*positions, size=5):
  """Returns weights [T, S]: 1 at each of T positions; a row of zeros for None."""
  return np.stack([np.zeros(size) if position is None else np.eye(size)[position] for position in positions])


@pytest.mark.parametrize(
  ('weights', 'lengths', 'expected'),
  [
    (weights_at(0, 1, 2, 3, 4), (4, 4), 1),  # one token behind at each step; the fifth column and row are EOS
    (weights_at(3, 3, 3, 4), (4, 3), 4),  # the whole source is read first
    (weights_at(None, None), (4, 1), 4),
    (weights_at(1, 2, 3, 3), (4, 4), (2 + (3 - 1) + (4 - 2)) / 3),  # wait-2: the last token is not counted
    (weights_at(0, 2, 3), (4, 2), (1 + (3 - 2)) / 2),  # the target ends before the whole source is read
    (weights_at(0, 4), (4, 1), 1),
    (np.array([[0, 0.4, 0.6, 0, 0], [0, 0, 0.5, 0.5, 0]]), (4, 2), (3 + (4 - 2)) / 2),  # two positions a query
    (weights_at(2, 1, 3), (4, 3), (3 + 3 - 4 / 3 + 4 - 8 / 3) / 3),  # a position that has been read stays read
  ],
)
def test_average_lagging_equals_that_by_hand(weights, lengths, expected):
  assert analysis.average_lagging(weights, *lengths) == pytest.approx(expected)


def test_average_lagging_of_an_empty_source_or_target_is_undefined():
  assert np.isnan(analysis.average_lagging(weights_at(0), 4, 0))
  assert np.isnan(analysis.average_lagging(weights_at(0), 0, 1))
