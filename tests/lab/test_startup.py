"""Milestones of short commands. No test asserts a time."""

import pytest

from attention_jax.systems.config import parse_config
from attention_jax.systems.experiment import check_config
from attention_jax.training.writers import Progress
from experiments.config_files import load_config
from lab.benchmarks import startup
from lab.benchmarks.measure import BenchmarkContext

PROGRAM = """
import sys
for line in {lines!r}:
  print(line)
print('Finished XLA compilation of jit(f) in 1.5 sec', file=sys.stderr)
print('Finished XLA compilation of jit(g) in 5e-1 sec', file=sys.stderr)
print('Finished tracing f for jit in 0.25 sec', file=sys.stderr)
"""


def make_checkout(folder, lines):
  """A folder whose program `train` prints these lines and a few of jax's."""
  (folder / 'experiments').mkdir(exist_ok=True)
  (folder / 'experiments' / 'train.py').write_text(PROGRAM.format(lines=lines))
  return folder


@pytest.fixture
def progress_lines(capsys):
  """The lines that a run of two updates prints."""
  progress = Progress(0, 2)
  for step in (1, 2):
    progress(step, {'train/loss': 1.0, 'train/steps_per_second': 1.0})
  progress(2, {'validation/loss': 1.0})
  progress.close()
  return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.long] if '6 layers' in name else []) for name in startup.COMMANDS]
)
def test_every_command_has_a_valid_config(name):
  command = startup.COMMANDS[name]
  config = load_config(f'configs/{command.config}')
  config.update_from_flattened_dict(dict(command.fields))
  check_config(parse_config(config, name))


def test_milestones_are_read_from_the_lines_of_progress(tmp_path, progress_lines):
  checkout = make_checkout(tmp_path, progress_lines)
  start = startup._run(startup.Command('dates.py', steps=2), checkout, tmp_path, 'cold', '')
  assert set(start.milestones) == {startup.FIRST_LINE, *startup.MILESTONES, startup.END}
  assert all(0 < seconds <= start.milestones[startup.END] for seconds in start.milestones.values())
  assert start.phases == {'tracing': 0.25, 'lowering': 0, 'XLA or its cache': 2.0}
  make_checkout(tmp_path, progress_lines[:-1])
  with pytest.raises(RuntimeError, match='exit status 0, milestones not reached: evaluation\nstarting'):
    startup._run(startup.Command('dates.py', steps=2), checkout, tmp_path, 'cold', '')


def test_commands_run_outside_of_the_project_too(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv('PYTHONPATH', raising=False)
  checkouts = []
  monkeypatch.setattr(startup, '_imports', lambda bench: [])
  monkeypatch.setattr(startup, '_time_command', lambda name, command, folders, bench: checkouts.append(folders) or [])
  assert list(startup.startup(BenchmarkContext(print, 2))) == []
  assert checkouts and all((folder[''] / 'experiments' / 'train.py').is_file() for folder in checkouts)


def test_each_checkout_is_timed_with_an_empty_and_a_filled_cache(tmp_path, progress_lines):
  checkouts = dict.fromkeys(('', ', other'), make_checkout(tmp_path, progress_lines))
  timings = [*startup._time_command('dates', startup.Command('dates.py'), checkouts, BenchmarkContext(print, 2))]
  assert [timing.side for timing in timings[:4]] == ['cold', 'warm', 'cold, other', 'warm, other']
  assert timings[0].speed == 1 and timings[-1].case == 'dates: whole command'
  assert timings[-1].note == 'seconds: tracing 0.2, lowering 0.0, XLA or its cache 2.0'
