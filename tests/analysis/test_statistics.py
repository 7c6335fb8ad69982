"""Coverage and distance of weights, by hand."""

import numpy as np

from attention_jax import analysis

WEIGHTS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_coverage_is_the_sum_over_queries():
  np.testing.assert_array_equal(analysis.coverage(WEIGHTS), [1, 0.5, 0.5, 0])


def test_distance_from_the_diagonal():
  # The diagonal from (0, 0) to (2, 3) passes position 1.5 at query 1.
  np.testing.assert_allclose(analysis.distance(WEIGHTS), [0, 0.5, np.nan])
  np.testing.assert_allclose(analysis.distance(WEIGHTS[::-1]), [np.nan, 0.5, 3])


def test_distance_from_given_positions():
  np.testing.assert_allclose(analysis.distance(WEIGHTS, np.arange(3)), [0, 0.5, np.nan])
  np.testing.assert_allclose(analysis.distance(0.25 * WEIGHTS, np.array([2, 0, 0])), [2, 1.5, np.nan])
