"""Products in low precision are summed in float32; Dense has the parameters and values of flax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.kernels.target import compile_for
from attention_jax.modules.linear import ConcatDense, Dense, product, product_with_transpose, sum_outer_products
from tests.modules.helpers import assert_same, draw, gradient_error_of_16_bits, variables


def make_operands(dtype):
  """Returns x [B, T, D], a kernel [D, F] and a cotangent [B, T, F]."""
  rngs = jax.random.split(jax.random.key(0), 3)
  shapes = [(2, 3, 300), (300, 5), (2, 3, 5)]
  return [jax.random.normal(rng, shape).astype(dtype) for rng, shape in zip(rngs, shapes, strict=True)]


def einsum_float64(spec, *operands):
  return np.einsum(spec, *(np.asarray(x, np.float64) for x in operands))


@pytest.mark.long
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_values_and_gradients_are_rounded_once(dtype):
  x, kernel, cotangent = make_operands(dtype)
  value, vjp = jax.vjp(product, x, kernel)
  x_gradient, kernel_gradient = vjp(cotangent)
  rtol = 0.51 * float(jnp.finfo(dtype).eps)
  for actual, spec, operands in (
    (value, 'btd,df->btf', (x, kernel)),
    (x_gradient, 'btf,df->btd', (cotangent, kernel)),
    (kernel_gradient, 'btd,btf->df', (x, cotangent)),
  ):
    assert actual.dtype == dtype
    np.testing.assert_allclose(np.float64(actual), einsum_float64(spec, *operands), rtol=rtol, atol=1e-5)


def test_the_result_may_have_a_higher_precision():
  x, kernel, _ = make_operands(jnp.bfloat16)
  actual = product(x, kernel, jnp.float32)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, einsum_float64('btd,df->btf', x, kernel), rtol=1e-5, atol=1e-5)
  assert jax.grad(lambda x: product(x, kernel, jnp.float32).sum())(x).dtype == jnp.bfloat16


def test_float32_products_support_forward_mode_differentiation():
  x, kernel, _ = make_operands(jnp.float32)
  _, actual = jax.jvp(lambda x: product(x, kernel), (x,), (jnp.ones_like(x),))
  np.testing.assert_allclose(actual, einsum_float64('btd,df->btf', jnp.ones_like(x), kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('rows', [1, 3, 12, 16])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_sums_of_outer_products_equal_einsum(rows, dtype):
  left, right = (jax.random.normal(jax.random.key(i), (rows, 3 + i)).astype(dtype) for i in range(2))
  for x, y in ((left, right), (right, left)):
    actual = sum_outer_products(x, y, jnp.float32)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, einsum_float64('nd,nf->df', x, y), rtol=1e-5, atol=1e-5)
    with compile_for('gpu'):
      np.testing.assert_allclose(sum_outer_products(x, y, jnp.float32), actual, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_products_with_a_transposed_kernel_equal_einsum(dtype):
  x = jax.random.normal(jax.random.key(0), (5, 64)).astype(dtype)
  kernel = jax.random.normal(jax.random.key(1), (3, 64)).astype(dtype)
  actual = product_with_transpose(x, kernel)
  assert actual.dtype == dtype
  rtol = 2 * float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(np.float64(actual), einsum_float64('nf,df->nd', x, kernel), rtol=rtol, atol=10 * rtol)


@pytest.mark.long
@pytest.mark.parametrize('use_bias', [False, True])
def test_dense_has_the_parameters_and_values_of_flax(use_bias):
  x = draw(5, 7, 3)
  params = nn.Dense(4, use_bias).init(jax.random.key(0), x)
  assert_same(Dense(4, use_bias).init(jax.random.key(0), x), params)
  params = jax.tree.map(lambda array: array + 0.5, params)
  np.testing.assert_allclose(Dense(4, use_bias).apply(params, x), nn.Dense(4, use_bias).apply(params, x), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize('layer', [Dense, functools.partial(ConcatDense, use_bias=True)], ids=['Dense', 'ConcatDense'])
def test_gradients_of_biases_are_not_summed_in_16_bits(layer):
  x = draw(64, 40, 3)
  assert gradient_error_of_16_bits(lambda dtype: layer(4, dtype=dtype), variables(layer(4), x), x) < 0.01
