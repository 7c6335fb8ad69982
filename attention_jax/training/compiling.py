"""Compiler options of programs that run a few times only, for which the compiler takes longer than all their runs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from attention_jax.training.partition import jit_on_mesh

# Runs of a function, of all its shapes together, up to which QUICK_OPTIONS save about as much as they cost or more:
# a shape saves as much as 4 to 47 runs of an update or a greedy search cost, see "Short runs" in docs/benchmarks.md.
FEW_RUNS = 50

# platform -> options with which a program compiles in a sixth to a half of the time, and runs in 1.3 to 3 times the
# time. Sums are rounded differently, as a product and the sum that follows it are two instructions.
QUICK_OPTIONS: dict[str, dict[str, Any]] = {'cpu': {'xla_backend_optimization_level': 0}}
if jax.__version_info__ < (0, 11):  # later versions have no other emitters, and refuse the option
  QUICK_OPTIONS['cpu']['xla_cpu_use_fusion_emitters'] = False


def compiler_options(runs: float, platform: str | None = None) -> dict[str, Any] | None:
  """Returns the compiler options of a program, an argument of jax.jit.

  They must be a function of the config and the data, not of time, so that a resumed run computes the same numbers.

  Args:
    runs: number of times that the function is expected to run, over all shapes, counted once for each beam of a search.
    platform: the platform of its devices; by default that of jax.

  Returns:
    QUICK_OPTIONS for at most FEW_RUNS runs, otherwise None, the defaults of the compiler.
  """
  return QUICK_OPTIONS.get(platform or jax.default_backend()) if runs <= FEW_RUNS else None


def jit_once(fn: Callable, **options) -> Callable:
  """Compiles a function of arrays that is called once or a few times, such as an initialiser.

  Args:
    fn: the function.
    **options: arguments of jax.jit.

  Returns:
    The compiled function. Under another transformation, such as jax.eval_shape, it is `fn`, because jax accepts
    compiler options in the outermost program only.
  """
  compiled = jax.jit(fn, compiler_options=compiler_options(1), **options)

  @functools.wraps(fn)
  def run(*args):
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
    return fn(*args) if is_traced else compiled(*args)

  return run


class CompiledForRuns:
  """A function on the rows of a batch, compiled quickly for few runs and with all optimisations for many.

  Args:
    mesh: the mesh of the devices.
    fn: the function.
  """

  def __init__(self, mesh: Mesh, fn: Callable):
    quick = compiler_options(0, mesh.devices.flat[0].platform)
    self._for_few = jit_on_mesh(mesh, fn, compiler_options=quick)
    self._for_many = jit_on_mesh(mesh, fn)

  def __call__(self, runs: float) -> Callable:
    """Returns the compiled function for a number of runs, see `compiler_options`."""
    return self._for_few if runs <= FEW_RUNS else self._for_many
