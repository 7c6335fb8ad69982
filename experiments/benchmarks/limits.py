"""What the machine can do at most, measured in the same run: products of matrices, copies, special functions."""

import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from attention_jax.functional.masking import accumulation_dtype
from attention_jax.modules.linear import product
from experiments.benchmarks.measure import BenchmarkContext, Timing, compare, jit_side

ROWS = {'cpu': 2048}  # of the square product; elsewhere 8192, beside which a call takes no time
VALUES, TIMES = 2**20, 64  # numbers that are read, and special functions of each


def _median(fn: Callable, *args, repeats: int = 5) -> float:
  return compare('', '', {'': jit_side(fn, *args)}, repeats=repeats)[0].median


def machine_limits(bench: BenchmarkContext) -> list[Timing]:
  """Rates of a square product, of a copy that no cache holds, and of tanh and a division without either.

  Of those two many are taken of each number that is read, or it would be the reading that is measured.
  """
  bench.log('limits of this machine')
  size, many = ROWS.get(jax.default_backend(), 8192), 2**25
  square, long = jnp.ones((size, size), bench.dtype), jnp.linspace(-3.0, 3.0, many)
  each = lambda fn: lambda x: functools.reduce(jnp.add, [fn(x + step / TIMES) for step in range(TIMES)])
  cases = (
    ('matrix product', lambda x: product(x, x), square, 2 * size**3, 'FLOP'),
    ('copy', lambda x: x + 1, long, 8 * many, 'B'),
    ('tanh', each(jnp.tanh), long[:VALUES], TIMES * VALUES, 'values'),
    ('division', each(lambda x: 1 / (x + 4)), long[:VALUES], TIMES * VALUES, 'values'),
  )
  timings = []
  for name, fn, x, amount, unit in cases:
    timings += compare('limits', name, {'xla': jit_side(fn, x)}, amount=amount, unit=unit)
  return timings


def count_matmuls(fn: Callable, *args) -> Counter:
  """How often fn(*args) multiplies matrices of which shapes: {(left, right, dimensions, type): times}."""
  found = Counter()

  def walk(jaxpr, times):
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'dot_general':
        left, right = (v.aval for v in equation.invars)
        found[left.shape, right.shape, equation.params['dimension_numbers'], str(left.dtype)] += times
      inner = times * equation.params.get('length', 1) if equation.primitive.name == 'scan' else times
      for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
          if isinstance(part, core.ClosedJaxpr | core.Jaxpr):
            walk(part.jaxpr if isinstance(part, core.ClosedJaxpr) else part, inner)

  whole = jax.make_jaxpr(fn)(*args).jaxpr
  used, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))  # without what nobody looks at, as compiled
  walk(used, 1)
  return found


def time_matmuls(found: Counter, *, gradients: bool) -> tuple[float, float]:
  """(seconds, FLOP) of these products by themselves, one after the other; with their gradients if so asked."""
  seconds = flop = 0.0
  for (left, right, dimensions, dtype), times in found.items():
    x, y = jnp.ones(left, dtype), jnp.ones(right, dtype)
    one = product
    if len(right) > 2 or dimensions != (((len(left) - 1,), (0,)), ((), ())):
      one = functools.partial(
        jax.lax.dot_general, dimension_numbers=dimensions, preferred_element_type=accumulation_dtype(x, y)
      )
    (contracted, _), _ = dimensions
    out = jax.eval_shape(one, x, y)
    own = 2 * np.prod(out.shape) * np.prod([left[i] for i in contracted])
    run = one
    if gradients:
      run = lambda x, y, g, one=one: (one(x, y), *jax.vjp(one, x, y)[1](g))
    seconds += times * _median(run, x, y, *([jnp.ones(out.shape, out.dtype)] if gradients else []))
    flop += times * own * (3 if gradients else 1)
  return seconds, float(flop)
