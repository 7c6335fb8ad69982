"""Implementation 'auto': selects another implementation by the pair of score and alignment, sizes, dtypes and platform.

On CPUs MIN_SCORES holds the numbers of scores T S from which a candidate is used. It is faster than the definition,
'xla', from there on, forward and backward, as `python -m lab.benchmark --suites=crossing` measures. For a pair that
no candidate supports, 'auto' uses 'chunked' where the definition would store a large array [T, S, F] for the
gradient, from MIN_CHUNKED_SCORES scores on: 'chunked' is slower, because it recomputes scores, but fits in memory.
Recurrent scores write and read [S, F] for every query; for these it uses 'chunked' from MIN_RECOMPUTE on.

On accelerators the fastest one that fits in memory is used, by the estimates of `estimates`; 'chunked' is a candidate
for additive and recurrent scores.

As some candidates have no others, 'auto' has first derivatives in reverse mode alone, whatever it selects.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Carry, Memory, Problem
from attention_jax.functional.lifting import Axes
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels import chunked, cudnn, factored, flash, linear, pallas_additive, splash, window
from attention_jax.kernels.derivatives import reverse_mode_only
from attention_jax.kernels.estimates import chip_of_platform, choose_by_cost, sizes_of
from attention_jax.kernels.sharding import has_explicit_axes
from attention_jax.kernels.symbolic import has_symbolic_sizes
from attention_jax.kernels.target import kernel_platform

CANDIDATES: Mapping[str, ModuleType] = {
  'window': window,
  'factored': factored,
  'linear': linear,
  'flash': flash,
  'cudnn': cudnn,
  'splash': splash,
  'pallas_additive': pallas_additive,
}
MODULES: Mapping[str, ModuleType] = {**CANDIDATES, 'chunked': chunked, 'xla': definition}
# By platform and candidate: the smallest number of scores T S of a sequence from which the candidate is used. If
# several candidates qualify, the one with the largest threshold is used.
MIN_SCORES: Mapping[str, Mapping[str, int]] = {
  'cpu': {'window': 2**16, 'factored': 2**7, 'flash': 2**16, 'linear': 2**14},
}
# By platform: the candidates whose costs are estimated.
ESTIMATED: Mapping[str, tuple[str, ...]] = {
  'gpu': ('window', 'linear', 'cudnn', 'pallas_additive', 'flash'),
  'tpu': ('window', 'linear', 'splash', 'pallas_additive', 'flash'),
}
MIN_CHUNKED_SCORES = 2**20  # T S of a sequence; with 256 features, [T, S, F] is then 1 GiB
MIN_RECOMPUTE = {'cpu': 2**7}  # by platform: T S from which recomputing [S, F] is faster than storing it per query
# Candidates that do not support every dtype or width: problem -> the reason, or ''.
INPUT_CHECKS: Mapping[str, Callable[[Problem], str]] = {
  'cudnn': cudnn.unsupported_inputs,
  'pallas_additive': pallas_additive.unsupported_inputs,
  'splash': lambda problem: 'weights' if problem.return_weights else splash.unsupported_inputs(problem),
}
RESTRICTIONS = {
  'cudnn': ' (16-bit)',
  'linear': ' (one mask for all queries, no weights)',
  'splash': ' (no weights, no bias)',
}  # follows the name of a candidate in `describe_choice`


def choose_implementation(problem: Problem) -> str:
  """Returns the name of the implementation for a problem."""
  platform = kernel_platform()
  if platform in ESTIMATED:
    names = _estimated(problem.score, problem.alignment, problem)
    return choose_by_cost(names, sizes_of(problem), chip_of_platform(platform))
  num_scores = problem.query.shape[-2] * problem.memory.key.shape[-2]
  chosen = 'xla'
  for threshold, name in _thresholds(problem.score, problem.alignment, problem):
    if num_scores >= threshold:
      chosen = name
  return chosen


def describe_choice(score: Row, alignment: Row) -> str:
  """Describes the choice for this pair on this platform, such as 'xla, factored from T S = 128'."""
  if kernel_platform() in ESTIMATED:
    names = ' or '.join(f'{name}{RESTRICTIONS.get(name, "")}' for name in ('xla', *_estimated(score, alignment)))
    return f'{names}, by estimates of time and memory that were not measured on a {kernel_platform()}'
  thresholds = _thresholds(score, alignment)
  return ', '.join(
    ['xla', *(f'{name}{RESTRICTIONS.get(name, "")} from T S = {threshold}' for threshold, name in thresholds)]
  )


def _supports(name: str, score: Row, alignment: Row, problem: Problem | None) -> bool:
  """Whether a candidate supports a pair and the dtypes and widths of the problem, if any."""
  if CANDIDATES[name].unsupported_reason(score, alignment):
    return False
  return not (problem and name in INPUT_CHECKS and INPUT_CHECKS[name](problem))


def _estimated(score: Row, alignment: Row, problem: Problem | None = None) -> list[str]:
  """The alternatives to 'xla' for this pair on an accelerator."""
  names = [name for name in ESTIMATED[kernel_platform()] if _supports(name, score, alignment, problem)]
  return [*names, 'chunked'] if score.is_recurrent or isinstance(score.form, TanhSum) else names


def _thresholds(score: Row, alignment: Row, problem: Problem | None = None) -> list[tuple[int, str]]:
  """(smallest T S, implementation) of the alternatives to 'xla' for this pair, in ascending order."""
  platform = kernel_platform()
  thresholds = sorted((threshold, name) for name, threshold in MIN_SCORES.get(platform, {}).items())
  supported = [(threshold, name) for threshold, name in thresholds if _supports(name, score, alignment, problem)]
  if supported:
    return supported
  if score.is_recurrent:
    return [(MIN_RECOMPUTE.get(platform, MIN_CHUNKED_SCORES), 'chunked')]
  if isinstance(score.form, TanhSum):
    return [(MIN_CHUNKED_SCORES, 'chunked')]
  return []


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns '': every pair is supported."""
  return ''


def attend_step(
  score: Row, alignment: Row, params, carry: Carry, query, memory: Memory, *, bias=None, **options
) -> tuple[Carry, Attended]:
  """Attends with one query, by the definition; a score of the form ReverseMode uses its faster gradient.

  Same arguments as `functional.attend.attend_step`.
  """
  operands = reverse_mode_only('auto', (params, carry, query, memory))
  bias = reverse_mode_only('auto', bias)
  return definition.attend_step(score.with_fast_gradient, alignment, *operands, bias=bias, **options)


def attend_batch(problem: Problem, axes: Axes) -> Attended:
  """Attends with the chosen implementation."""
  arrays = problem.params, problem.query, problem.memory, problem.bias
  params, query, memory, bias = reverse_mode_only('auto', arrays)
  problem = problem._replace(params=params, query=query, memory=memory, bias=bias)
  # Which of the others would be faster depends on the sizes; they loop over rows, which an Explicit mesh may split.
  if has_symbolic_sizes(problem) or has_explicit_axes():
    return definition.attend_batch(problem, axes)
  return MODULES[choose_implementation(problem)].attend_batch(problem, axes)
