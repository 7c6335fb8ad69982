"""Runs suites and says what came out: a table, benchmark.json, and pictures of growth and of ratios."""

import dataclasses
import datetime
import json
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

from attention_jax.errors import UserError, choose
from experiments.benchmarks import kernels, limits, memory, peers, seeds, systems, trained
from experiments.benchmarks.measure import BenchmarkContext, Timing

SUITES: Mapping[str, Callable[[BenchmarkContext], Iterable[Timing]]] = {
  'limits': limits.machine_limits,
  'kernels': kernels.kernels,
  'crossing': kernels.crossing,
  'growth': kernels.growth,
  'agreement': systems.agreement,
  'training': systems.training,
  'memory': memory.training_memory,
  'seeds': seeds.side_by_side,
  'decoding': systems.decoding,
  'pipeline': systems.pipeline,
  'startup': systems.startup,
  'translation': trained.translation,
}


def run_suites(names: Sequence[str], out: str, bench: BenchmarkContext) -> list[Timing]:
  """Runs these suites, or all of them ('translation' only where a trained run is given), and has them say when.

  What fails is told and the rest goes on; at the end the table has what there is.

  Raises: UserError for a suite that there is not, for 'translation' without a run, for a folder that cannot be written
    to, and at the end where something has failed.
  """
  names = names or [name for name in SUITES if name != 'translation' or bench.run]
  for name in names:
    choose(name, SUITES, 'suite')
  if 'translation' in names and not bench.run:
    raise UserError('the suite translation needs --run=FOLDER of a trained bahdanau2015, and --data')
  folder, began, timings, failures = Path(out), time.monotonic(), [], {}
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'--out={out}: cannot be written to: {error.strerror}') from error
  device = jax.devices()[0]
  about = {
    'device': f'{len(jax.devices())} x {device.device_kind}',
    'cores': os.cpu_count(),
    'machine': platform.machine(),
    'jax': jax.__version__,
    'dtype': bench.dtype,
    'beside': peers.VERSION if bench.torch_dtypes else 'nothing',
    'when': datetime.datetime.now().isoformat(timespec='seconds'),
  }
  print(', '.join(f'{name} {value}' for name, value in about.items()), flush=True)
  log = bench.log

  def failed(what: str, error: Exception) -> None:
    failures[what] = f'{type(error).__name__}: {error}'.strip()
    bench.log(f'failed: {what}: {failures[what].splitlines()[0]}')

  bench = bench._replace(log=lambda line: log(f'[{time.monotonic() - began:4.0f} s] {line}'), report_failure=failed)
  for name in names:
    try:
      for timing in SUITES[name](bench):
        timings.append(timing)
    except Exception as error:  # a suite that the machine cannot run does not cost the others
      failed(f'suite {name}', error)
    # After every suite: what was measured is not lost with what comes later.
    found = [dataclasses.asdict(t) | {'rate': t.rate} for t in timings]
    stored = {'about': about, 'timings': found, 'failures': failures}
    (folder / 'benchmark.json').write_text(json.dumps(stored, indent=1) + '\n')
  print_timings(timings)
  (folder / 'benchmark.md').write_text(as_markdown(about, timings))
  written = [folder / 'benchmark.json', folder / 'benchmark.md', *draw(timings, folder)]
  print('written: ' + ', '.join(str(path) for path in written))
  if failures:
    raise UserError(f'failed: {", ".join(failures)}; why stands in {folder / "benchmark.json"}')
  return timings


COLUMNS = ('ms', 'quartiles', 'speed', 'rate', 'temporary MB')


def print_timings(timings: Sequence[Timing]) -> None:
  """One row per side; 'speed' is how many times as fast as the first side of its case."""
  table = Table('case', 'side', box=box.SIMPLE_HEAD)
  for column in COLUMNS:
    table.add_column(column, justify='right')
  last = None
  for t in timings:
    table.add_row(t.case if t.case != last else '', t.side, *_cells(t))
    if t.note:
      table.add_row('', f'  {t.note}')
    last = t.case
  Console(highlight=False, width=160).print(table)


def as_markdown(about: Mapping[str, object], timings: Sequence[Timing]) -> str:
  """The same, as RESULTS.md has tables."""
  rows = [('case', 'side', *COLUMNS, 'note'), ('---',) * (len(COLUMNS) + 3)]
  rows += [(t.case, t.side, *_cells(t), t.note) for t in timings]
  head = ', '.join(f'{name} {value}' for name, value in about.items())
  return head + '\n\n' + ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def _cells(t: Timing) -> tuple[str, ...]:
  """COLUMNS of one side."""
  rate = f'{_short(t.rate)} {t.unit}/s' if t.amount else ''
  memory = '' if t.memory is None else f'{t.memory / 1e6:.1f}'
  return f'{1e3 * t.median:.2f}', f'{1e3 * t.low:.1f}-{1e3 * t.high:.1f}', f'{t.speed:.2f}', rate, memory


def _short(number: float) -> str:
  for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if number >= size:
      return f'{number / (1e3 if letter == "k" else size):.1f} {letter}'
  return f'{number:.0f}'


def draw(timings: Sequence[Timing], folder: Path) -> list[Path]:
  """Speeds beside the first side of each case, and times over lengths."""
  written = []
  if shown := [t for t in timings if t.suite in ('kernels', 'training', 'seeds', 'decoding')]:
    figure = Figure(figsize=(9, 0.32 * len(shown) + 1), layout='constrained')
    axes = figure.subplots()
    cases = list(dict.fromkeys(t.case for t in shown))
    colours = [f'C{cases.index(t.case) % 10}' for t in shown]
    axes.barh([f'{t.case}: {t.side}' for t in shown], [1e3 * t.median for t in shown], color=colours)
    axes.set_xscale('log')
    axes.invert_yaxis()
    axes.set_xlabel('milliseconds (median)')
    axes.tick_params(labelsize=7)
    written.append(_save(figure, folder / 'times.png'))
  if grown := [t for t in timings if t.suite == 'growth']:
    written.append(_save(_growth(grown), folder / 'growth.png'))
  return written


def _growth(grown: Sequence[Timing]) -> Figure:
  """Times above, memory below; beside each other what grows, as the cases ('additive T=S=64') have it."""
  lines: dict[str, dict[str, list[tuple[int, Timing]]]] = {}
  for t in grown:
    score, case = t.case.split(' ')
    what, _, size = case.rpartition('=')
    lines.setdefault(what, {}).setdefault(f'{score} by {t.side}', []).append((int(size), t))
  figure = Figure(figsize=(4 * len(lines), 6.4), layout='constrained')
  axes = figure.subplots(2, len(lines), squeeze=False, sharex='col')
  for (what, sides), (above, below) in zip(lines.items(), axes.T, strict=True):
    for label, points in sides.items():
      sizes = [size for size, _ in points]
      above.loglog(sizes, [t.median for _, t in points], 'o-', label=label)
      below.loglog(sizes, [t.memory / 2**20 for _, t in points], 'o-', label=label)
    below.set_xlabel(what)
  axes[0, 0].set_ylabel('seconds, forward and backward')
  axes[1, 0].set_ylabel('temporary memory, MiB')
  axes[0, 0].legend(fontsize=8)
  return figure


def _save(figure: Figure, path: Path) -> Path:
  figure.savefig(path, dpi=150)
  return path
