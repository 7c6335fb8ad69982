"""Windows, weight-normalised layers, convolutions over pictures, and scaled gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.modules.convolution import Conv, GatedConvolution, Normed, scale_gradient, scaled_residual, windows
from tests.modules.helpers import assert_close, assert_same, draw, gradient_error_of_16_bits, variables


@pytest.mark.long
def test_windows_are_zero_beyond_the_ends():
  x = jnp.arange(1.0, 7.0).reshape(1, 3, 2)
  assert windows(x, 2, 0).tolist() == [[[0, 0, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]]
  assert windows(x, 1, 1).tolist() == [[[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 0, 0]]]
  assert_same(windows(x, 0, 0), x)
  assert windows(x, 5, 4).shape == (1, 3, 20)  # wider than the sequence


@pytest.mark.long
def test_scale_gradient_changes_the_gradient_alone():
  value, gradient = jax.value_and_grad(lambda x: jnp.sum(scale_gradient(x, 0.25) ** 2))(draw(5))
  assert_same((value, gradient), (jnp.sum(draw(5) ** 2), 0.25 * 2 * draw(5)))


def test_gains_are_the_norms_of_the_weights():
  x = draw(5, 7, 3)
  params = variables(Normed(4), x)
  p = {name: np.asarray(param, np.float64) for name, param in params['params'].items()}
  weights = p['gain'] * p['direction'] / np.sqrt((p['direction'] ** 2).sum(0))
  assert_close(Normed(4).apply(params, x), np.asarray(x) @ weights + p['bias'])
  longer = {'params': params['params'] | {'direction': 3 * params['params']['direction']}}
  assert_close(Normed(4).apply(longer, x), Normed(4).apply(params, x))


@pytest.mark.long
def test_initial_parameters_preserve_the_variance():
  """Gehring et al. 2017, section 3.5, with dropout; a gate keeps at least a quarter of the variance."""
  x = draw(4000, 96)
  keep = 0.7
  dropped = jnp.where(jax.random.uniform(jax.random.key(1), x.shape) < keep, x / keep, 0)
  y, params = Normed(64, keep).init_with_output(jax.random.key(0), dropped)
  np.testing.assert_allclose(y.var(), 1, rtol=0.1)
  assert_close(params['params']['gain'], jnp.sqrt((params['params']['direction'] ** 2).sum(0)))
  gate_inputs = Normed(64, 4 * keep).init_with_output(jax.random.key(0), dropped)[0]
  np.testing.assert_allclose(gate_inputs.var(), 4, rtol=0.1)
  y = GatedConvolution(32, 1 - keep).init_with_output(jax.random.key(0), dropped)[0]
  assert 0.9 < y.var() < 1.6
  np.testing.assert_allclose(scaled_residual(x[:2000], x[2000:]).var(), 1, rtol=0.1)


@pytest.mark.long
@pytest.mark.parametrize('strides', [1, 2])
def test_convolutions_over_pictures_have_the_parameters_and_values_of_flax(strides):
  pictures = draw(2, 7, 6, 3)
  params = nn.Conv(4, (5, 3), strides).init(jax.random.key(0), pictures)
  assert_same(Conv(4, (5, 3), strides).init(jax.random.key(0), pictures), params)
  params = jax.tree.map(lambda array: array + 0.5, params)
  assert_close(Conv(4, (5, 3), strides).apply(params, pictures), nn.Conv(4, (5, 3), strides).apply(params, pictures))


@pytest.mark.long
def test_gradients_of_biases_are_not_summed_in_16_bits():
  pictures = draw(8, 24, 24, 3)
  for make_layer in (lambda dtype: Conv(4, (3, 3), dtype=dtype), lambda dtype: Normed(4, dtype=dtype)):
    params = variables(make_layer(jnp.float32), pictures)
    assert gradient_error_of_16_bits(make_layer, params, pictures) < 0.02
