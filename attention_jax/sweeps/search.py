"""Random and quasi-random settings over ranges of values."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from scipy.stats import qmc

from attention_jax.errors import UserError, choose
from attention_jax.specs import Positive, Range, bind
from attention_jax.sweeps.space import Setting

DIGITS = 4  # significant digits of a value, so that commands can be read and repeated; more of them in a narrow range
Finite = Annotated[float, Range()]


class Scale(NamedTuple):
  """A range of values: maps numbers drawn uniformly from [low, high] to values.

  Attributes:
    low, high: the ends of the interval.
    value: uniform number -> value.
  """

  low: float
  high: float
  value: Callable[[float], float | int]


def linear(*, low: Finite, high: Finite) -> Scale:
  """Numbers from `low` to `high`."""
  return Scale(low, high, lambda x: _round(x, low, high))


def log(*, low: Positive, high: Positive) -> Scale:
  """Numbers from `low` to `high`, uniform in their logarithm."""
  return Scale(np.log(low), np.log(high), lambda x: _round(np.exp(x), low, high))


def integer(*, low: int, high: int) -> Scale:
  """Whole numbers from `low` to `high`, both included."""
  return Scale(low, high + 1, lambda x: min(int(np.floor(x)), high))


def log_integer(*, low: int, high: int) -> Scale:
  """Whole numbers from `low` >= 1 to `high`, both included, uniform in their logarithm.

  Raises:
    UserError: for a `low` below 1.
  """
  if low < 1:
    raise UserError(f'log_integer: low must be at least 1, got {low}')
  return Scale(np.log(low), np.log(high + 1), lambda x: min(max(int(np.floor(np.exp(x))), low), high))


RANGES: Mapping[str, Callable[..., Scale]] = {
  'integer': integer,
  'linear': linear,
  'log': log,
  'log_integer': log_integer,
}


def _sobol(dimensions: int, points: int, seed: int) -> np.ndarray:
  if points & (points - 1):
    raise UserError(f'sobol needs a power of two as the number of points, got {points}; halton takes any number')
  return qmc.Sobol(dimensions, rng=seed).random(points)


# (dimensions, points, seed) -> numbers from 0 to 1, [points, dimensions].
METHODS: Mapping[str, Callable[[int, int, int], np.ndarray]] = {
  'halton': lambda dimensions, points, seed: qmc.Halton(dimensions, rng=seed).random(points),
  'latin_hypercube': lambda dimensions, points, seed: qmc.LatinHypercube(dimensions, rng=seed).random(points),
  'random': lambda dimensions, points, seed: np.random.default_rng(seed).random((points, dimensions)),
  'sobol': _sobol,
}


def search(ranges: Mapping[str, str], points: int, method: str = 'halton', seed: int = 0) -> list[Setting]:
  """Draws settings from ranges.

  Args:
    ranges: a spec of RANGES for each field: {'training.schedule.peak': 'log(low=1e-4, high=1e-2)'}.
    points: number of settings.
    method: a key of METHODS. Quasi-random points cover the ranges more evenly than random ones.
    seed: seed of the points, at least 0.

  Raises:
    UserError: without a range, for a spec that is not valid, for a range whose ends are not in order, for an unknown
      method, for fewer than one point, for a number of points that `method` does not allow, and for a negative seed.
  """
  if not ranges:
    raise UserError('--search is empty; expected field=log(low=1e-4, high=1e-2) or another range')
  if points < 1:
    raise UserError(f'--points must be at least 1, got {points}')
  if seed < 0:
    raise UserError(f'--search_seed must be at least 0, got {seed}')
  scales = [_parse_range(field, spec) for field, spec in ranges.items()]
  uniform_points = METHODS[choose(method, METHODS, 'method of --search_method')](len(scales), points, seed)
  return [_setting(list(ranges), scales, row) for row in uniform_points]


def _setting(fields: Sequence[str], scales: Sequence[Scale], row: np.ndarray) -> Setting:
  setting = {}
  for field, scale, x in zip(fields, scales, row, strict=True):
    setting[field] = scale.value(scale.low + (scale.high - scale.low) * float(x))
  return setting


def _parse_range(field: str, spec: str) -> Scale:
  _, function, options = bind(spec, RANGES, f'range of {field}:')
  if options['low'] >= options['high']:
    raise UserError(f'{field}: low must be less than high, got {spec}')
  return function(**options)


def _round(x: float, low: float, high: float) -> float:
  """Rounds x to DIGITS significant digits, or more in a narrow range, and clips it to the range.

  A range whose width is a tenth of its largest absolute value needs one more digit, so that its values stay distinct.
  """
  digits = DIGITS + math.floor(max(0.0, math.log10(max(abs(low), abs(high))) - math.log10(high - low)))
  return float(min(max(float(f'{x:.{digits}g}'), low), high))
