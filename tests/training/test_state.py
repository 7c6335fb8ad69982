"""The moving average of parameters follows its formula."""

import jax.numpy as jnp
import numpy as np

from attention_jax.training.state import update_average


def test_the_average_follows_its_formula():
  average = {'w': jnp.zeros(2)}
  expected = np.zeros(2)
  for n in range(1, 40):
    params = np.array([n, -n], np.float32)
    d = min(0.8, (1 + n) / (10 + n))
    expected = d * expected + (1 - d) * params
    average = update_average(average, {'w': jnp.asarray(params)}, jnp.int32(n), 0.8)
  np.testing.assert_allclose(average['w'], expected, rtol=1e-5)
  assert update_average((), {'w': jnp.ones(2)}, jnp.int32(1), 0.0) == ()
