"""Whole sweeps with a training program without jax: interrupted, failed, retried, extended, adopted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from etils import epath

from attention_jax.errors import UserError, UserErrors
from attention_jax.sweeps.estimate import Costs
from attention_jax.sweeps.ledger import FAILED, FINISHED, LEDGER, read_events, read_state
from attention_jax.sweeps.plan import observed_state, run_folders
from attention_jax.sweeps.report import sweep_report
from attention_jax.sweeps.resolve import Base
from attention_jax.sweeps.space import grid
from attention_jax.sweeps.sweep import SweepRequest, check_request, describe_plan, run_sweep
from attention_jax.systems.config import default_config
from attention_jax.systems.experiment import check_config
from tests import gcs_server
from tests.sweeps.helpers import FAKE_TRAIN, NO_ROWS, base_config, make_base, tiny_data, write_run

ROOT = Path(__file__).parents[2]
SETTINGS = grid({'model.attention.score': ['dot', 'general'], 'model.attention.alignment': ['softmax', 'sparsemax']})
OF_A_SETTING = {'model__attention__score': 'dot', 'model__attention__alignment': 'softmax'}  # the first one
SCRIPT = """
import sys
from pathlib import Path
from tests.sweeps.test_sweep import make_request
from attention_jax.sweeps import sweep
sweep.measure_costs = lambda *args: []
request = make_request(Path(sys.argv[1]), workers=2)
print(sweep.run_sweep(request, sweep.check_request(request), print))
"""


def make_request(folder, settings=SETTINGS, seeds=2, **options):
  return SweepRequest(folder, make_base(), settings, seeds, FAKE_TRAIN, **options)


checked_configs = set()


def check_config_once(config):
  """Checks a config, which traces its model, unless it has passed before."""
  if str(config) not in checked_configs:
    check_config(config)
    checked_configs.add(str(config))


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path):
  monkeypatch.setattr('attention_jax.sweeps.resolve.check_config', check_config_once)
  monkeypatch.setenv('FAKE_STARTS', str(tmp_path / 'starts'))
  monkeypatch.setattr('attention_jax.sweeps.driver.POLL_SECONDS', 0.02)
  monkeypatch.setattr('attention_jax.sweeps.sweep.detect_devices', lambda: ('cpu', [*os.sched_getaffinity(0)]))
  monkeypatch.setattr('attention_jax.sweeps.sweep.measure_costs', lambda *args: [])


@pytest.fixture
def folder(tmp_path):
  return tmp_path / 'sweep'


def run(request):
  lines = []
  return run_sweep(request, check_request(request), lines.append), lines


def plan(request, monkeypatch):
  """Returns the lines of a dry run."""
  resolved = check_request(request)
  costs = [(setting.id, Costs(1, 1.0)) for setting in resolved]
  monkeypatch.setattr('attention_jax.sweeps.sweep.measure_costs', lambda *args: costs)
  lines = []
  describe_plan(request, resolved, lines.append)
  monkeypatch.setattr('attention_jax.sweeps.sweep.measure_costs', lambda *args: [])
  return lines


def starts(folder):
  path = folder.parent / 'starts'
  return path.read_text().splitlines() if path.exists() else []


@pytest.mark.long
def test_finished_runs_are_never_repeated_and_a_sweep_is_extended(folder):
  outcome, lines = run(make_request(folder))
  assert outcome == (8, 0, 0) and len(starts(folder)) == 8 and lines[-1] == '8 finished, 0 failed, 0 unfinished'
  assert run(make_request(folder))[0] == (8, 0, 0) and len(starts(folder)) == 8
  extended = [*SETTINGS, {'model.attention.score': 'cosine', 'model.attention.alignment': 'softmax'}]
  assert run(make_request(folder, extended, seeds=3))[0] == (15, 0, 0)
  assert len(starts(folder)) == 15
  assert {entry.unit.seeds for entry in read_state(folder).units.values()} == {(0,), (1,), (2,)}
  assert run(make_request(folder, SETTINGS[:1], seeds=1))[0] == (1, 0, 0)


def test_a_run_whose_folder_was_removed_is_trained_again(folder, monkeypatch):
  request = make_request(folder, SETTINGS[:2])
  run(request)
  shutil.rmtree(folder / (removed := next(iter(read_state(folder).units.values())).unit.folder))
  message = f'{removed}: the folder of this finished run is missing, so that it counts as unfinished'
  assert message in plan(request, monkeypatch) and not (folder / removed).exists()
  outcome, lines = run(request)
  assert outcome == (4, 0, 0) and message in lines and (folder / removed).exists()


@pytest.mark.long
def test_failed_runs_are_listed_and_retried_alone(folder, monkeypatch):
  monkeypatch.setenv('FAKE_FAIL', 'sparsemax')
  monkeypatch.setenv('FAKE_KILL', 'score=general+alignment=softmax')
  outcome, lines = run(make_request(folder))
  assert outcome == (2, 6, 0)
  failures = [line for line in lines if line.startswith('failed: ')]
  assert len(failures) == 6 and any('loss is nan at step 7; output in ' in line for line in failures)
  assert any('ended by SIGKILL' in line for line in failures) and '--retry' in lines[-1]
  failed = [entry for entry in read_state(folder).units.values() if entry.error == 'loss is nan at step 7']
  assert len(failed) == 4 and all(entry.state == FAILED for entry in failed)
  assert 'starting' in (folder / failed[0].log).read_text()
  assert run(make_request(folder))[0] == (2, 6, 0) and len(starts(folder)) == 8  # not without --retry
  monkeypatch.delenv('FAKE_KILL')
  extended = make_request(folder, seeds=3, retry=True)
  assert run(extended)[0] == (4, 4, 4) and len(starts(folder)) == 14  # the new seeds are not run
  monkeypatch.delenv('FAKE_FAIL')
  assert run(extended)[0] == (8, 0, 4)
  assert run(make_request(folder, seeds=3))[0] == (12, 0, 0)


@pytest.mark.long
def test_a_plan_counts_the_runs_of_the_request(folder, monkeypatch):
  request = make_request(folder)
  assert ' for the 8 processes to be run, ' in plan(request, monkeypatch)[-1]
  monkeypatch.setenv('FAKE_FAIL', 'alignment=softmax')
  assert run(request)[0] == (4, 4, 0)
  for retry, count in ((False, 8), (True, 4)):  # the new seeds, or the failed runs
    extended = request._replace(seeds=4, retry=retry)
    lines = plan(extended, monkeypatch)
    assert lines[-2].startswith('16 runs in 16 processes') and f' for the {count} processes to be run, ' in lines[-1]
  assert ' for the 0 processes to be run, ' in plan(request, monkeypatch)[-1]


def test_units_are_trained_with_the_files_of_the_command_that_continues(folder, monkeypatch):
  """The first command may have been run in another folder, or before its config file changed."""
  request = make_request(folder, SETTINGS[:1], seeds=1, plugins='mine.py')
  monkeypatch.setenv('FAKE_FAIL', 'dot')
  run(request)
  monkeypatch.delenv('FAKE_FAIL')

  def load(path):
    return base_config(training__select='loss') if path == '/elsewhere/made_up.py' else {}

  base = Base('/elsewhere/made_up.py', {'training.select': 'exact_match'}, load)
  request = request._replace(base=base, plugins='/elsewhere/mine.py', retry=True)
  assert run(request)[0] == (1, 0, 0)
  flags = starts(folder)[-1].split()
  assert {'--config=/elsewhere/made_up.py', '--plugins=/elsewhere/mine.py'} <= set(flags)
  assert '--config.training.select=exact_match' in flags
  assert [flag.partition('=')[0] for flag in flags].count('--config') == 1
  assert '--config=/elsewhere/made_up.py' in plan(request, monkeypatch)[1]


def is_running(pid: int) -> bool:
  """Returns whether a process exists and is no zombie, which has ended and only has an entry left."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


def wait_until(condition, seconds):
  stop = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < stop
    time.sleep(0.05)


@pytest.mark.parametrize('number', [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_sweep_continues(folder, number):
  environment = os.environ | {'FAKE_SLEEP': '0.4'}
  command = [sys.executable, '-c', SCRIPT, str(folder)]
  process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
  wait_until(lambda: sum(event['event'] == FINISHED for event in read_events(folder)[0]) >= 2, 300)
  process.send_signal(number)
  output, _ = process.communicate(timeout=300)
  assert number == signal.SIGKILL or 'SIGTERM: ' in output
  finished = {name for name, entry in read_state(folder).units.items() if entry.state == FINISHED}
  before = len(starts(folder))
  assert 2 <= len(finished) < 8
  assert run(make_request(folder))[0] == (8, 0, 0)
  repeated = starts(folder)[before:]
  assert len(repeated) == 8 - len(finished) and not any(name in line for name in finished for line in repeated)
  pids = {int(line.split()[0]) for line in starts(folder)}
  wait_until(lambda: not any(map(is_running, pids)), 20)  # a child process ends a moment after its parent


@pytest.mark.long
def test_seeds_are_trained_together_on_request(folder):
  assert run(make_request(folder, seeds=3, together='yes'))[0] == (4, 0, 0)
  assert len(starts(folder)) == 4 and '--config.seeds=3' in starts(folder)[0]
  assert len(list(folder.glob('*/seeds_0-2/seed_2/results.json'))) == 4
  assert run(make_request(folder, seeds=4, together='no'))[0] == (8, 0, 0) and len(starts(folder)) == 8


@pytest.mark.long
def test_a_sweep_runs_as_jobs_of_a_cluster(folder):
  request = make_request(folder, SETTINGS[:2], seeds=1, cluster='local(jobs=2, timeout_min=5)')
  assert run(request)[0] == (2, 0, 0) and len(starts(folder)) == 2
  events, _ = read_events(folder)
  assert all(event['job']['job'] for event in events if event['event'] == 'started')
  assert len(list((folder / 'jobs').glob('*_result.pkl'))) == 2


@pytest.fixture
def queue(tmp_path):
  """A template of --submit, whose queue runs each command at once and stores its name."""
  script = tmp_path / 'queue.sh'
  script.write_text('echo "$1" >> "$0.names"; echo accepted; echo "job 7"; sh -c "$2"; exit 0\n')
  return f'sh {script} {{name}} {{command}}'


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """The URL of a bucket."""
  with gcs_server.Server(tmp_path / 'bucket') as server:
    for name, value in gcs_server.environment(server.url).items():
      monkeypatch.setenv(name, value)
    yield f'gs://{gcs_server.BUCKET}'


@pytest.mark.parametrize('runs', ['', pytest.param('bucket', marks=pytest.mark.long)])
def test_units_are_submitted_once_to_a_queue_and_their_results_collected(runs, folder, queue, request, monkeypatch):
  settings = grid({'model.attention.score': ['dot'], 'model.attention.alignment': ['softmax', 'local_p(width=10)']})
  runs = f'{request.getfixturevalue(runs)}/runs' if runs else ''
  monkeypatch.setenv('FAKE_FAIL', 'width=10')
  options = {'settings': settings, 'seeds': 1, 'submit': queue, 'runs': runs}
  outcome, lines = run(make_request(folder, **options))
  assert outcome == (0, 0, 2) and len(starts(folder)) == 2
  assert lines[0] == f'submitted {next(iter(read_state(folder).units))} job 7'
  names = Path(f'{queue.split()[1]}.names').read_text().splitlines()
  assert len(set(names)) == 2 and all(re.fullmatch(r'ablate-[a-z0-9-]{1,50}', name) for name in names)
  assert any('--config.model.attention.alignment=local_p(width=10)' in line for line in starts(folder))
  assert len(observed_state(read_state(folder), folder).finished) == 1  # --report reads it before the ledger has it
  outcome, lines = run(make_request(folder, **options))
  assert outcome == (1, 0, 1) and len(starts(folder)) == 2
  assert lines[-1].endswith('and finds the results of the 1 in the queue, which --retry submits again')
  monkeypatch.delenv('FAKE_FAIL')
  assert run(make_request(folder, retry=True, **options))[0] == (1, 0, 1) and len(starts(folder)) == 3
  assert run(make_request(folder, **options))[0] == (2, 0, 0) and len(starts(folder)) == 3
  (entry, _) = read_state(folder).finished
  (path,) = run_folders(entry.unit, folder).values()
  assert str(path).startswith(runs or str(folder)) and (path / 'results.json').exists()


def test_mistakes_of_a_queue_are_one_line(folder):
  request = make_request(folder, submit='{ echo queued; echo no such queue >&2; exit 3; } # {command}')
  with pytest.raises(UserError, match=r'^--submit: score=dot\S+/seed_0: exit status 3: no such queue$'):
    run(request)
  assert not any(entry.is_submitted for entry in read_state(folder).units.values())


def test_a_plan_has_the_runs_of_a_bucket(folder, monkeypatch):
  lines = plan(make_request(folder, submit='q {command}', runs='gs://bucket/runs'), monkeypatch)
  assert '8 runs in 8 processes: 4 settings x 2 seeds; 8 at a time' in lines
  assert sum('--workdir=gs://bucket/runs/score=' in line for line in lines) == 8


@pytest.mark.long
def test_runs_in_a_bucket_are_adopted_and_reported(folder, tmp_path, bucket):
  old = epath.Path(f'{bucket}/old')
  source = write_run(tmp_path / 'old', base_config(**OF_A_SETTING), {'test': {'exact_match': 50.0}})
  for path in source.rglob('*.json*'):
    (old / path.relative_to(source)).write_text(path.read_text())
  outcome, lines = run(make_request(folder, SETTINGS[:1], seeds=1, adopted=[str(old)]))
  assert outcome == (1, 0, 0) and lines[0] == f'{old}: adopted, seeds 0' and starts(folder) == []
  (row,) = sweep_report(folder, NO_ROWS, print).rows
  assert row.setting.runs[0].value('test', 'exact_match') == 50.0


@pytest.mark.parametrize(
  ('cluster', 'processes', 'at_a_time'),
  [('slurm', 8, 64), ('slurm(jobs=2)', 8, 2), ('slurm(jobs=2, gpus_per_node=1)', 4, 2), ('local(jobs=4)', 8, 4)],
)
def test_a_plan_counts_the_processes_of_a_cluster_and_those_at_a_time(
  folder, monkeypatch, cluster, processes, at_a_time
):
  lines = plan(make_request(folder, cluster=cluster), monkeypatch)
  assert f'8 runs in {processes} processes: 4 settings x 2 seeds; {at_a_time} at a time' in lines


def test_finished_runs_are_adopted(folder, tmp_path, monkeypatch):
  config = base_config(model__attention__score='dot', model__attention__alignment='sparsemax', training__log_every=7)
  old = tmp_path / 'old'
  for seed in (0, 1):
    write_run(old / f'seed_{seed}', config | {'training': config['training'] | {'seed': seed}}, {})
  (old / 'config.json').write_text(json.dumps(config | {'seeds': 2}))
  assert plan(make_request(folder, seeds=3, adopted=[old]), monkeypatch)[0] == f'{old}: adopted, seeds 0, 1'
  assert not folder.exists()
  outcome, lines = run(make_request(folder, seeds=3, adopted=[old]))
  assert outcome == (11, 0, 0) and len(starts(folder)) == 10 and lines[0] == f'{old}: adopted, seeds 0, 1'
  lines = plan(make_request(folder, seeds=3, adopted=[old]), monkeypatch)
  assert lines[-2].startswith('12 runs in 11 processes') and '0:00:00 for the 0 processes to be run' in lines[-1]
  _, lines = run(make_request(folder, seeds=3, adopted=[old]))
  assert lines[0] == f'{old}: the sweep has a unit with seed 0 of this setting already'


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (
      base_config(**OF_A_SETTING, model__embedding=7),
      'no setting of the sweep has its config; model.embedding is 7, expected',
    ),
    (base_config(**OF_A_SETTING), r'has no results\.json; expected a finished run'),
    (default_config('recall').to_dict(), "has its config; system is 'recall', expected 'translation'$"),
    (None, 'could not determine the home directory'),
  ],
  ids=['another setting', 'unfinished', 'another system', 'unknown user'],
)
def test_other_runs_are_not_adopted(folder, tmp_path, config, message):
  old = write_run(tmp_path / 'old', config, {}) if config else Path('~unknown-user/x')
  if config == base_config(**OF_A_SETTING):
    (old / 'results.json').unlink()
  with pytest.raises(UserError, match=message):
    run(make_request(folder, adopted=[old]))
  assert starts(folder) == []


def test_mistakes_are_found_before_anything_starts(folder):
  with pytest.raises(UserErrors) as error:
    run(make_request(folder, [{'model.attention.score': 'dott'}, {'training.steps': 'x'}]))
  assert len(error.value.lines) == 2
  seeded = make_base()._replace(overrides={'seeds': 3})
  for request, message in [
    (make_request(folder, seeds=0), '--seeds must be at least 1'),
    (make_request(folder, cluster='slrm'), "unknown cluster 'slrm'"),
    (make_request(folder)._replace(base=seeded), r'config\.seeds is set by --seeds'),
    (
      make_request(folder, submit='sbatch'),
      r"^--submit='sbatch' has no \{command\}; expected a command of the shell, ",
    ),
  ]:
    with pytest.raises(UserError, match=message):
      check_request(request)
  assert not folder.exists() and starts(folder) == []


@pytest.mark.long
def test_the_first_seed_is_that_of_the_config(folder):
  request = make_request(folder, [{'preset': 'a', 'training.schedule.peak': '0.01'}])
  request = request._replace(base=make_base()._replace(overrides={'training.seed': 5}))
  assert run(request)[0] == (2, 0, 0)
  assert sorted(entry.unit.seeds for entry in read_state(folder).units.values()) == [(5,), (6,)]
  assert all('cosine(peak=0.01)' in line and 'seed=' in line for line in starts(folder))


def test_a_plan_starts_nothing(folder, monkeypatch, data_folder):
  monkeypatch.undo()  # costs are measured, unlike in the other tests
  request = SweepRequest(folder, make_base(**tiny_data(data_folder)), SETTINGS[:2], 2, FAKE_TRAIN)
  lines = []
  describe_plan(request, check_request(request), lines.append)
  text = '\n'.join(lines)
  assert 'score=dot, alignment=softmax: seed 1, ' in text and ' parameters, ' in text and 'MFLOP an update' in text
  assert '4 runs in 4 processes: 2 settings x 2 seeds; 1 at a time' in text
  assert 'FLOP of the matrix products at the rate of a float32 matrix product on this machine' in lines[-1]
  assert not (folder / LEDGER).exists()
