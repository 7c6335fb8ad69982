"""Attributions of functions whose gradients and integrals are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import analysis

INPUTS = jax.random.normal(jax.random.key(0), (5, 3))  # [S, D]
KERNEL = jax.random.normal(jax.random.key(1), (2, 5, 3))  # [T, S, D]


def linear(x):
  return jnp.einsum('tsd,sd->t', KERNEL, x)


@pytest.mark.long
@pytest.mark.parametrize('attribute', [analysis.gradient_times_input, analysis.integrated_gradients])
def test_attributions_of_a_linear_function_are_its_terms(attribute):
  np.testing.assert_allclose(attribute(linear, INPUTS), jnp.einsum('tsd,sd->ts', KERNEL, INPUTS), rtol=1e-5)


@pytest.mark.long
def test_integrated_gradients_of_a_square_are_the_square():
  # f = Σ x²: the gradient is 2x, its mean on the path from 0 is x. gradient x input is 2x², twice the square.
  def square(x):
    return jnp.sum(x**2)[None]

  expected = (INPUTS**2).sum(-1)[None]
  np.testing.assert_allclose(analysis.integrated_gradients(square, INPUTS), expected, rtol=1e-5)
  np.testing.assert_allclose(analysis.gradient_times_input(square, INPUTS), 2 * expected, rtol=1e-5)


@pytest.mark.long
def test_integrated_gradients_sum_to_the_change_of_the_output():
  def fn(x):
    return jnp.tanh(linear(x)) * jnp.sin(x).sum()

  baseline = jax.random.normal(jax.random.key(2), INPUTS.shape)
  change = fn(INPUTS) - fn(baseline)
  errors = [
    np.abs(analysis.integrated_gradients(fn, INPUTS, baseline, steps).sum(1) - change).max() for steps in (10, 200)
  ]
  assert errors[1] < 1e-3 and errors[1] < errors[0]


def test_integrated_gradients_of_normalised_inputs_are_their_terms():
  def normalise(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)

  expected = jnp.einsum('tsd,sd->ts', KERNEL, normalise(INPUTS))
  attributions = analysis.integrated_gradients(lambda x: linear(normalise(x)), INPUTS)
  np.testing.assert_allclose(attributions, expected, rtol=0.05)


@pytest.mark.long
def test_integrated_gradients_of_16_bit_inputs_are_summed_in_32_bits():
  inputs = INPUTS.astype(jnp.bfloat16)

  def fn(x):
    return linear(jnp.tanh(x.astype(jnp.float32)))

  expected = analysis.integrated_gradients(fn, inputs.astype(jnp.float32), steps=1000)
  attributions = analysis.integrated_gradients(fn, inputs, steps=1000)
  assert attributions.dtype == jnp.float32
  np.testing.assert_allclose(attributions, expected, atol=0.01)


@pytest.mark.long
def test_leaving_a_position_out_of_a_sum_loses_its_term():
  terms = jnp.array([[1.0, 2.0, 3.0, 7.0], [0.0, -1.0, 0.5, 7.0]])
  mask = jnp.array([True, True, True, False])
  lost = analysis.leave_one_out(lambda mask: terms @ mask.astype(jnp.float32), mask)
  np.testing.assert_allclose(lost, [[1, 2, 3, 0], [0, -1, 0.5, 0]])


@pytest.mark.long
def test_leaving_out_a_masked_position_changes_nothing_even_if_the_output_is_infinite():
  lost = analysis.leave_one_out(lambda mask: jnp.log(0 * mask[:2]), jnp.array([True, False, True]))
  np.testing.assert_array_equal(lost[:, 1], 0)
