"""Times several ways to do the same work ('sides') alternately in one process, and returns medians and quartiles."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.errors import UserError
from experiments.config_files import PROJECT

# On an accelerator the timed part of a turn repeats a call for about this many seconds, so that each call is dispatched
# while the previous one runs.
MIN_TURN = 0.02
MAX_CALLS = 200  # largest number of calls of the timed part of a turn, even if they take less than MIN_TURN


def _raise(case_name: str, error: Exception) -> None:
  raise error


class BenchmarkContext(NamedTuple):
  """Settings that every suite gets.

  Attributes:
    log: called with each line of progress.
    repeats: number of turns in which a side is timed; some suites limit or fix it.
    dtype: the dtype in which attention and models compute, 'float32' or 'bfloat16'.
    compile_threads: number of threads that compile; None for the number of cores.
    torch_compile: whether to compare with torch.compile, which may take minutes to compile a model.
    joey: an interpreter with Joey NMT, or ''.
    run: the folder of a trained run, for the suite 'translation'; or ''.
    data: the folder of its test set, see trained.py.
    data_root: the folder with the data sets of the suites 'startup' and 'prepared'.
    pairs: number of pairs for the suite 'prepared', or 0.
    checkout: a checkout of another commit, which the suite 'startup' measures too; or ''.
    topology: a topology of TPUs, for the suite 'aot'; or ''.
    report_failure: called with the name of a failed case and the error; by default it raises the error.
  """

  log: Callable[[str], None]
  repeats: int
  dtype: str = 'float32'
  compile_threads: int | None = None
  torch_compile: bool = True
  joey: str = ''
  run: str = ''
  data: str = 'data/multi30k'
  data_root: str = 'data'
  pairs: int = 0
  checkout: str = ''
  topology: str = ''
  report_failure: Callable[[str, Exception], None] = _raise

  @property
  def torch_dtypes(self) -> tuple[str, ...]:
    """The dtypes in which PyTorch's models are measured: float32 and, if it is another one, `dtype`."""
    return tuple(dict.fromkeys(('float32', self.dtype)))

  def compile_sides(self, makers: Mapping[Hashable, Callable[[], 'Side']]) -> dict[Hashable, 'Side']:
    """Returns the sides that could be made; reports the others. Arguments: see the function `compile_sides`."""
    return compile_sides(makers, self.report_failure, self.compile_threads)


class Side(NamedTuple):
  """One way to do a piece of work.

  Attributes:
    run: does the work once; on an accelerator it may return before the work is done.
    memory: bytes of temporary memory besides inputs and outputs; None if unknown.
    wait: called with what `run` returned; returns when all work that was started is done.
  """

  run: Callable[[], Any]
  memory: int | None = None
  wait: Callable[[Any], Any] = jax.block_until_ready

  def run_and_wait(self, calls: int = 1) -> float:
    """Does the work `calls` times, waits for its end, and returns the mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
      output = self.run()
    self.wait(output)
    return (time.perf_counter() - start) / calls


@dataclasses.dataclass(frozen=True)
class Timing:
  """Timing of one side of a case.

  Attributes:
    suite: name of the suite.
    case: the work.
    side: the way in which it was done.
    median, low, high: median and quartiles, seconds.
    speed: the median of the first side divided by that of this one; 1 where sides are not compared.
    amount: how much of `unit` one run does; 0 if there is no meaningful rate.
    unit: the unit of `amount`.
    memory: as in Side; in the suite 'memory', the peak resident bytes of a process without those of its imports.
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
  return Side(lambda: compiled(*args), getattr(memory, 'temp_size_in_bytes', None))


def compile_sides(
  makers: Mapping[Hashable, Callable[[], Side]],
  report_failure: Callable[[str, Exception], None] = _raise,
  threads: int | None = None,
) -> dict[Hashable, Side]:
  """Makes sides and runs each of them once, in several threads, because compiling takes long.

  Args:
    makers: name, or a tuple of names -> a function that makes the side.
    report_failure: called with the names and the error of a side that cannot be made or run.
    threads: number of threads; None for the number of cores.

  Returns:
    The sides, without those that failed.
  """

  def make(maker: Callable[[], Side]) -> Side | Exception:
    try:
      side = maker()
      side.run_and_wait()
    except Exception as error:
      return error
    return side

  with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
    made = dict(zip(makers, pool.map(make, makers.values()), strict=True))
  for name, side in made.items():
    if isinstance(side, Exception):
      report_failure(name if isinstance(name, str) else ', '.join(map(str, name)), side)
  return {name: side for name, side in made.items() if isinstance(side, Side)}


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
  evicted. On an accelerator the timed part of a turn consists of as many calls as take MIN_TURN, at most MAX_CALLS, so
  that the host dispatches a call while the device still runs the previous one. The time of a turn is the mean over its
  calls.

  Args:
    suite: name of the suite.
    case: the work.
    sides: the sides by name; the first is what the others are compared with.
    repeats: number of turns.
    amount: how much of `unit` one run does.
    unit: the unit of `amount`.

  Returns:
    A timing per side; none if every side has failed, see `compile_sides`.
  """
  if not sides:
    return []
  for side in sides.values():
    side.run_and_wait()
  calls = {name: _calls_per_turn(side) for name, side in sides.items()}
  seconds = {name: [] for name in sides}
  for _ in range(repeats):
    for name, side in sides.items():
      side.run_and_wait()
      seconds[name].append(side.run_and_wait(calls[name]))
  first_median = np.median(seconds[next(iter(sides))])
  timings = []
  for name, side in sides.items():
    low, median, high = (float(x) for x in np.quantile(seconds[name], (0.25, 0.5, 0.75)))
    speed = float(first_median / median)
    timings.append(Timing(suite, case, name, median, low, high, speed, amount, unit, side.memory))
  return timings


def _calls_per_turn(side: Side) -> int:
  """Returns how many calls of a side are timed together: 1 on a CPU."""
  if jax.default_backend() == 'cpu':
    return 1
  return min(MAX_CALLS, math.ceil(MIN_TURN / side.run_and_wait()))


def median_seconds(side: Side, repeats: int = 7) -> float:
  """Returns the median time of one side, seconds."""
  return compare('', '', {'': side}, repeats=repeats)[0].median


def run_module(module: str, *arguments: str) -> dict[str, Any]:
  """Runs a module of this project in a process of its own, wherever the project is installed.

  Args:
    module: name of the module, whose last line of output is a JSON object.
    arguments: its arguments; paths among them are absolute.

  Returns:
    The JSON object.

  Raises:
    UserError: with the value of `error`, if the object has one.
    subprocess.CalledProcessError: if the process fails.
  """
  command = [sys.executable, '-m', module, *arguments]
  result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
  values = json.loads(result.stdout.splitlines()[-1])
  if 'error' in values:
    raise UserError(values['error'])
  return values


def fit_exponent(sizes, values) -> float:
  """Returns the slope of log values over log sizes: the exponent with which times or bytes grow."""
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
