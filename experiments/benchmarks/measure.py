"""Times that can be compared: of one process and one run, taken in turns, as medians with their spread."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


def _raise(what: str, error: Exception) -> None:
  raise error


class BenchmarkContext(NamedTuple):
  """What every suite is given.

  Attributes:
    log: prints a line.
    repeats: how often each side is run.
    dtype: of what attention and models compute in, 'float32' or 'bfloat16'.
    joey: an interpreter with Joey NMT, or ''.
    run, data: for the suite translation, see trained.py; or ''.
    report_failure: is told what failed and why, so that the rest may go on; it may raise the error.
  """

  log: Callable[[str], None]
  repeats: int
  dtype: str = 'float32'
  joey: str = ''
  run: str = ''
  data: str = ''
  report_failure: Callable[[str, Exception], None] = _raise

  @property
  def torch_dtypes(self) -> tuple[str, ...]:
    """What PyTorch's models compute in beside ours: float32, and what ours do. Nothing on accelerators."""
    return tuple(dict.fromkeys(('float32', self.dtype))) if jax.default_backend() == 'cpu' else ()

  @property
  def is_torch_comparable(self) -> bool:
    """Whether what peers.py has in float32 alone can be measured beside ours."""
    return self.torch_dtypes == (self.dtype,)


class Side(NamedTuple):
  """One way to do a piece of work.

  Attributes:
    run: does it once and returns when it is done.
    memory: bytes it needs beside its inputs and outputs; None where nobody can say.
  """

  run: Callable[[], Any]
  memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of one side of a case: median, quartiles, and the ratio of the first side's median to it.

  `case` names the work, `amount` how much of `unit` one run does (0: none that is worth a rate).
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
    return self.amount / self.median


def jit_side(fn: Callable, *args) -> Side:
  """fn(*args) compiled, with the temporary memory of the program."""
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
  """All sides in turns. The first is what the others are compared with.

  A turn is one run that is not timed and one that is: the first pays for caches and pages that the side before it took.
  """
  for side in sides.values():
    side.run()
  seconds = {name: [] for name in sides}
  for _ in range(repeats):
    for name, side in sides.items():
      side.run()
      began = time.perf_counter()
      side.run()
      seconds[name].append(time.perf_counter() - began)
  base = np.median(seconds[next(iter(sides))])
  timings = []
  for name, side in sides.items():
    low, median, high = (float(x) for x in np.quantile(seconds[name], (0.25, 0.5, 0.75)))
    timings.append(Timing(suite, case, name, median, low, high, float(base / median), amount, unit, side.memory))
  return timings


def fit_exponent(sizes, seconds) -> float:
  """The slope of log seconds over log sizes: how the time grows."""
  return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
