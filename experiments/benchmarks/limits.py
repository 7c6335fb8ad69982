"""Limits of the machine, measured in the same run: products of matrices, copies, special functions."""

import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.masking import accumulation_dtype
from attention_jax.modules.linear import product
from experiments.benchmarks.measure import BenchmarkContext, Timing, compare, jit_side, median_seconds

MATRIX_ROWS = {'cpu': 2048}  # rows of the square product
ACCELERATOR_ROWS = 8192  # large enough that the overhead of a call is negligible
COPIED_VALUES = 2**25  # more than any cache holds
VALUES = 2**20  # values that are read for the special functions
EVALUATIONS = 64  # evaluations of a special function for each value that is read


def machine_limits(bench: BenchmarkContext) -> list[Timing]:
  """Measures the rates of a square product, of a copy larger than any cache, of tanh and of division.

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
    (seconds, FLOP).
  """
  seconds = 0.0
  flop = 0.0
  for (left, right, dimensions, dtype), count in counts.items():
    x = jnp.ones(left, dtype)
    y = jnp.ones(right, dtype)
    multiply = _matmul(x, y, dimensions)
    out = jax.eval_shape(multiply, x, y)
    (contracted, _), _ = dimensions
    product_flop = 2 * np.prod(out.shape) * np.prod([left[i] for i in contracted])
    if gradients:
      side = jit_side(_with_gradients(multiply), x, y, jnp.ones(out.shape, out.dtype))
    else:
      side = jit_side(multiply, x, y)
    seconds += count * median_seconds(side, repeats=5)
    flop += count * product_flop * (3 if gradients else 1)
  return seconds, float(flop)


def _matmul(x: jax.Array, y: jax.Array, dimensions) -> Callable:
  """Returns the product of arrays like x and y over these dimension numbers, as the models compute it."""
  last_with_first = (((x.ndim - 1,), (0,)), ((), ()))
  if y.ndim <= 2 and dimensions == last_with_first:
    return product
  return functools.partial(
    jax.lax.dot_general, dimension_numbers=dimensions, preferred_element_type=accumulation_dtype(x, y)
  )


def _with_gradients(multiply: Callable) -> Callable:
  """Returns (x, y, gradient of the product) -> (product, gradients of x and y)."""
  return lambda x, y, gradient: (multiply(x, y), *jax.vjp(multiply, x, y)[1](gradient))
