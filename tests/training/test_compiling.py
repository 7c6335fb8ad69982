"""Compiler options of programs that run a few times."""

import jax
import jax.numpy as jnp
import pytest

from attention_jax.training.compiling import FEW_PARAMETER_RUNS, FEW_RUNS, CompiledForRuns, compiler_options, jit_once
from attention_jax.training.partition import make_mesh


@pytest.mark.parametrize(
  ('runs', 'parameters', 'platform', 'is_quick'),
  [
    (1, 0, 'cpu', True),
    (FEW_RUNS, 0, 'cpu', True),
    (FEW_RUNS + 1, 0, 'cpu', False),
    (10, FEW_PARAMETER_RUNS // 10, 'cpu', True),
    (10, FEW_PARAMETER_RUNS // 10 + 1, 'cpu', False),
    (1, 0, 'tpu', False),
    (1, 0, None, True),
  ],
)
def test_few_runs_of_a_small_model_on_a_cpu_are_compiled_quickly(runs, parameters, platform, is_quick):
  assert (compiler_options(runs, parameters, platform) is not None) == is_quick


def test_a_function_that_runs_once_can_be_traced_and_called():
  """jax rejects compiler options in a program that is part of another one."""
  double = jit_once(lambda x: 2 * x)
  assert double(jnp.float32(3)) == 6
  assert jax.eval_shape(double, jnp.zeros(4)).shape == (4,)
  assert jax.jit(jax.grad(double))(jnp.float32(3)) == 2


def test_few_and_many_runs_are_separate_programs_of_one_function():
  num_traces = 0

  def add_one(x):
    nonlocal num_traces
    num_traces += 1
    return x + 1

  compiled = CompiledForRuns(make_mesh(), add_one)
  for runs in (1, FEW_RUNS, FEW_RUNS + 1, 1000):
    assert compiled.select(runs, jnp.ones(3))(jnp.float32(1)) == 2
  assert compiled.select(2, jax.ShapeDtypeStruct((FEW_PARAMETER_RUNS,), jnp.float32))(jnp.float32(1)) == 2
  assert num_traces == 2
