"""The moving average of parameters follows its formula, and numbers that are not finite are found."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.training.state import init_state, is_finite, update_average


@pytest.mark.long
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


def test_a_state_with_any_number_that_is_not_finite_is_found():
  state = init_state({'w': jnp.ones(3)}, optax.adam(0.1), 0.9, ['loss'])
  assert is_finite(state)
  for value in (jnp.nan, jnp.inf):
    bad = {'w': jnp.array([1.0, value, 1.0])}
    assert not is_finite(state._replace(params=bad)) and not is_finite(state._replace(average=bad))
    assert not is_finite(state._replace(running={'loss': jnp.float32(value)}))
