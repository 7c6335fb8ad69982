"""Rollout against a product of matrices, flow against the cuts of small graphs."""

import itertools

import numpy as np
import pytest

from attention_jax import analysis
from attention_jax.errors import UserError

IDENTITY = np.eye(3)


def random_weights(layers, size, seed=0):
  return np.random.default_rng(seed).dirichlet(np.ones(size), (layers, size))


def smallest_cut(capacities, source, sink):
  """The capacity of the smallest cut, by trying every set of nodes: max-flow min-cut."""
  nodes = len(capacities)
  others = [node for node in range(nodes) if node not in (source, sink)]
  cuts = []
  for count in range(len(others) + 1):
    for subset in itertools.combinations(others, count):
      side = [source, *subset]
      outside = [node for node in range(nodes) if node not in side]
      cuts.append(capacities[np.ix_(side, outside)].sum())
  return min(cuts)


def test_rollout_is_the_product_of_the_layers():
  weights = random_weights(3, 4)
  layers = [0.5 * w + 0.5 * np.eye(4) for w in weights]
  rolled = analysis.rollout(weights)
  np.testing.assert_allclose(rolled[0], layers[0])
  np.testing.assert_allclose(rolled[2], layers[2] @ layers[1] @ layers[0])
  np.testing.assert_allclose(rolled.sum(-1), 1)


def test_positions_that_attend_to_themselves_pass_everything_on():
  for through in (lambda weights: analysis.rollout(weights)[-1], analysis.flow):
    np.testing.assert_array_equal(through(np.stack([IDENTITY] * 2)), IDENTITY)


def test_flow_of_one_layer_is_its_capacities():
  weights = random_weights(1, 4)
  np.testing.assert_allclose(analysis.flow(weights), 0.5 * weights[0] + 0.5 * np.eye(4), atol=1e-6)


def test_flow_is_the_smallest_cut():
  weights = random_weights(2, 3, seed=1)
  capacities = np.zeros((9, 9))
  for layer, values in enumerate(weights):
    rows = slice(3 * layer + 3, 3 * layer + 6)
    columns = slice(3 * layer, 3 * layer + 3)
    capacities[rows, columns] = 0.5 * values + 0.5 * IDENTITY
  expected = [[smallest_cut(capacities, 6 + t, s) for s in range(3)] for t in range(3)]
  np.testing.assert_allclose(analysis.flow(weights), expected, atol=1e-5)


def test_a_narrow_edge_bounds_the_flow():
  # Position 0 of the top reaches input 2 only by way of position 1, whose edge to 2 has a capacity of 0.5 * 0.2.
  top = np.array([[0, 1, 0], [0, 1, 0], [0, 0, 1.0]])
  bottom = np.array([[1, 0, 0], [0, 0.8, 0.2], [0, 0, 1.0]])
  assert analysis.flow(np.stack([bottom, top]))[0, 2] == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize('shape', [(3, 3), (1, 2, 3), (0, 3, 3)])
def test_weights_of_another_shape_raise(shape):
  with pytest.raises(UserError, match=r'weights must be \[L, S, S\]'):
    analysis.rollout(np.zeros(shape))


@pytest.mark.parametrize('value', [np.nan, -0.5, 3.0])
def test_values_that_are_no_weights_raise(value):
  for analyse in (analysis.rollout, analysis.flow):
    with pytest.raises(UserError, match='weights must be from 0 to 1, got '):
      analyse(np.full((1, 2, 2), value))
