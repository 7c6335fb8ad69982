"""Implementation 'auto': selects another implementation by the pair of score and alignment, sizes, dtypes and platform.

MIN_SCORES holds the numbers of scores T S from which a candidate is used. On CPUs a candidate is faster than the
definition, 'xla', from there on, forward and backward, as `python -m lab.benchmark --suites=crossing` measures.
On accelerators the numbers are estimates: those of 'window' and 'linear' equal the ones of 'cpu'; the comments explain
the others.

For a pair that no candidate of the platform supports, 'auto' uses 'chunked' where the definition would store a large
array [T, S, F] for the gradient, from MIN_CHUNKED_SCORES scores on: 'chunked' is slower, because it recomputes scores,
but fits in memory. Recurrent scores write and read [S, F] for every query; for these it uses 'chunked' from
MIN_RECOMPUTE on, or from MIN_CHUNKED_SCORES on where the platform has no entry in MIN_RECOMPUTE.

As some of them have no others, 'auto' has first derivatives in reverse mode alone, whatever it selects.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Carry, Memory, Problem
from attention_jax.functional.lifting import Axes
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels import chunked, cudnn, factored, flash, linear, pallas_additive, splash, window
from attention_jax.kernels.derivatives import reverse_mode_only
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
  # Timings of an H200 that also ran other programs: at 2^18 scores of F = 256 'pallas_additive' took the time of the
  # definition and a fifteenth of its memory; at 2^12 it was no faster. 'cudnn' took longer than the definition at 2^22,
  # with a seventeenth of the memory. Both are therefore used where memory counts. 'flash', which processes the
  # sequences one after the other, took thirty times as long.
  'gpu': {'window': 2**16, 'linear': 2**14, 'cudnn': 2**22, 'pallas_additive': 2**18},
  # The gradient of the definition reads an array [T, S, F], which takes longer than the start of a kernel (10 us) from
  # about 2^8 scores on, if F = 256 and 64 sequences share 2 to 3 TB/s; 2^10 leaves a margin.
  # 'splash' pads T and S to 128 and starts a program for each head; from 512 queries and positions on, XLA compiles the
  # definition to a hundred times its memory and traffic (lab/benchmarks.md).
  'tpu': {'window': 2**16, 'linear': 2**14, 'splash': 2**18, 'pallas_additive': 2**10},
}
MEASURED = ('cpu',)  # platforms whose MIN_SCORES were measured; those of other platforms are estimates
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
  num_scores = problem.query.shape[-2] * problem.memory.key.shape[-2]
  chosen = 'xla'
  for threshold, name in _thresholds(problem.score, problem.alignment, problem):
    if num_scores >= threshold:
      chosen = name
  return chosen


def describe_choice(score: Row, alignment: Row) -> str:
  """Describes the choice for this pair on this platform, such as 'xla, factored from T S = 128'."""
  thresholds = _thresholds(score, alignment)
  kernels = (f'{name}{RESTRICTIONS.get(name, "")} from T S = {threshold}' for threshold, name in thresholds)
  choice = ', '.join(['xla', *kernels])
  platform = kernel_platform()
  if not thresholds or platform in MEASURED:
    return choice
  return f'{choice}; estimated, not measured on a {platform}'


def _thresholds(score: Row, alignment: Row, problem: Problem | None = None) -> list[tuple[int, str]]:
  """(smallest T S, implementation) of the alternatives to 'xla' for this pair, in ascending order.

  Those that do not support the dtypes and widths of the problem, if any, are left out.
  """

  def is_supported(name: str) -> bool:
    if CANDIDATES[name].unsupported_reason(score, alignment):
      return False
    return not (problem and name in INPUT_CHECKS and INPUT_CHECKS[name](problem))

  platform = kernel_platform()
  thresholds = sorted((threshold, name) for name, threshold in MIN_SCORES.get(platform, {}).items())
  supported = [(threshold, name) for threshold, name in thresholds if is_supported(name)]
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
