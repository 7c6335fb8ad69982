"""Kernels are traced for a platform, or for a count of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.errors import UserError
from attention_jax.kernels.target import compile_for, kernel_platform, trace_for_counting
from attention_jax.systems.costs import count_matmuls


def test_a_function_is_traced_for_each_platform_and_the_outer_platform_is_restored():
  machine = kernel_platform()
  is_for_tpu = jax.jit(lambda: jnp.array(kernel_platform() == 'tpu'))
  assert not is_for_tpu()
  with compile_for('tpu'):
    with compile_for('gpu'):
      assert kernel_platform() == 'gpu' and not is_for_tpu()
    assert kernel_platform() == 'tpu' and is_for_tpu()
  assert kernel_platform() == machine and not is_for_tpu()
  with pytest.raises(UserError, match=r"unknown platform 'tpuu' \(did you mean 'tpu'\?\)"), compile_for('tpuu'):
    pass


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['flash', 'auto'])
def test_products_are_counted_in_the_definition(implementation):
  query, key, value = (jax.random.normal(jax.random.key(i), (512, 4)) for i in range(3))

  def attend(implementation):
    return aj.attend(query, key, value, implementation=implementation, return_weights=False).context

  with trace_for_counting():
    counted = count_matmuls(lambda: attend(implementation))
  assert counted == count_matmuls(lambda: attend('xla'))
  np.testing.assert_allclose(attend(implementation), attend('xla'), rtol=1e-4, atol=1e-5)
