"""Addressing and writing of a memory equal the equations of Graves et al. 2014."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.addressing import sharpen, shift_weights, write_memory
from tests.modules.helpers import draw

SLOTS, WIDTH = 5, 3


def test_write_erases_then_adds():
  memory = np.asarray(draw(SLOTS, WIDTH))
  weights = np.asarray(jax.nn.softmax(draw(2, SLOTS)))
  erase = np.asarray(jax.nn.sigmoid(draw(2, WIDTH, seed=1)))
  add = np.asarray(draw(2, WIDTH))
  expected = memory.copy()
  for s in range(SLOTS):
    for d in range(WIDTH):
      for h in range(2):
        expected[s, d] *= 1 - weights[h, s] * erase[h, d]
      for h in range(2):
        expected[s, d] += weights[h, s] * add[h, d]
  np.testing.assert_allclose(write_memory(*map(jnp.asarray, (memory, weights, erase, add))), expected, rtol=1e-5)


@pytest.mark.long
def test_weights_shift_circularly_and_are_sharpened():
  """Beside the literal loop of the alignment: what a mask with a gap moves to masked positions, and large powers."""
  mask = jnp.array([1, 1, 0, 1, 0], bool)
  forward = jnp.array([0.0, 0, 1])
  shifted = shift_weights(jnp.array([0.3, 0.5, 0, 0.2, 0]), mask, forward)
  np.testing.assert_allclose(shifted, [0.2, 0.3, 0, 0, 0], rtol=1e-6)
  # All shifted weight would be masked, so that the weights stay unshifted.
  assert shift_weights(jnp.array([0.0, 1, 0, 0, 0]), mask, forward).tolist() == [0, 1, 0, 0, 0]
  weights = jnp.array([0, 0.2, 0.1, 0.7, 0])
  wrapped = shift_weights(weights, jnp.array([0, 1, 1, 1, 0], bool), jnp.array([0.0, 0, 0, 0, 1]))  # by 2 of 3
  np.testing.assert_allclose(wrapped, [0, 0.1, 0.7, 0.2, 0], rtol=1e-6)
  assert sharpen(weights, jnp.array(1e4)).tolist() == [0, 0, 0, 1, 0]
  assert not sharpen(0 * weights, jnp.array(2.0)).any()


@pytest.mark.long
@pytest.mark.parametrize('weights', [[0.999, 1e-7, 0], [0.7, 0.3, 1e-4], [0.5, 0.5, 1e-8]])
def test_gradient_of_sharpening_equals_the_formula(weights):
  weights = np.array(weights)
  power = 1.2
  powers = weights**power
  slopes = power * np.where(weights > 0, weights, 1) ** (power - 1) * (weights > 0)
  expected = np.diag(slopes) / powers.sum() - np.outer(powers, slopes) / powers.sum() ** 2
  jacobian = jax.jacobian(sharpen)(jnp.array(weights, jnp.float32), jnp.array(power))
  np.testing.assert_allclose(jacobian[:, weights > 0], expected[:, weights > 0], rtol=1e-3, atol=1e-6)
