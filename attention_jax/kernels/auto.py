"""Implementation 'auto': the fastest of the others for these sizes on this machine, as measured. It alone may choose.

Sizes from which another implementation was faster than the definition, forward and backward, stand in MIN_SCORES, as
`python -m experiments.benchmark --suites=crossing` measures them. Where nothing was measured, it is the definition, and
`chunked` from LARGE on where the definition would keep [T, S, F] for the gradient: slower by what is computed again. Of
recurrent scores, whose [S, F] would be written and read for every query, it is `chunked` from AGAIN on.
"""

from collections.abc import Mapping
from types import ModuleType

import jax

from attention_jax.functional import attend as definition
from attention_jax.functional.attend import Attended, Memory
from attention_jax.functional.table import Row, TanhSum
from attention_jax.kernels import chunked, factored, flash, window

CANDIDATES: Mapping[str, ModuleType] = {'window': window, 'factored': factored, 'flash': flash}
WAYS: Mapping[str, ModuleType] = {**CANDIDATES, 'chunked': chunked, 'xla': definition}
# backend -> candidate -> the least T S of a sequence that it is taken for; of several, the one with the largest
MIN_SCORES: Mapping[str, Mapping[str, int]] = {'cpu': {'window': 2**16, 'factored': 2**7, 'flash': 2**18}}
LARGE = 2**20  # T S of a sequence, of which [T, S, F] is a GiB with 256 features
AGAIN = {'cpu': 2**7}  # the same by backend, from which making [S, F] again is faster than keeping it for every query


def choose_implementation(score: Row, alignment: Row, scores: int) -> str:
  """The name of what computes this pair for T S `scores` of a sequence."""
  return ['xla', *(name for least, name in _fits(score, alignment) if scores >= least)][-1]


def describe_choice(score: Row, alignment: Row) -> str:
  """What it chooses among for this pair, here: 'xla, from T S = 128 on factored'."""
  return ', '.join(['xla', *(f'from T S = {least} on {name}' for least, name in _fits(score, alignment))])


def _fits(score: Row, alignment: Row) -> list[tuple[int, str]]:
  """(the least T S, candidate) of those that compute this pair, smallest first."""
  options = MIN_SCORES.get(jax.default_backend(), {})
  fast = sorted((n, name) for name, n in options.items() if not CANDIDATES[name].unsupported_reason(score, alignment))
  least = AGAIN.get(jax.default_backend(), LARGE) if score.is_recurrent else LARGE
  return fast or [(least, 'chunked')] * bool(score.is_recurrent or isinstance(score.form, TanhSum))


def unsupported_reason(score: Row, alignment: Row) -> str:
  """It refuses nothing."""
  return ''


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
  """As functional.attend."""
  name = choose_implementation(score, alignment, query.shape[0] * memory.key.shape[0])
  given = {'bias': bias, 'rng': rng, 'deterministic': deterministic, 'return_weights': return_weights}
  return WAYS[name].attend(score, alignment, params, query, memory, **given)
