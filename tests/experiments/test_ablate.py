"""ablate.py and compare.py as command lines: mistakes, a sweep of real runs, its report, and a comparison."""

import os

import pytest

from attention_jax.sweeps.ledger import PLANNED, Unit, open_ledger, planned_event
from attention_jax.sweeps.sweep import Outcome
from experiments.config_files import load_sweep
from tests import compiled
from tests.experiments.helpers import DEVICES, run, tiny_arguments
from tests.experiments.test_bad_input import assert_user_error
from tests.sweeps.helpers import make_sweep

CONFIG = '--config=configs/dates.py:luong2015_birnn'
SWEEP_FILE = """
from attention_jax.sweeps.space import Sweep, grid
from attention_jax.systems.config import default_config

def get_config(preset='a'):
  return default_config()

def get_sweep():
  return Sweep(grid({'model.embedding': [16, 32]}), seeds=2, question='Which size?', metrics=('exact_match',))
"""

# arguments -> parts of the message
X = ['--workdir=x', CONFIG]
# arguments -> parts of the message
MISTAKES = [
  ([], ['--workdir is missing']),
  (['--workdir=x'], ['--config is missing']),
  ([*X, '--search='], ['--search is empty; expected field=log(low=1e-4, high=1e-2)']),
  ([*X, *2 * ['--search=model.dropout=linear(low=0.1, high=0.2)']], ['model.dropout must be set once']),
  ([*X, '--points=5'], ['--points needs --search, which draws the settings']),
  ([*X, '--cluster=local', '--workers=2'], ['--workers has no effect with --cluster, whose option']),
  ([*X, '--submit=q {command}', '--workers=2'], ['--workers has no effect with --submit']),
  ([*X, '--submit=q {command}', '--cluster=slurm'], ['--cluster has no effect with --submit']),
  (['--workdir=gs://x', CONFIG], ["'gs://x' names no folder of a bucket"]),
  ([*X, '--grid=score=dot'], ["unknown field of config: 'score'", "'model.attention.score'?"]),
  ([*X, '--grid=preset=luong'], ["unknown preset 'luong'", "'luong2015'?"]),
  ([*X, '--dry_run', '--test=wilcox'], ["unknown value of --test 'wilcox'", "'wilcoxon'?"]),
  ([*X, '--metrics=exact'], ["unknown metric of the report 'exact'", "'exact_match'?"]),
  ([*X, 'extra'], ["unexpected argument 'extra'"]),
  (['--workdir=nowhere', '--report'], ['nowhere holds no ledger.jsonl']),
  (['--workdir=x', '--report', '--grid=a=1,2'], ['--grid has no effect with --report']),
  (['--workdir=x', '--report', '--dry_run'], ['--dry_run has no effect with --report']),
]


@pytest.mark.parametrize(('arguments', 'parts'), MISTAKES)
def test_mistakes_are_one_line(arguments, parts):
  assert_user_error(run('ablate', *arguments), parts)


@pytest.mark.long
def test_several_mistakes_are_one_line_each(tmp_path):
  grids = ['--grid=model.attention.score=dott,dot', '--grid=model.attention.alignment=softmax,entmax(alfa=1)']
  result = run('ablate', f'--workdir={tmp_path / "x"}', CONFIG, *grids)
  first, second = result.err.splitlines()
  assert result.code == 2 and first.startswith("error: unknown score 'dott'") and "'alfa'" in second
  assert not (tmp_path / 'x').exists()


def test_mistakes_with_a_file_that_defines_a_sweep_name_the_file(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(SWEEP_FILE)
  arguments = ['ablate', f'--workdir={tmp_path / "x"}', f'--config={path}']
  assert_user_error(run(*arguments, '--grid=model.embedding=3'), ['mine.py defines get_sweep(); expected no --grid'])
  path.write_text(SWEEP_FILE.replace('Sweep(grid', '(grid'))
  assert_user_error(run(*arguments), ['mine.py:9: invalid syntax'])


def test_a_sweep_may_depend_on_the_preset(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(SWEEP_FILE)
  assert load_sweep(f'{path}:b').seeds == 2
  path.write_text(SWEEP_FILE.replace('get_sweep()', "get_sweep(preset='a')").replace('seeds=2', 'seeds=ord(preset)'))
  assert [load_sweep(f'{path}{preset}').seeds for preset in ('', ':b')] == [ord('a'), ord('b')]


@pytest.mark.long
def test_a_sweep_without_finished_runs_ends_without_a_report(tmp_path, monkeypatch):
  folder = tmp_path / 'sweep'
  with open_ledger(folder) as ledger:
    ledger.append(PLANNED, **planned_event(Unit('u', 'id', {}, 'f.py', {}, (0,), 'u')))
  monkeypatch.setattr('attention_jax.sweeps.sweep.run_sweep', lambda *args: Outcome(0, 0, 1))
  result = run('ablate', f'--workdir={folder}', CONFIG, '--grid=model.attention.score=dot')
  assert result.code == 75 and not result.err


@pytest.mark.long
def test_trackers_are_those_of_every_run_and_the_sweep_is_their_group(tmp_path, monkeypatch):
  requests = []
  monkeypatch.setattr(
    'attention_jax.sweeps.sweep.run_sweep', lambda request, *args: requests.append(request) or Outcome(0, 0, 1)
  )
  for trackers in ([], ['--trackers=wandb,csv']):
    run('ablate', f'--workdir={tmp_path}/grid/', CONFIG, '--grid=model.attention.score=dot', *trackers)
  assert [request.train[3:] for request in requests] == [[], ['--trackers=wandb,csv', '--group=grid']]


def test_a_report_is_written_from_the_ledger(tmp_path):
  make_sweep(tmp_path / 's', [{'model.attention.score': 'dot'}, {'model.attention.score': 'general'}])
  baseline = '--baseline=model.attention.score=general'
  result = run('ablate', '--report', f'--workdir={tmp_path / "s"}', '--metrics=exact_match', baseline)
  assert result.code == 0, result.err
  assert 'exact_match, test, compared with score=general: worse: score=dot (-' in result.out
  assert (tmp_path / 's' / 'report.html').exists()


@pytest.mark.long
def test_a_sweep_of_real_runs_is_planned_run_reported_and_compared(task, tmp_path, monkeypatch):
  xla_flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count={DEVICES}'
  for name, value in (compiled.cache_environment() | {'XLA_FLAGS': xla_flags}).items():
    monkeypatch.setenv(name, value)
  folder = tmp_path / 'sweep'
  arguments = [*tiny_arguments(task, folder), '--seeds=1', '--grid=model.attention.alignment=softmax,sparsemax']
  plan = run('ablate', *arguments, '--dry_run')
  assert plan.code == 0 and 'alignment=sparsemax: seed 0, ' in plan.out and not folder.exists(), plan.err
  result = run('ablate', *arguments)
  assert result.code == 0, result.out + result.err
  assert '2 finished, 0 failed, 0 unfinished' in result.out and 'written: ' in result.out
  page = (folder / 'report.html').read_text('utf-8')
  assert 'alignment=sparsemax' in page and 'phoneme_error_rate, test' in page
  again = run('ablate', *arguments)
  assert again.code == 0 and 'started' not in again.out
  runs = sorted(str(path.parent) for path in folder.glob('*/seed_0/results.json'))
  comparison = run('compare', *runs, f'--output={tmp_path}/comparison/')
  assert comparison.code == 0, comparison.err
  text = (tmp_path / 'comparison' / 'report.md').read_text('utf-8')
  assert '| model.attention.alignment | softmax | sparsemax |' in text and '| p = ' in text


def test_compare_needs_two_run_folders(trained, tmp_path):
  assert_user_error(run('compare', trained[0]), ['expected at least two run folders'])
  assert_user_error(run('compare', trained[0], tmp_path), ['holds no config.json'])
