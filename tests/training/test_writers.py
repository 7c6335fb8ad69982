"""Writers: metrics survive kills, and the progress line serves a terminal and a pipe."""

import json
import math
import subprocess
import sys
import time as real_time
import types

import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_jax.errors import UserError
from attention_jax.training import writers
from attention_jax.training.writers import (
  JsonLines,
  Progress,
  RunInfo,
  TensorBoard,
  last_step,
  make_trackers,
  read_metrics,
)


def write(writer, *records):
  for record in records:
    writer.write(*record)
  writer.close()


def report(progress, *records):
  for record in records:
    progress(*record)
  progress.close()


def test_parts_that_begin_at_the_start_of_a_resumed_run_or_later_are_removed(tmp_path):
  first = JsonLines(epath.Path(tmp_path), 0)
  write(first, (5, {'train/loss': 0.2}), (10, {'train/loss': 0.1}))
  first.begin_part(10)  # a checkpoint
  write(first, (15, {'train/loss': 9.0}))
  assert sorted(path.name for path in (tmp_path / 'metrics').iterdir()) == ['0000000000.jsonl', '0000000010.jsonl']
  writer = JsonLines(epath.Path(tmp_path), 10)
  assert [record['step'] for record in read_metrics(tmp_path)] == [5, 10] and last_step(tmp_path) == 10
  write(writer, (15, {'validation/signature': 'é', 'train/loss': 2.0}))
  assert [record['step'] for record in read_metrics(tmp_path)] == [5, 10, 15] and last_step(tmp_path) == 15
  assert read_metrics(tmp_path)[-1] == {'step': 15, 'train/loss': 2.0, 'validation/signature': 'é'}


def test_a_part_has_a_largest_number_of_lines(tmp_path, monkeypatch):
  monkeypatch.setattr(writers, 'MAX_LINES', 2)
  write(JsonLines(epath.Path(tmp_path), 0), *((step, {'train/loss': 1.0}) for step in range(1, 6)))
  assert [len(path.read_text().splitlines()) for path in sorted((tmp_path / 'metrics').iterdir())] == [2, 2, 1]
  assert [record['step'] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_every_line_is_json_for_every_loss(tmp_path):
  write(
    JsonLines(epath.Path(tmp_path), 0),
    (1, {'train/loss': math.inf}),
    (2, {'train/loss': -math.inf, 'train/accuracy': math.nan}),
  )
  for line in (tmp_path / 'metrics' / '0000000000.jsonl').read_text().splitlines():
    json.loads(line, parse_constant=pytest.fail)
  assert all(math.isnan(record['train/loss']) for record in read_metrics(tmp_path))


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r'0000000000\.jsonl: cannot be written \(No such file or directory\)'):
    JsonLines(epath.Path(tmp_path) / 'missing', 0).write(1, {})


def test_records_of_one_step_are_merged(tmp_path):
  records = (5, {'train/loss': 1.0}), (10, {'train/loss': 2.0}), (10, {'validation/loss': 3.0})
  write(JsonLines(epath.Path(tmp_path), 0), *records)
  merged = [{'step': 5, 'train/loss': 1.0}, {'step': 10, 'train/loss': 2.0, 'validation/loss': 3.0}]
  assert read_metrics(tmp_path) == merged


def part_of(folder):
  (folder / 'metrics').mkdir(exist_ok=True)
  return folder / 'metrics' / '0000000000.jsonl'


@pytest.mark.parametrize('line', ['[]', '{"loss": 1}', '{"step": "x"}', '{"step": 1', '{"step": 1e999}'])
def test_a_damaged_line_is_named(tmp_path, line):
  part_of(tmp_path).write_text(f'{{"step": 1}}\n{line}\n')
  with pytest.raises(UserError, match=r'0000000000\.jsonl:2: not a record of metrics'):
    read_metrics(tmp_path)
  assert last_step(tmp_path) is None
  part_of(tmp_path).unlink()
  part_of(tmp_path).mkdir()
  with pytest.raises(UserError, match=r'cannot read .*0000000000\.jsonl: Is a directory'):
    read_metrics(tmp_path)


PARTS = st.sampled_from([b'{"step":', b'1', b'-1e999', b'NaN', b'"x"', b'}', b'[', b']', b',', b'\n'])


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.lists(PARTS).map(b''.join))
def test_any_content_is_read_or_an_error_of_one_line(tmp_path, content):
  part_of(tmp_path).write_bytes(content)
  try:
    read_metrics(tmp_path)
  except UserError as error:
    assert '\n' not in str(error)


@pytest.mark.parametrize('work', ['', 'compiling shape 3 of 7'])
def test_silence_before_the_first_record_is_reported(pipe, capsys, monkeypatch, work):
  monkeypatch.setattr(writers, 'FIRST_REPORT', 0.01)
  progress = Progress(0, 10, *[lambda: work] * bool(work))
  real_time.sleep(0.2)
  report(progress, (5, {'train/loss': 1.0, 'train/steps_per_second': 1.0}))
  lines = capsys.readouterr().out.splitlines()
  start = f'{work or "compiling the update"}, or making the first updates, for 0 s'
  assert 2 <= sum(line.startswith(start) for line in lines) <= 6  # intervals double
  assert lines[-1].startswith('step 5/10') and lines[-1].endswith(work)


def test_tensorboard_files_are_written(tmp_path):
  tracker = TensorBoard(RunInfo(epath.Path(tmp_path)))
  tracker.open(0)
  write(tracker, (5, {'train/loss': 1.5, 'validation/signature': 'words'}))
  (events,) = (tmp_path / 'tensorboard').iterdir()
  content = events.read_bytes()
  assert b'train/loss' in content and b'signature' not in content


@pytest.mark.long
def test_tensorboard_loads_no_package_that_it_does_not_need(tmp_path):
  packages = tmp_path / 'packages'
  (packages / 'google' / 'cloud').mkdir(parents=True)
  for name in ('torch.py', 'boto3.py', 'google/cloud/storage.py'):
    (packages / name).touch()
  code = f"""
import pathlib, sys
from attention_jax.training.writers import RunInfo, TensorBoard
sys.path.insert(0, {str(packages)!r})
tracker = TensorBoard(RunInfo(pathlib.Path({str(tmp_path)!r})))
tracker.open(0)
tracker.write(5, {{'train/loss': 1.5}})
assert not {{'torch', 'boto3', 'google.cloud.storage'}} & sys.modules.keys()
import boto3, google.cloud.storage, torch
"""
  subprocess.run([sys.executable, '-c', code], check=True)
  assert (tmp_path / 'tensorboard').exists()


@pytest.fixture
def time(monkeypatch):
  """A clock that only the test advances: `time.now` in seconds."""
  fake = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr('rich.console.monotonic', lambda: fake.now)
  return fake


@pytest.fixture
def pipe(monkeypatch):
  for name in ('FORCE_COLOR', 'TTY_COMPATIBLE'):
    monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch):
  for name in ('NO_COLOR', 'TTY_COMPATIBLE'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('FORCE_COLOR', '1')
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '200')


def training_record(loss, rate=2.0):
  return {'train/loss': loss, 'train/grad_norm': 1.0, 'train/steps_per_second': rate, 'train/tokens_per_second': 1234.5}


def test_a_pipe_gets_one_line_per_record(pipe, capsys):
  report(
    Progress(0, 10),
    (5, training_record(0.123456)),
    (10, training_record(0.1)),
    (10, {'validation/loss': 0.5, 'validation/signature': '[v1]'}),
  )
  assert capsys.readouterr().out.splitlines() == [
    'starting at step 0 of 10',
    'step 5/10  left -:--:--  loss 0.1235  tokens/s 1,234  steps/s 2',
    'step 10/10  left 0:00:00  loss 0.1  tokens/s 1,234  steps/s 2',
    'step 10/10  validation/loss 0.5  validation/signature [v1]',
  ]


def test_a_notebook_gets_the_same_lines(pipe, capsys, monkeypatch):
  monkeypatch.setattr('rich.console._is_jupyter', lambda: True)
  report(Progress(0, 10), (10, {'validation/loss': 0.5}))
  assert capsys.readouterr().out.splitlines() == ['starting at step 0 of 10', 'step 10/10  validation/loss 0.5']


def test_the_time_left_includes_evaluations_but_not_the_first_compilation(pipe, time, capsys):
  progress = Progress(0, 100)
  for now, step, record in (
    (50.0, 10, training_record(1.0)),  # after a slow compilation
    (60.0, 20, training_record(1.0)),
    (70.0, 20, {'validation/loss': 1.0}),
    (80.0, 30, training_record(1.0)),
    (5000.0, 40, training_record(1.0)),
    (5001.0, 100, training_record(1.0)),
  ):
    time.now = now
    progress(step, record)
  progress.close()
  lines = capsys.readouterr().out.splitlines()
  # 80 steps at 10 steps in 10 s, 70 steps at 20 steps in 30 s, 60 steps at 30 steps in 4950 s
  expected = ['-:--:--', '0:01:20', '0:01:45', '2:45:00', '0:00:00']
  assert [line.split('left ')[1].split()[0] for line in lines if 'left' in line] == expected


def test_the_time_left_of_a_resumed_run_depends_only_on_its_own_steps(pipe, time, capsys):
  progress = Progress(60, 100)
  for time.now, step in ((10.0, 70), (15.0, 80)):
    progress(step, training_record(1.0))
  progress.close()
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'resuming at step 60 of 100' and lines[2].startswith('step 80/100  left 0:00:10  ')


def test_a_terminal_redraws_one_line_and_prints_evaluations(terminal, capsys):
  report(Progress(0, 10), (5, training_record(0.25)), (5, {'validation/loss': 0.75}), (10, training_record(0.125)))
  output = capsys.readouterr().out
  assert 'starting at step 0 of 10' in output and 'compiling' in output
  assert output.count('step 5/10  validation/loss 0.75') == 1
  assert 'step 10/10  left 0:00:00  loss 0.125' in output
  assert '\x1b[2K' in output  # erases the line before it is drawn again


@pytest.fixture
def run_info(tmp_path, monkeypatch):
  """A run of a sweep; the trackers store their files beside it."""
  folder = tmp_path / 'grid' / 'dot' / 'seed_1'
  folder.mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'file:{tmp_path}/mlruns')
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  return RunInfo(epath.Path(folder), {'model': {'features': 4}, 'seeds': 1}, 'grid')


def track_twice(name, run_info):
  """Writes a record, and a picture, at the first step of a run and at the step after it is resumed at step 10."""
  picture = run_info.folder / 'weights.html'
  picture.write_text('<p>weights</p>')
  for start in (0, 10):
    (tracker,) = make_trackers([name], run_info)
    tracker.open(start)
    tracker.write(start + 1, {'train/loss': 0.5 + start, 'validation/signature': 'words'})
    tracker.picture(start + 1, 'attention', picture)
    tracker.close()


@pytest.mark.long
def test_wandb_continues_a_run_of_the_group(run_info, tmp_path):
  import wandb

  track_twice('wandb', run_info)
  wandb.teardown()  # writes all files
  files = sorted((tmp_path / 'wandb').glob('offline-run-*/run-*.wandb'))
  run_id = (run_info.folder / 'wandb.id').read_text()
  assert [path.name for path in files] == 2 * [f'run-{run_id}.wandb']
  for path in files:
    content = path.read_bytes()
    for words in ('grid', 'dot/seed_1', str(run_info.folder), 'features', 'train/loss', 'attention', 'words'):
      assert words.encode() in content
  assert len(list((tmp_path / 'wandb').glob('offline-run-*/files/media/html/*.html'))) == 2


@pytest.mark.long
def test_mlflow_continues_a_run_of_the_experiment(run_info, monkeypatch):
  import mlflow

  track_twice('mlflow', run_info)
  client = mlflow.MlflowClient()
  (run,) = client.search_runs([client.get_experiment_by_name('grid').experiment_id])
  assert run.info.run_name == 'dot/seed_1' and run.info.status == 'FINISHED'
  assert run.data.params == {'model.features': '4', 'seeds': '1'}
  assert run.data.tags['folder'] == str(run_info.folder)
  points = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, 'train/loss')]
  assert points == [(1, 0.5), (11, 10.5)]
  assert [file.path for file in client.list_artifacts(run.info.run_id, 'attention')] == ['attention/weights.html']
  monkeypatch.setenv('MLFLOW_TRACKING_URI', 'nowhere://x')
  with pytest.raises(UserError, match=r'^--trackers=mlflow: .*nowhere'):
    track_twice('mlflow', run_info)


def test_trackers_that_cannot_be_used_are_errors(run_info, monkeypatch):
  with pytest.raises(UserError, match=r"^unknown tracker 'wandbb' \(did you mean 'wandb'\?\)"):
    make_trackers(['wandbb'], run_info)
  with pytest.raises(UserError, match=r'^--trackers=csv: gs://a/b is in a bucket'):
    make_trackers(['csv'], RunInfo(epath.Path('gs://a/b')))
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(UserError, match=r'^--trackers=wandb needs a package: pip install "attention_jax\[wandb\]"$'):
    make_trackers(['wandb'], run_info)
