"""Annealing: scalar parameters that follow schedules of their own instead of their gradients.

`training.anneal='temperature: linear(peak=2.0, end=0.5); beta: constant(rate=3.0)'` names parameters by the last part
of their paths, and schedules of optim.SCHEDULES, which count updates.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row
from attention_jax.specs import split_outside_brackets
from attention_jax.training.optim import PER_HEAD_MODULES, Schedule, make_schedule

Schedules = Mapping[str, Schedule]
NO_SCHEDULES: Schedules = {}


def make_anneal(spec: str, params: Any, steps: int) -> dict[str, Schedule]:
  """Builds the schedules of annealed parameters.

  Args:
    spec: 'parameter: schedule; parameter: schedule; ...'; '' anneals nothing.
    params: the model's parameters, or their shapes.
    steps: length of the run, in updates.

  Returns:
    The schedules by the names of their parameters.

  Raises:
    UserError: for a spec that cannot be parsed, an invalid schedule, and a name that is no scalar parameter.
  """
  scalars = {path[-1].key for path, x in jax.tree.leaves_with_path(params) if _is_scalar(path, x)}
  if spec.strip() and not scalars:
    variants = ', '.join(_variants_with_scalars())
    raise UserError(
      f'training.anneal: this model has no scalar parameter, got {spec!r}; scores and alignments with one: {variants}'
    )
  schedules = {}
  for assignment in filter(str.strip, split_outside_brackets(spec, ';')):
    name, colon, schedule = (word.strip() for word in assignment.partition(':'))
    if not colon or name in schedules:
      expected = "'parameter: schedule; ...', each parameter once"
      raise UserError(f'training.anneal: cannot parse {spec!r}; expected {expected}')
    schedules[choose(name, scalars, 'parameter in training.anneal:')] = make_schedule(schedule, steps)
  return schedules


def apply_schedules(params: Any, schedules: Schedules, update: int | jax.Array) -> Any:
  """Returns `params` with every annealed parameter at its value for an update.

  Args:
    params: the model's parameters.
    schedules: schedules by the names of the annealed parameters, as `make_anneal` returns them.
    update: number of the update, counted from 1.
  """
  return _replace_scalars(params, {name: schedule(update) for name, schedule in schedules.items()})


def zero_scheduled(gradients: Any, schedules: Schedules) -> Any:
  """Returns `gradients` with zeros for the annealed parameters."""
  return _replace_scalars(gradients, dict.fromkeys(schedules, 0.0))


def _replace_scalars(tree: Any, values: Mapping[str, float | jax.Array]) -> Any:
  """Fills the scalars of `tree` that `values` names; every other leaf stays as it is."""

  def replace(path, x):
    is_annealed = path[-1].key in values and _is_scalar(path, x)
    return jnp.full_like(x, values[path[-1].key]) if is_annealed else x

  return jax.tree.map_with_path(replace, tree)


def _is_scalar(path, x) -> bool:
  """Whether a leaf is one number, or one number per head."""
  return x.ndim == 0 or (x.ndim == 1 and len(path) > 1 and path[-2].key in PER_HEAD_MODULES)


def _variants_with_scalars() -> list[str]:
  """Names of the scores and alignments that learn a scalar."""

  def has_scalar(row: Row) -> bool:
    return any(param.shape == () for param in row.params.values())

  return [name for table in (SCORES, ALIGNMENTS) for name, row in table.items() if has_scalar(row)]
