"""Implementation 'auto': the fastest implementation for these sizes on this machine, as measured. It alone may choose.

MIN_SCORES holds the sizes from which a candidate was faster than the definition, forward and backward, as
`python -m experiments.benchmark --suites=crossing` measures them. Without a measurement 'auto' uses the definition.

It uses 'chunked' where the definition would store a large array [T, S, F] for the gradient, from LARGE scores on:
slower, because it recomputes scores, but it fits in memory. Recurrent scores write and read [S, F] for every query;
for these it uses 'chunked' from MIN_RECOMPUTE on.
"""

from collections.abc import Mapping
from types import ModuleType

import jax

from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Carry, Memory
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels import chunked, factored, flash, window

CANDIDATES: Mapping[str, ModuleType] = {'window': window, 'factored': factored, 'flash': flash}
MODULES: Mapping[str, ModuleType] = {**CANDIDATES, 'chunked': chunked, 'xla': definition}
# By backend and candidate: the smallest number of scores T S of a sequence from which the candidate is used. If several
# candidates qualify, the one with the largest threshold is used.
MIN_SCORES: Mapping[str, Mapping[str, int]] = {'cpu': {'window': 2**16, 'factored': 2**7, 'flash': 2**16}}
LARGE = 2**20  # T S of a sequence; with 256 features, [T, S, F] is then 1 GiB
MIN_RECOMPUTE = {'cpu': 2**7}  # by backend: T S from which recomputing [S, F] is faster than storing it per query


def choose_implementation(score: Row, alignment: Row, scores: int) -> str:
  """Returns the name of the implementation for a pair and a number of scores.

  Args:
    score, alignment: table rows.
    scores: T S of one sequence.
  """
  chosen = 'xla'
  for threshold, name in _thresholds(score, alignment):
    if scores >= threshold:
      chosen = name
  return chosen


def describe_choice(score: Row, alignment: Row) -> str:
  """Describes the choice for this pair on this backend, such as 'xla, factored from T S = 128'."""
  return ', '.join(['xla', *(f'{name} from T S = {threshold}' for threshold, name in _thresholds(score, alignment))])


def _thresholds(score: Row, alignment: Row) -> list[tuple[int, str]]:
  """(smallest T S, implementation) of the implementations that compute this pair, in ascending order."""
  backend = jax.default_backend()
  measured = sorted((threshold, name) for name, threshold in MIN_SCORES.get(backend, {}).items())
  supported = [pair for pair in measured if not CANDIDATES[pair[1]].unsupported_reason(score, alignment)]
  if supported:
    return supported
  if score.is_recurrent:
    return [(MIN_RECOMPUTE.get(backend, LARGE), 'chunked')]
  if isinstance(score.form, TanhSum):
    return [(LARGE, 'chunked')]
  return []


def unsupported_reason(score: Row, alignment: Row) -> str:
  """Returns '': every pair is supported."""
  return ''


def attend_step(score: Row, *args, **options) -> tuple[Carry, Attended]:
  """Attends with one query, by the definition. Same arguments as `functional.attend.attend_step`."""
  return definition.attend_step(score.in_reverse_mode, *args, **options)


def attend(
  score: Row,
  alignment: Row,
  params,
  query,
  memory: Memory,
  *,
  bias=None,
  rng=None,
  deterministic=True,
  return_weights=True,
) -> Attended:
  """Attends with the chosen implementation. Same arguments as `functional.attend.attend`."""
  name = choose_implementation(score, alignment, query.shape[0] * memory.key.shape[0])
  return MODULES[name].attend(
    score,
    alignment,
    params,
    query,
    memory,
    bias=bias,
    rng=rng,
    deterministic=deterministic,
    return_weights=return_weights,
  )
