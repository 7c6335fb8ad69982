"""Limits of the machine, measured in the same run: products of matrices, copies, special functions."""

import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.masking import accumulation_dtype
from attention_jax.modules.linear import product
from lab.benchmarks.measure import (
  BenchmarkContext,
  Side,
  Timing,
  compare,
  compile_sides,
  jit_side,
  median_seconds,
)

MATRIX_ROWS = {'cpu': 2048}  # backend -> rows of each factor of the square product
ACCELERATOR_ROWS = 8192  # on other backends; large enough that the overhead of a call is negligible
COPIED_VALUES = 2**25  # float32, 128 MiB: more than most caches hold
VALUES = 2**20  # values that are read for the special functions
EVALUATIONS = 64  # evaluations of a special function for each value that is read


def machine_limits(bench: BenchmarkContext) -> list[Timing]:
  """Measures the rates of a square product, of a copy of COPIED_VALUES, of tanh and of division.

  tanh and division are evaluated many times for each value that is read; otherwise the reading would dominate.
  """
  bench.log('limits of this machine')
  size = MATRIX_ROWS.get(jax.default_backend(), ACCELERATOR_ROWS)
  matrix = jnp.ones((size, size), bench.dtype)
  values = jnp.linspace(-3.0, 3.0, COPIED_VALUES)
  cases = (
    ('matrix product', lambda x: product(x, x), matrix, 2 * size**3, 'FLOP'),
    ('copy', lambda x: x + 1, values, 8 * COPIED_VALUES, 'B'),
    ('tanh', _evaluate_often(jnp.tanh), values[:VALUES], EVALUATIONS * VALUES, 'values'),
    ('division', _evaluate_often(lambda x: 1 / (x + 4)), values[:VALUES], EVALUATIONS * VALUES, 'values'),
  )
  timings = []
  for name, fn, x, amount, unit in cases:
    timings += compare('limits', name, {'xla': jit_side(fn, x)}, amount=amount, unit=unit)
  return timings


def _evaluate_often(fn: Callable) -> Callable:
  """Returns a function that sums `fn` over EVALUATIONS shifted copies of its argument."""
  return lambda x: functools.reduce(jnp.add, [fn(x + step / EVALUATIONS) for step in range(EVALUATIONS)])


def time_matmuls(counts: Counter, *, gradients: bool) -> tuple[float, float]:
  """Times products of matrices by themselves, one after the other.

  Args:
    counts: as `systems.costs.count_matmuls` returns them.
    gradients: whether to include the gradients with respect to both factors.

  Returns:
    (seconds, FLOP) of all products together.
  """
  seconds = 0.0
  flop = 0.0
  makers = {matmul: functools.partial(_matmul_side, *matmul, gradients=gradients) for matmul in counts}
  for matmul, side in compile_sides(makers).items():
    left, right, dimensions, _ = matmul
    out = jax.eval_shape(_matmul(left, right, dimensions), *_factors(*matmul))
    (contracted, _), _ = dimensions
    product_flop = 2 * np.prod(out.shape) * np.prod([left[i] for i in contracted])
    seconds += counts[matmul] * median_seconds(side, repeats=5)
    flop += counts[matmul] * product_flop * (3 if gradients else 1)
  return seconds, float(flop)


def _factors(left, right, dimensions, dtype) -> tuple[jax.Array, jax.Array]:
  return jnp.ones(left, dtype), jnp.ones(right, dtype)


def _matmul_side(left, right, dimensions, dtype, *, gradients: bool) -> Side:
  """Returns a product of matrices of these shapes as a side, with both gradients or without."""
  x, y = _factors(left, right, dimensions, dtype)
  multiply = _matmul(left, right, dimensions)
  if not gradients:
    return jit_side(multiply, x, y)
  out = jax.eval_shape(multiply, x, y)
  return jit_side(_with_gradients(multiply), x, y, jnp.ones(out.shape, out.dtype))


def _matmul(left, right, dimensions) -> Callable:
  """Returns the product of arrays of these shapes over these dimension numbers, as the models compute it."""
  last_with_first = (((len(left) - 1,), (0,)), ((), ()))
  if len(right) == 2 and dimensions == last_with_first:
    return product
  return lambda x, y: jax.lax.dot_general(
    x, y, dimension_numbers=dimensions, preferred_element_type=accumulation_dtype(x, y)
  )


def _with_gradients(multiply: Callable) -> Callable:
  """Returns (x, y, gradient of the product) -> (product, gradients of x and y)."""
  return lambda x, y, gradient: (multiply(x, y), *jax.vjp(multiply, x, y)[1](gradient))
