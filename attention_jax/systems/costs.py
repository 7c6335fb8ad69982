"""Costs of an update: the floating-point operations of its matrix products.

Products are counted in the traced program. XLA's own cost analysis counts the body of a loop once, however many steps
the loop has, and thus reports far too few operations for a recurrent model.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from attention_jax.data.pipeline import epoch_steps
from attention_jax.kernels.target import trace_for_counting
from attention_jax.systems.base import System
from attention_jax.training.step import step_rngs

COUNTED_BATCHES = 100  # at most; enough for the mean over the shapes of the buckets


def update_flop(system: System) -> float:
  """Returns the FLOP of the matrix products of one update, forward and backward; the mean over the first batches.

  Args:
    system: a system with its data.
  """
  batches = system.batches(system.config.training.seed)
  count = flop_counter(system)
  flop_of: dict[tuple[int, ...], float] = {}
  total = 0.0
  steps = min(epoch_steps(batches, COUNTED_BATCHES), COUNTED_BATCHES)
  for step in range(steps):
    shape = batches.shape(step)
    if shape not in flop_of:
      flop_of[shape] = count(batches[step])
    total += flop_of[shape]
  return total / steps


def flop_counter(system: System) -> Callable[[Any], float]:
  """Returns batch -> the FLOP of the matrix products of an update with it, forward and backward.

  Convolutions, element-wise operations such as exponentials, and the optimiser are not counted. The implementations
  `flash`, `cudnn` and `pallas_additive` count as the definition of attention, because their own products are in
  kernels, or in loops and branches whose repetitions depend on the mask.

  Args:
    system: a system.
  """
  initializer = system.initializer()
  params = jax.eval_shape(lambda: initializer(0))
  loss = system.loss

  def gradients(params, batch):
    def objective(params):
      return loss(params, batch, step_rngs(jax.random.key(0)), dict.fromkeys(loss.running, 0.0), 1)['loss']

    return jax.grad(objective)(params)

  def count(batch):
    with trace_for_counting():
      return matmul_flop(count_matmuls(gradients, params, batch))

  return count


def matmul_flop(counts: Counter) -> float:
  """Returns the FLOP of products as `count_matmuls` counts them: a multiplication and an addition per term."""
  total = 0.0
  for (left, right, dimensions, _), count in counts.items():
    (_, right_contracted), (_, right_batch) = dimensions
    free = [size for axis, size in enumerate(right) if axis not in (*right_contracted, *right_batch)]
    total += 2 * count * math.prod(left) * math.prod(free)
  return total


def count_matmuls(fn: Callable, *args) -> Counter:
  """Counts the products of matrices in fn(*args).

  Products inside a scan count once per step, those inside a shard_map once per device. Those inside a while loop count
  once, and those in all branches of a cond are added. Products whose result is unused do not count.

  Args:
    fn: a jax function.
    *args: its arguments, or their shapes.

  Returns:
    {(left shape, right shape, dimension numbers, dtype): count}.
  """
  return count_in_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def count_in_jaxpr(jaxpr: core.Jaxpr) -> Counter:
  """Counts the products of matrices in a traced function, see `count_matmuls`."""
  used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # as the compiler removes unused results
  return _count_in_jaxpr(used, 1)


def _count_in_jaxpr(jaxpr: core.Jaxpr, repetitions: int) -> Counter:
  counts = Counter()
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      left, right = (variable.aval for variable in equation.invars)
      counts[left.shape, right.shape, equation.params['dimension_numbers'], str(left.dtype)] += repetitions
    inner_repetitions = repetitions
    if equation.primitive.name == 'scan':
      inner_repetitions = repetitions * equation.params.get('length', 1)
    elif equation.primitive.name == 'shard_map':  # its body has the shapes of one device
      sizes = equation.params['mesh'].shape
      inner_repetitions = repetitions * math.prod(sizes[axis] for axis in equation.params['newly_manual_axes'])
    for inner in _inner_jaxprs(equation.params):
      counts += _count_in_jaxpr(inner, inner_repetitions)
  return counts


def _inner_jaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
  """Returns the jaxprs among the parameters of an equation, such as the body of a scan."""
  values = []
  for value in params.values():
    values += value if isinstance(value, tuple | list) else [value]
  jaxprs = [value.jaxpr if isinstance(value, core.ClosedJaxpr) else value for value in values]
  return [jaxpr for jaxpr in jaxprs if isinstance(jaxpr, core.Jaxpr)]
