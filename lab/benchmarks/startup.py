"""Start of programs: seconds from a `train` command to its milestones, with an empty and a filled compilation cache."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.config_files import PROJECT
from lab.benchmarks.measure import BenchmarkContext, Side, Timing, compare


class Command(NamedTuple):
  """A short run.

  Attributes:
    config: file and preset in configs/.
    steps: number of updates, after which the run evaluates.
    fields: further fields of the config.
    data: the folder of its data below --data_root; '' for generated data.
  """

  config: str
  steps: int = 10
  fields: Mapping[str, object] = {}
  data: str = ''


def _small_transformer(layers: int) -> Command:
  """Returns a run of this number of layers, to measure the compilation of a layer: XLA compiles each layer again."""
  stack = f'transformer(features=256, layers={layers}, heads=4, hidden=1024)'
  fields = {'model.encoder': stack, 'model.decoder': stack}
  return Command('multi30k.py:transformer2017_small', steps=20, fields=fields, data='multi30k')


COMMANDS = {
  'dates': Command('dates.py:bahdanau2015_deep_tanh'),
  'nettalk': Command('nettalk.py:bahdanau2015_deep_tanh', data='nettalk'),
  'nettalk, 8 seeds': Command('nettalk.py:bahdanau2015_deep_tanh', fields={'seeds': 8}, data='nettalk'),
  'nettalk, latent': Command(
    'nettalk.py:bahdanau2015_deep_tanh', fields={'model.attention.alignment': 'latent'}, data='nettalk'
  ),
  'nettalk, latent_monotonic': Command(
    'nettalk.py:bahdanau2015_deep_tanh', fields={'model.attention.alignment': 'latent_monotonic'}, data='nettalk'
  ),
  'nettalk, mocha': Command(
    'nettalk.py:bahdanau2015_deep_tanh', fields={'model.attention.alignment': 'mocha'}, data='nettalk'
  ),
  'multi30k, RNN': Command('multi30k.py:bahdanau2015_deep_tanh', steps=20, data='multi30k'),
  'multi30k, Transformer': Command('multi30k.py:transformer2017', steps=20, data='multi30k'),
  'multi30k, small Transformer, 1 layer': _small_transformer(1),
  'multi30k, small Transformer, 6 layers': _small_transformer(6),
  'imdb': Command('imdb.py:yang2016', data='imdb'),
  'shapes': Command('shapes.py:xu2015_soft'),
}
# milestone -> the line of the program that reports it
MILESTONES = {
  'first update': re.compile(r'^step 1/'),
  'all updates': re.compile(r'^step (\d+)/\1 .* loss '),
  'evaluation': re.compile(r'^step .* validation/'),
}
END = 'whole command'
FIRST_LINE = 'first line'  # by then everything is imported
# part of the compilation -> the line in which jax reports its seconds with JAX_LOG_COMPILES=1
PHASES = {
  'tracing': re.compile(r'Finished tracing .* in ([\d.e-]+) sec'),
  'lowering': re.compile(r'Finished jaxpr to MLIR module conversion .* in ([\d.e-]+) sec'),
  'XLA or its cache': re.compile(r'Finished XLA compilation .* in ([\d.e-]+) sec'),
}


class CommandTimes(NamedTuple):
  """Times of one command.

  Attributes:
    milestones: seconds from the start of the command, by milestone.
    phases: seconds by phase of compilation, over the whole command.
  """

  milestones: dict[str, float]
  phases: dict[str, float]


def startup(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times imports, and the COMMANDS whose data are there."""
  bench.log('imports')
  yield from _imports(bench)
  checkouts = {'': PROJECT} | ({', the other checkout': Path(bench.checkout).absolute()} if bench.checkout else {})
  for name, command in COMMANDS.items():
    if command.data and not (Path(bench.data_root) / command.data).is_dir():
      bench.log(f'{name}: not measured, as --data_root={bench.data_root} has no folder {command.data}')
      continue
    bench.log(f'{name}: {command.steps} updates and their evaluation')
    yield from _time_command(name, command, checkouts, bench)


def _imports(bench: BenchmarkContext) -> list[Timing]:
  """Times new interpreters that import what a program needs."""
  code = {
    'import attention_jax': 'import attention_jax',
    'import jax': 'import jax, jax.numpy',
    'the trainer': 'import attention_jax.systems.experiment',
  }

  def interpreter_side(statement: str) -> Side:
    return Side(lambda: subprocess.run([sys.executable, '-c', statement], check=True, cwd=PROJECT))

  sides = {name: interpreter_side(statement) for name, statement in code.items()}
  return compare('startup', 'imports', sides, repeats=min(bench.repeats, 3))


def _time_command(
  name: str, command: Command, checkouts: Mapping[str, Path], bench: BenchmarkContext
) -> Iterator[Timing]:
  """Times a command in turns: in each checkout with an empty compilation cache, then with the one it has filled."""
  times = defaultdict(list)
  for _ in range(min(bench.repeats, 3)):
    for checkout_name, checkout in checkouts.items():
      with tempfile.TemporaryDirectory() as folder:
        for cache in ('cold', 'warm'):
          times[cache + checkout_name].append(_run(command, checkout, Path(folder), cache, bench.data_root))
  first = next(iter(times))
  for milestone in (FIRST_LINE, *MILESTONES, END):
    case = f'{name}: {milestone}'
    baseline = np.median([run.milestones[milestone] for run in times[first]])
    for side, runs in times.items():
      low, median, high = np.quantile([run.milestones[milestone] for run in runs], (0.25, 0.5, 0.75)).tolist()
      note = _describe_phases(runs) if milestone == END else ''
      yield Timing('startup', case, side, median, low, high, float(baseline / median), note=note)


def _describe_phases(runs: list[CommandTimes]) -> str:
  medians = {phase: np.median([run.phases[phase] for run in runs]) for phase in PHASES}
  return 'seconds: ' + ', '.join(f'{phase} {seconds:.1f}' for phase, seconds in medians.items())


def _run(command: Command, checkout: Path, folder: Path, run_name: str, data_root: str) -> CommandTimes:
  """Runs a command once, and measures when its lines appear.

  Args:
    command: the command.
    checkout: a checkout of this repository.
    folder: the folder of the compilation cache and of the runs.
    run_name: name of the new run's folder and log.
    data_root: see BenchmarkContext.

  Raises:
    RuntimeError: if the command fails, or does not print the line of a milestone.
  """
  fields = {'training.steps': command.steps, 'training.log_every': 1, **command.fields}
  if command.data:
    fields['data.folder'] = str(Path(data_root, command.data).absolute())
  arguments = [f'--config=configs/{command.config}', f'--workdir={folder / run_name}']
  arguments += [f'--config.{field}={value}' for field, value in fields.items()]
  environment = {'JAX_COMPILATION_CACHE_DIR': str(folder / 'cache'), 'JAX_LOG_COMPILES': '1', 'PYTHONUNBUFFERED': '1'}
  log_path = folder / f'{run_name}.log'
  start = time.monotonic()
  milestones = {}
  lines = []
  with open(log_path, 'w', encoding='utf-8') as log:
    program = [sys.executable, '-m', 'experiments.train', *arguments]
    pipes = {'stdout': subprocess.PIPE, 'stderr': log, 'text': True}
    with subprocess.Popen(program, cwd=checkout, env=os.environ | environment, **pipes) as process:
      for line in process.stdout:
        seconds = time.monotonic() - start
        lines.append(line)
        milestones.setdefault(FIRST_LINE, seconds)
        for milestone, pattern in MILESTONES.items():
          if pattern.search(line):
            milestones.setdefault(milestone, seconds)
  milestones[END] = time.monotonic() - start
  text = log_path.read_text('utf-8')
  if process.returncode or len(milestones) < len(MILESTONES) + 2:
    missing = ', '.join(name for name in (FIRST_LINE, *MILESTONES) if name not in milestones) or 'none'
    result = f'exit status {process.returncode}, milestones not reached: {missing}'
    raise RuntimeError(f'{" ".join(arguments)}: {result}\n{"".join(lines[-5:])}{text[-2000:]}')
  phases = {phase: sum(map(float, pattern.findall(text))) for phase, pattern in PHASES.items()}
  return CommandTimes(milestones, phases)
