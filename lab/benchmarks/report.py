"""Runs suites and reports their timings: a table, benchmark.json, benchmark.md and pictures."""

import dataclasses
import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from attention_jax import atomic
from attention_jax.errors import UserError, choose
from attention_jax.training.paths import run_path
from lab.benchmarks import (
  agreement,
  aot,
  decoding,
  kernels,
  limits,
  memory,
  peers,
  prepared,
  seeds,
  startup,
  systems,
  trained,
  updates,
)
from lab.benchmarks.measure import BenchmarkContext, Timing

SUITES: Mapping[str, Callable[[BenchmarkContext], Iterable[Timing]]] = {
  'limits': limits.machine_limits,
  'kernel_agreement': agreement.kernel_agreement,
  'kernels': kernels.kernels,
  'crossing': kernels.crossing,
  'growth': kernels.growth,
  'agreement': systems.agreement,
  'training': systems.training,
  'auto': updates.auto_updates,
  'memory': memory.training_memory,
  'seeds': seeds.side_by_side,
  'decoding': decoding.recurrent_decoding,
  'transformer_decoding': decoding.transformer_decoding,
  'pipeline': systems.pipeline,
  'startup': startup.startup,
  'prepared': prepared.prepared,
  'translation': trained.translation,
  'aot': aot.ahead_of_time,
}
# suite -> the setting without which it is left out, and the flags that it needs
REQUIREMENTS = {
  'prepared': ('pairs', '--pairs=NUMBER, such as 4640000, and --data_root'),
  'translation': ('run', '--run=FOLDER of a trained bahdanau2015_deep_tanh, and --data'),
  'aot': ('topology', '--topology=TOPOLOGY, such as v5e:1x1, and libtpu'),
}

# setting -> the suites that depend on it; with any other suites alone it would have no effect
SUITES_OF_SETTINGS = {
  'run': ('translation',),
  'data': ('translation',),
  'pairs': ('prepared',),
  'data_root': ('startup', 'prepared'),
  'checkout': ('startup',),
  'topology': ('aot',),
  'joey': ('training', 'decoding'),
  'torch_compile': ('kernels', 'training'),
  'dtype': (
    'limits',
    'kernel_agreement',
    'kernels',
    'crossing',
    'growth',
    'training',
    'memory',
    'decoding',
    'transformer_decoding',
    'translation',
  ),
  'compile_threads': (
    'kernel_agreement',
    'kernels',
    'crossing',
    'growth',
    'training',
    'auto',
    'seeds',
    'decoding',
    'transformer_decoding',
  ),
}

TRAINING_PROGRAM = 'experiments/train.py'  # that the suite 'startup' runs in a checkout
REPORT = 'benchmark.json'
COLUMNS = ('ms', 'quartiles', 'speed', 'rate', 'temporary MB')


def run_suites(names: Sequence[str], out: str, bench: BenchmarkContext) -> list[Timing]:
  """Runs suites and writes their report.

  A failure is logged, and the other suites still run.

  Args:
    names: keys of SUITES; if empty, all of them whose REQUIREMENTS are met.
    out: the folder of the report; if empty, a new one in runs/, named by date and time.
    bench: settings of the suites.

  Returns:
    The timings of all suites.

  Raises:
    UserError: for an unknown suite, for one without its requirement, for a setting that none of the suites depends on,
      for a checkout without programs, for a folder that has a report or cannot be made, and if a suite failed, after
      all of them.
  """
  missing = {name: needed for name, (setting, needed) in REQUIREMENTS.items() if not getattr(bench, setting)}
  names = names or [name for name in SUITES if name not in missing]
  for name in names:
    choose(name, SUITES, 'suite')
    if name in missing:
      raise UserError(f'the suite {name!r} needs {missing[name]}')
  _check_settings(names, bench)
  folder = _make_report_folder(out)
  environment = describe_environment(bench)
  print(_join_items(environment), flush=True)
  start = time.monotonic()
  log = bench.log
  timings = []
  failures = {}

  def report_failure(case_name: str, error: Exception) -> None:
    failures[case_name] = f'{type(error).__name__}: {error}'.strip()
    bench.log(f'failed: {case_name}: {failures[case_name].splitlines()[0]}')

  bench = bench._replace(
    log=lambda line: log(f'[{time.monotonic() - start:4.0f} s] {line}'),
    report_failure=report_failure,
  )
  for name in names:
    try:
      for timing in SUITES[name](bench):
        timings.append(timing)
    except Exception as error:  # the other suites still run
      report_failure(f'suite {name}', error)
    # After every suite, so that a later crash does not lose its timings.
    _write_json(folder / REPORT, environment, timings, failures)
  print_timings(timings)
  atomic.write_text(folder / 'benchmark.md', as_markdown(environment, timings))
  written = [folder / REPORT, folder / 'benchmark.md', *draw(timings, folder)]
  print('written: ' + ', '.join(str(path) for path in written))
  if failures:
    raise UserError(f'failed: {", ".join(failures)}; the errors are in {folder / REPORT}')
  return timings


def _check_settings(names: Sequence[str], bench: BenchmarkContext) -> None:
  """Raises UserError for a setting that no suite of `names` depends on, and for a checkout without programs."""
  for setting, suites in SUITES_OF_SETTINGS.items():
    value = getattr(bench, setting)
    if value != BenchmarkContext._field_defaults[setting] and not set(suites) & set(names):
      raise UserError(
        f'--{setting}={value} has no effect on the suites {", ".join(names)}; only on: {", ".join(suites)}'
      )
  if bench.checkout and not Path(bench.checkout, TRAINING_PROGRAM).is_file():
    raise UserError(f'--checkout={bench.checkout}: has no {TRAINING_PROGRAM}; expected a checkout of this repository')


def _make_report_folder(out: str) -> Path:
  """Makes the folder of the report, see run_suites. Raises UserError if it has a report, or cannot be made."""
  folder = run_path(out or f'runs/benchmark-{datetime.datetime.now():%Y%m%d-%H%M%S}')
  report = folder / REPORT
  if report.exists():
    raise UserError(f'{report} exists; choose another --out')
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'--out={out}: cannot be written to: {error.strerror}') from error
  return folder


def describe_environment(bench: BenchmarkContext) -> dict[str, object]:
  """Returns what the timings depend on: machine, devices and versions."""
  devices = jax.devices()
  return {
    'device': f'{len(devices)} x {devices[0].device_kind}',
    'cores': os.cpu_count(),
    'machine': platform.machine(),
    'jax': jax.__version__,
    'dtype': bench.dtype,
    'compared_with': peers.describe(),
    'when': datetime.datetime.now().isoformat(timespec='seconds'),
  }


def _write_json(
  path: Path, environment: Mapping[str, object], timings: Sequence[Timing], failures: Mapping[str, str]
) -> None:
  records = [dataclasses.asdict(timing) | {'rate': timing.rate} for timing in timings]
  record = {'environment': environment, 'timings': records, 'failures': failures}
  atomic.write_text(path, atomic.to_json(record, indent=1) + '\n')


def _join_items(items: Mapping[str, object]) -> str:
  return ', '.join(f'{name} {value}' for name, value in items.items())


def print_timings(timings: Sequence[Timing]) -> None:
  """Prints one row per side, and below it its note; 'speed' is relative to the first side of the case."""
  table = Table('case', 'side', box=box.SIMPLE_HEAD)
  for column in COLUMNS:
    table.add_column(column, justify='right')
  previous_case = None
  for timing in timings:
    table.add_row(timing.case if timing.case != previous_case else '', timing.side, *_cells(timing))
    if timing.note:
      table.add_row('', f'  {timing.note}')
    previous_case = timing.case
  Console(highlight=False, width=160).print(table)


def as_markdown(environment: Mapping[str, object], timings: Sequence[Timing]) -> str:
  """Returns the environment and a Markdown table of the timings."""
  rows = [('case', 'side', *COLUMNS, 'note'), ('---',) * (len(COLUMNS) + 3)]
  rows += [(timing.case, timing.side, *_cells(timing), timing.note) for timing in timings]
  return _join_items(environment) + '\n\n' + ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def _cells(timing: Timing) -> tuple[str, ...]:
  """Returns the COLUMNS of one side."""
  return (
    f'{1e3 * timing.median:.2f}',
    f'{1e3 * timing.low:.1f}-{1e3 * timing.high:.1f}',
    f'{timing.speed:.2f}',
    f'{_format_number(timing.rate)} {timing.unit}/s' if timing.amount else '',
    '' if timing.memory is None else f'{timing.memory / 1e6:.1f}',
  )


def _format_number(number: float) -> str:
  """Formats a number with an SI prefix; k only from 10,000 on."""
  for threshold, unit, prefix in ((1e9, 1e9, 'G'), (1e6, 1e6, 'M'), (1e4, 1e3, 'k')):
    if number >= threshold:
      return f'{number / unit:.1f} {prefix}'
  return f'{number:.0f}'


def draw(timings: Sequence[Timing], folder: Path) -> list[Path]:
  """Draws the times of kernels, training, seeds and searches, and the growth of time and memory with size.

  A picture of suites that have not run is left out.

  Returns:
    The files that were written.
  """
  written = []
  if compared := [timing for timing in timings if timing.suite in ('kernels', 'training', 'seeds', 'decoding')]:
    written.append(_save(_draw_times(compared), folder / 'times.png'))
  if grown := [timing for timing in timings if timing.suite == 'growth']:
    written.append(_save(_draw_growth(grown), folder / 'growth.png'))
  return written


def _draw_times(timings: Sequence[Timing]) -> Figure:
  """A bar per side, a colour per case."""
  figure = Figure(figsize=(9, 0.32 * len(timings) + 1), layout='constrained')
  axes = figure.subplots()
  cases = list(dict.fromkeys(timing.case for timing in timings))
  colours = [f'C{cases.index(timing.case) % 10}' for timing in timings]
  labels = [f'{timing.case}: {timing.side}' for timing in timings]
  axes.barh(labels, [1e3 * timing.median for timing in timings], color=colours)
  axes.set_xscale('log')
  axes.invert_yaxis()
  axes.set_xlabel('milliseconds (median)')
  axes.tick_params(labelsize=7)
  return figure


def _draw_growth(timings: Sequence[Timing]) -> Figure:
  """A column per axis that grows, times above, memory below; cases have the form 'additive T=S=64'."""
  lines: dict[str, dict[str, list[tuple[int, Timing]]]] = {}
  for timing in timings:
    score, sizes = timing.case.split(' ')
    axis, _, size = sizes.rpartition('=')
    label = f'{score} by {timing.side}'
    lines.setdefault(axis, {}).setdefault(label, []).append((int(size), timing))
  figure = Figure(figsize=(4 * len(lines), 6.4), layout='constrained')
  axes = figure.subplots(2, len(lines), squeeze=False, sharex='col')
  for (axis, sides), (time_axes, memory_axes) in zip(lines.items(), axes.T, strict=True):
    for label, points in sides.items():
      sizes = [size for size, _ in points]
      time_axes.loglog(sizes, [timing.median for _, timing in points], 'o-', label=label)
      mebibytes = [math.nan if timing.memory is None else timing.memory / 2**20 for _, timing in points]
      memory_axes.loglog(sizes, mebibytes, 'o-', label=label)
    memory_axes.set_xlabel(axis)
  axes[0, 0].set_ylabel('seconds, forward and backward')
  axes[1, 0].set_ylabel('temporary memory, MiB')
  axes[0, 0].legend(fontsize=8)
  return figure


def _save(figure: Figure, path: Path) -> Path:
  figure.savefig(path, dpi=150)
  return path
