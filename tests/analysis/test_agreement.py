"""Kendall's tau by counting pairs, divergences by hand, and outputs that do and do not depend on the weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import analysis

MASK = jnp.array([True, True, True, True, False])
WEIGHTS = jnp.array([0.7, 0.2, 0.1, 0.0, 0.0])
VALUES = jax.random.normal(jax.random.key(3), (5, 2))  # so that many weights have the same output


def outputs(weights):
  return jax.nn.softmax(4 * weights @ VALUES)


def constant(weights):
  return jnp.full(3, 1 / 3) + 0 * weights.sum()


def test_kendall_counts_pairs_of_unmasked_positions():
  rng = np.random.default_rng(0)
  a = rng.permutation(6).astype(float)
  b = rng.permutation(6).astype(float)
  signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in itertools.combinations(range(6), 2)]
  tau = analysis.kendall(np.stack([a, a, a]), np.stack([b, a, -a]))
  np.testing.assert_allclose(tau, [np.mean(signs), 1, -1])
  weights = jnp.array([[0.1, 0.5, 0.4]], jnp.bfloat16)
  np.testing.assert_allclose(analysis.kendall(weights, -weights), [-1])
  a, b = np.array([[1.0, 2.0, 3.0, 9.0]]), np.array([[1.0, 2.0, 3.0, -9.0]])
  assert analysis.kendall(a, b) < 1
  assert analysis.kendall(a, b, np.array([True, True, True, False])) == 1
  assert np.isnan(analysis.kendall(a, np.ones((1, 4)))[0])  # of a constant
  assert np.isnan(analysis.kendall(a[:, :1], a[:, :1])[0])  # of one position


def test_distances_of_distributions():
  p = jnp.array([1.0, 0.0])
  q = jnp.array([0.5, 0.5])
  assert analysis.total_variation(p, q) == pytest.approx(0.5)
  assert analysis.jensen_shannon(p, jnp.array([0.0, 1.0])) == pytest.approx(np.log(2), rel=1e-6)
  by_hand = 0.5 * np.log(1 / 0.75) + 0.5 * (0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25))
  assert analysis.jensen_shannon(p, q) == pytest.approx(by_hand, rel=1e-6)
  assert analysis.jensen_shannon(p, p) == 0


@pytest.mark.long
@pytest.mark.parametrize('small', [1.2e-38, 1e-30, 1e-20, 1e-10])
def test_divergences_of_tiny_weights_and_their_gradients_are_finite(small):
  p = jnp.array([1.0, small])
  q = jnp.array([1.0, 0.0])
  value, gradient = jax.value_and_grad(analysis.jensen_shannon)(p, q)
  assert value == pytest.approx(small * np.log(2) / 2, rel=1e-4, abs=1e-37)
  assert gradient[0] == 0
  assert gradient[1] == pytest.approx(np.log(2) / 2 if small > 1e-35 else 0, rel=1e-4)


@pytest.mark.long
def test_the_effect_of_permutations_is_0_for_a_constant_output_and_for_masked_positions():
  one_hot = jnp.array([1.0, 0, 0, 0, 0])

  def effect(outputs):
    return analysis.permutation_effect(outputs, one_hot, MASK, jax.random.key(0))

  assert effect(constant) == 0
  # With one weight of 1 over four positions, three of four permutations move it: the median is of a moved one.
  assert effect(lambda weights: jnp.stack([weights[0], 1 - weights[0]])) == 1
  assert effect(lambda weights: jnp.stack([weights[4], 1 - weights[4]])) == 0


def attack(outputs, weights=WEIGHTS, **options):
  return analysis.adversarial_weights(outputs, weights, MASK, jax.random.key(1), **options)


@pytest.mark.long
def test_the_output_of_adversarial_weights_is_within_epsilon():
  adversarial = attack(outputs, epsilon=0.05)
  assert 0.01 < adversarial.divergence < np.log(2)
  assert analysis.total_variation(outputs(adversarial.weights), outputs(WEIGHTS)) <= 0.05
  assert adversarial.weights.sum() == pytest.approx(1, rel=1e-5) and adversarial.weights[4] == 0


def test_adversarial_weights_are_far_from_the_original_ones_unless_no_step_is_within_epsilon():
  adversarial = attack(constant, jnp.array([1.0, 0, 0, 0, 0]))
  assert adversarial.divergence > 0.9 * np.log(2) and adversarial.weights[0] < 0.1
  adversarial = attack(outputs, epsilon=1e-9, steps=3)
  np.testing.assert_array_equal(adversarial.weights, WEIGHTS)
  assert adversarial.divergence == 0
  adversarial = attack(outputs, WEIGHTS.astype(jnp.bfloat16), steps=3)
  assert adversarial.weights.dtype == jnp.float32 and np.isfinite(adversarial.divergence)
