"""Compiler options of programs that run a few times only, for which the compiler takes longer than all their runs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from attention_jax.training.partition import gather_recurrent, jit_on_mesh
from attention_jax.training.state import count_parameters

# Up to these limits, QUICK_OPTIONS save at least about as much time as they cost. FEW_RUNS limits the number of runs of
# a function over all its shapes, FEW_PARAMETER_RUNS the product of that number and the number of parameters. When they
# were chosen (b22ed7a), the time saved in compiling one shape of a small model was lost again in 4 to 47 runs of an
# update or a greedy search. A run of a larger model loses more, about in proportion to its parameters.
FEW_RUNS = 50
FEW_PARAMETER_RUNS = 50_000_000

# Number of values above which an initialiser is compiled with all optimisations. For 12 million values they cost 0.4 s
# of compiling and save 0.4 s of each run.
MANY_VALUES = 5_000_000

# platform -> options with which a program compiles in a sixth to a half of the time, and runs in 1.3 to 3 times the
# time. Sums are rounded differently, as a product and the sum that follows it are two instructions.
QUICK_OPTIONS: dict[str, dict[str, Any]] = {'cpu': {'xla_backend_optimization_level': 0}}
if jax.__version_info__ < (0, 11):  # later versions have no other emitters, and reject the option
  QUICK_OPTIONS['cpu']['xla_cpu_use_fusion_emitters'] = False


def compiler_options(runs: float, parameters: int = 0, platform: str | None = None) -> dict[str, Any] | None:
  """Returns the compiler options of a program, an argument of jax.jit.

  They must be a function of the config and the data, not of time, so that a resumed run computes the same numbers.

  Args:
    runs: number of times that the function is expected to run, over all shapes, counted once for each beam of a search.
    parameters: number of parameters of the model, each of which every run uses.
    platform: the platform of its devices; by default that of jax.

  Returns:
    The QUICK_OPTIONS of the platform for at most FEW_RUNS runs and FEW_PARAMETER_RUNS. Otherwise, and for a platform
    without them, None: the defaults of the compiler.
  """
  is_short = runs <= FEW_RUNS and runs * parameters <= FEW_PARAMETER_RUNS
  return QUICK_OPTIONS.get(platform or jax.default_backend()) if is_short else None


def jit_once(fn: Callable) -> Callable:
  """Compiles an initialiser: a function of arrays that is called once or a few times.

  Args:
    fn: the function.

  Returns:
    The compiled function. Under another transformation, such as jax.eval_shape, it has no compiler options, which jax
    accepts in the outermost program only. All calls share one trace of `fn`.
  """
  traced = jax.jit(fn, inline=True)
  compiled = None

  @functools.wraps(fn)
  def run(*args):
    nonlocal compiled
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
      return traced(*args)
    if compiled is None:
      num_values = count_parameters(jax.eval_shape(traced, *args))
      options = compiler_options(1) if num_values <= MANY_VALUES else None
      compiled = jax.jit(lambda *args: traced(*args), compiler_options=options)
    return compiled(*args)

  return run


class CompiledForRuns:
  """A function of a batch in two compiled versions: compiled quickly for few runs, with all optimisations for many.

  Args:
    mesh: the mesh of the devices.
    fn: the function, whose first argument are parameters, see partition.place_parameters.
  """

  def __init__(self, mesh: Mesh, fn: Callable):
    self._platform = mesh.devices.flat[0].platform

    def run(params, *args):
      return fn(gather_recurrent(params, mesh), *args)

    self._for_few = jit_on_mesh(mesh, run, compiler_options=compiler_options(0, platform=self._platform))
    self._for_many = jit_on_mesh(mesh, run)

  def select(self, runs: float, params: Any) -> Callable:
    """Returns the version for a number of runs with these parameters, see `compiler_options`."""
    options = compiler_options(runs, count_parameters(params), self._platform)
    return self._for_many if options is None else self._for_few
