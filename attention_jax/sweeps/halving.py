"""Successive halving (Jamieson & Talwalkar 2016): settings that are far behind early are not trained to the end.

All settings are trained for a first number of updates, the best 1/factor of them for factor times as many, and so on up
to training.steps. Each of these numbers of updates is a rung. A run is resumed for each rung, never repeated. A setting
that learns late is lost.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attention_jax.errors import UserError
from attention_jax.specs import Size, bind, format_spec, parse
from attention_jax.training.checkpoint import updates_made
from attention_jax.training.optim import SCHEDULES
from attention_jax.training.writers import METRICS_FILE, read_metrics


def halving(*, first: Size, factor: Size = 3) -> tuple[int, int]:
  """The updates of the first rung, and the factor.

  Args:
    first: updates of the first rung.
    factor: ratio of the updates of consecutive rungs.

  Raises:
    UserError: for a factor below 2.
  """
  if factor < 2:
    raise UserError(f'--halving: factor must be at least 2, got {factor}')
  return first, factor


def parse_halving(spec: str) -> tuple[int, int]:
  """Parses 'halving(first=300, factor=3)'.

  Raises:
    UserError: for anything else.
  """
  _, function, options = bind(spec, {'halving': halving}, 'value of --halving')
  return function(**options)


def rungs(total: int, first: int, factor: int) -> list[int]:
  """Returns the numbers of updates of all rungs: first, first * factor, ..., total.

  Settings are compared after every rung except the last.

  Args:
    total: the last of the numbers.
    first: the first of the numbers, if it is below `total`.
    factor: ratio of consecutive numbers, at least 2.
  """
  steps = []
  while first < total:
    steps.append(first)
    first *= factor
  return [*steps, total]


def survivors(values: Mapping[str, float], factor: int, higher_is_better: bool) -> list[str]:
  """Returns the best 1/factor of the settings, rounded up; equal values stay in their order.

  Args:
    values: setting id -> value of the metric; NaN is the worst.
    factor: the factor.
    higher_is_better: the direction of the metric.
  """

  def badness(setting_id: str) -> float:
    value = values[setting_id]
    return math.inf if math.isnan(value) else -value if higher_is_better else value

  ranking = sorted(values, key=badness)
  return ranking[: math.ceil(len(ranking) / factor)]


def reachable_steps(folders: Iterable[Path], steps: int) -> int:
  """Returns the number of updates up to which a unit is trained for a rung of `steps` updates.

  It is greater if one of its folders has a run that has made more: as part of a sweep that was continued with halving,
  or with a lower first rung.
  """
  return max([steps, *map(updates_made, folders)])


def best_validation(folders: Sequence[Path], select: str, steps: int, higher_is_better: bool) -> float:
  """Returns the mean over runs of the best validation value up to a step; NaN if a run has none.

  Args:
    folders: the run folders of the seeds of a setting.
    select: the metric.
    steps: the last step that counts.
    higher_is_better: the direction of the metric.
  """
  best = []
  for folder in folders:
    records = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
    values = [record.get(f'validation/{select}', math.nan) for record in records if record['step'] <= steps]
    values = [value for value in values if not math.isnan(value)]
    if not values:
      return math.nan
    best.append(max(values) if higher_is_better else min(values))
  return sum(best) / len(best) if best else math.nan


def fix_schedule_length(spec: str, steps: int) -> str:
  """Returns a schedule that does not depend on the length of the run: 'cosine' -> 'cosine(steps=3000)'.

  With a schedule that depends on it, the updates of a rung would differ from the same updates of a longer run. A
  schedule without the option `steps`, or in which it is set, is only reformatted.

  Args:
    spec: name and options of a row of SCHEDULES.
    steps: the full length.
  """
  name, options = parse(spec)
  if 'steps' in inspect.signature(SCHEDULES[name]).parameters:
    options = {'steps': steps} | options
  return format_spec(name, options)


def fix_anneal_length(spec: str, steps: int) -> str:
  """Returns training.anneal with every schedule fixed as by `fix_schedule_length`."""
  parts = []
  for assignment in filter(str.strip, spec.split(';')):
    name, _, schedule = assignment.partition(':')
    parts.append(f'{name.strip()}: {fix_schedule_length(schedule.strip(), steps)}')
  return '; '.join(parts)
