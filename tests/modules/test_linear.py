"""Products of a lower precision: summed in float32, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.modules.linear import product, sum_outer_products


def given(dtype):
  rngs = jax.random.split(jax.random.key(0), 3)
  return [
    jax.random.normal(r, shape).astype(dtype) for r, shape in zip(rngs, [(2, 3, 300), (300, 5), (2, 3, 5)], strict=True)
  ]


def in_float64(spec, *operands):
  return np.einsum(spec, *(np.asarray(x, np.float64) for x in operands))


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_it_is_rounded_once(dtype):
  x, kernel, slope = given(dtype)
  value, gradients = jax.vjp(product, x, kernel)
  to_x, to_kernel = gradients(slope)
  for found, spec, operands in (
    (value, 'btd,df->btf', (x, kernel)),
    (to_x, 'btf,df->btd', (slope, kernel)),
    (to_kernel, 'btd,btf->df', (x, slope)),
  ):
    assert found.dtype == dtype
    np.testing.assert_allclose(
      np.asarray(found, np.float64), in_float64(spec, *operands), rtol=0.51 * float(jnp.finfo(dtype).eps), atol=1e-5
    )


def test_more_is_kept_where_it_is_asked_for():
  x, kernel, _ = given(jnp.bfloat16)
  found = product(x, kernel, jnp.float32)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, in_float64('btd,df->btf', x, kernel), rtol=1e-5, atol=1e-5)
  assert jax.grad(lambda x: product(x, kernel, jnp.float32).sum())(x).dtype == jnp.bfloat16


def test_float32_can_be_differentiated_forward():
  x, kernel, _ = given(jnp.float32)
  _, found = jax.jvp(lambda x: product(x, kernel), (x,), (jnp.ones_like(x),))
  np.testing.assert_allclose(found, in_float64('btd,df->btf', jnp.ones_like(x), kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('rows', [1, 3, 12, 16])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_sums_over_rows(rows, dtype):
  left, right = (jax.random.normal(jax.random.key(i), (rows, 3 + i)).astype(dtype) for i in range(2))
  found = sum_outer_products(left, right, jnp.float32)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, in_float64('nd,nf->df', left, right), rtol=1e-5, atol=1e-5)
