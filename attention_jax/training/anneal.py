"""Annealing: single numbers among the parameters follow schedules of their own instead of their gradients.

`training.anneal='temperature: linear(peak=2.0, end=0.5); beta: constant(rate=3.0)'` names parameters by the last part
of their paths, and schedules of optim.SCHEDULES, which count updates.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.training.optim import Schedule, make_schedule

Schedules = Mapping[str, Schedule]
NO_SCHEDULES: Schedules = {}

# The modules whose parameters have a leading axis of heads (modules.attention.RowParams): [N] is a number for each.
HEADED = ('score_params', 'alignment_params')
# Scores and alignments that learn single numbers.
_LEARNING = [n for t in (SCORES, ALIGNMENTS) for n, row in t.items() if any(p.shape == () for p in row.params.values())]


def make_anneal(spec: str, params, steps: int) -> dict[str, Schedule]:
  """The schedules of `spec` by the names of their parameters; `steps` is the length of the run.

  Raises: UserError for what cannot be read, and for a name that is no single number among `params`.
  """
  schedules, possible = {}, {path[-1].key for path, x in jax.tree.leaves_with_path(params) if _is_number(path, x)}
  if spec.strip() and not possible:
    raise UserError(f'training.anneal: this model learns no single number; possible with {", ".join(_LEARNING)}')
  for part in filter(str.strip, spec.split(';')):
    name, colon, schedule = (word.strip() for word in part.partition(':'))
    if not colon or name in schedules:
      raise UserError(f"training.anneal: cannot read {spec!r}; write 'parameter: schedule; ...', each parameter once")
    schedules[choose(name, possible, 'parameter in training.anneal:')] = make_schedule(schedule, steps)
  return schedules


def apply_schedules(params, schedules: Schedules, update):
  """`params` with the numbers that have schedules at their values for this update (from 1); the others as they are."""
  return _replaced(params, {name: schedule(update) for name, schedule in schedules.items()})


def zero_scheduled(gradients, schedules: Schedules):
  """`gradients` with zeros for the numbers that have schedules."""
  return _replaced(gradients, dict.fromkeys(schedules, 0.0))


def _replaced(tree, values: Mapping[str, float | jax.Array]):
  def leaf(path, x):
    return jnp.full_like(x, values[path[-1].key]) if path[-1].key in values and _is_number(path, x) else x

  return jax.tree.map_with_path(leaf, tree)


def _is_number(path, x) -> bool:
  return x.ndim == 0 or (x.ndim == 1 and len(path) > 1 and path[-2].key in HEADED)
