"""Compiler options of programs that run a few times."""

import jax
import jax.numpy as jnp
import pytest

from attention_jax.training.compiling import FEW_RUNS, CompiledForRuns, compiler_options, jit_once
from attention_jax.training.partition import make_mesh


@pytest.mark.parametrize(
  ('runs', 'platform', 'is_quick'),
  [(1, 'cpu', True), (FEW_RUNS, 'cpu', True), (FEW_RUNS + 1, 'cpu', False), (1, 'tpu', False), (1, None, True)],
)
def test_few_runs_on_a_cpu_are_compiled_quickly(runs, platform, is_quick):
  assert (compiler_options(runs, platform) is not None) == is_quick


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
    assert compiled(runs)(jnp.float32(1)) == 2
  assert num_traces == 2
