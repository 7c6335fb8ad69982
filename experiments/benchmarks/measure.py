"""Comparable timings: one process and one run, sides in turns, medians with quartiles."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


def _raise(case_name: str, error: Exception) -> None:
  raise error


class BenchmarkContext(NamedTuple):
  """Settings that every suite gets.

  Attributes:
    log: called with each line of progress.
    repeats: number of timed runs of each side.
    dtype: the dtype in which attention and models compute, 'float32' or 'bfloat16'.
    joey: an interpreter with Joey NMT, or ''.
    run: the folder of a trained run, for the suite translation; or ''.
    data: the folder of its test set, see trained.py; or ''.
    data_root: the folder with the data sets of the suites startup and prepared.
    pairs: number of pairs of the suite prepared, or 0.
    checkout: a checkout of another commit, whose start is compared by the suite startup; or ''.
    report_failure: called with what failed and the error, after which the suite continues; it may raise the error.
  """

  log: Callable[[str], None]
  repeats: int
  dtype: str = 'float32'
  joey: str = ''
  run: str = ''
  data: str = ''
  data_root: str = 'data'
  pairs: int = 0
  checkout: str = ''
  report_failure: Callable[[str, Exception], None] = _raise

  @property
  def torch_dtypes(self) -> tuple[str, ...]:
    """The dtypes in which PyTorch's models are measured: float32 and `dtype`; none on accelerators."""
    return tuple(dict.fromkeys(('float32', self.dtype))) if jax.default_backend() == 'cpu' else ()

  @property
  def is_torch_comparable(self) -> bool:
    """Whether the functions of peers.py that compute in float32 only can be compared with."""
    return self.torch_dtypes == (self.dtype,)


class Side(NamedTuple):
  """One way to do a piece of work.

  Attributes:
    run: does the work once and returns when it is done.
    memory: bytes of temporary memory beside inputs and outputs; None if unknown.
  """

  run: Callable[[], Any]
  memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
  """Timing of one side of a case.

  Attributes:
    suite: name of the suite.
    case: the work.
    side: the way in which it was done.
    median, low, high: median and quartiles, seconds.
    speed: the median of the first side divided by that of this one.
    amount: how much of `unit` one run does; 0 if there is no meaningful rate.
    unit: the unit of `amount`.
    memory: as in Side.
    note: a remark for the report.
  """

  suite: str
  case: str
  side: str
  median: float
  low: float
  high: float
  speed: float
  amount: float = 0.0
  unit: str = ''
  memory: int | None = None
  note: str = ''

  @property
  def rate(self) -> float:
    """Units per second."""
    return self.amount / self.median


def jit_side(fn: Callable, *args) -> Side:
  """Compiles fn(*args) into a side, with the temporary memory of the program."""
  compiled = jax.jit(fn).lower(*args).compile()
  memory = compiled.memory_analysis()
  return Side(lambda: jax.block_until_ready(compiled(*args)), getattr(memory, 'temp_size_in_bytes', None))


def compare(
  suite: str,
  case: str,
  sides: Mapping[str, Side],
  *,
  repeats: int = 7,
  amount: float = 0.0,
  unit: str = '',
) -> list[Timing]:
  """Times all sides in turns.

  A turn is one run that is not timed and one that is. The first refills the caches and pages that the previous side
  evicted.

  Args:
    suite: name of the suite.
    case: the work.
    sides: the sides by name; the first is what the others are compared with.
    repeats: number of turns.
    amount: how much of `unit` one run does.
    unit: the unit of `amount`.

  Returns:
    A timing per side.
  """
  for side in sides.values():
    side.run()
  seconds = {name: [] for name in sides}
  for _ in range(repeats):
    for name, side in sides.items():
      side.run()
      start = time.perf_counter()
      side.run()
      seconds[name].append(time.perf_counter() - start)
  first_median = np.median(seconds[next(iter(sides))])
  timings = []
  for name, side in sides.items():
    low, median, high = (float(x) for x in np.quantile(seconds[name], (0.25, 0.5, 0.75)))
    speed = float(first_median / median)
    timings.append(Timing(suite, case, name, median, low, high, speed, amount, unit, side.memory))
  return timings


def median_seconds(side: Side, repeats: int = 7) -> float:
  """Returns the median time of one side, seconds."""
  return compare('', '', {'': side}, repeats=repeats)[0].median


def fit_exponent(sizes, seconds) -> float:
  """Returns the slope of log seconds over log sizes, the exponent of the growth."""
  return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
