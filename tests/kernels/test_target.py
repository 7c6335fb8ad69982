"""The platform that kernels are compiled for."""

import jax
import jax.numpy as jnp
import pytest

from attention_jax.errors import UserError
from attention_jax.kernels.target import compile_for, kernel_platform


def test_blocks_may_be_nested():
  machine = kernel_platform()
  with compile_for('tpu'):
    with compile_for('gpu'):
      assert kernel_platform() == 'gpu'
    assert kernel_platform() == 'tpu'
  assert kernel_platform() == machine


def test_a_function_is_traced_for_each_platform():
  @jax.jit
  def is_for_tpu():
    return jnp.array(kernel_platform() == 'tpu')

  assert not is_for_tpu()
  with compile_for('tpu'):
    assert is_for_tpu()
  assert not is_for_tpu()


def test_an_unknown_platform_raises():
  with pytest.raises(UserError, match=r"unknown platform 'tpuu' \(did you mean 'tpu'\?\)"), compile_for('tpuu'):
    pass
