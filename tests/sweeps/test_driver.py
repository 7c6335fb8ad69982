"""The processes of a sweep: their states, and the reasons of failures."""

import signal
import time
from collections.abc import Sequence

import pytest

from attention_jax.sweeps.driver import Driver, describe_failure
from attention_jax.sweeps.ledger import (
  FAILED,
  FINISHED,
  INTERRUPTED,
  PLANNED,
  STARTED,
  Unit,
  open_ledger,
  planned_event,
)
from attention_jax.training.interrupts import StopRequest

LOGS = [
  ('$ train\nstarting\nerror: loss is nan at step 7\n', 2, 'loss is nan at step 7'),
  (
    'Traceback (most recent call last):\n  File "x"\njax.errors.JaxRuntimeError: out of\n',
    1,
    'jax.errors.JaxRuntimeError: out of',
  ),
  ('error: of the first attempt\n$ train again\nMemoryError\n', 1, 'MemoryError'),
  ('step 3\n', -9, 'ended by SIGKILL; the memory of the machine may be too small'),
  ('step 3\n', -15, 'ended by SIGTERM'),
  ('step 3\n', -53, 'ended by signal 53'),
  ('', 1, 'exit status 1 without a message; see '),
  ('', 0, 'exit status 0, but results.json is missing; see '),
]


@pytest.mark.parametrize(('text', 'code', 'message'), LOGS)
def test_failures_are_described_in_one_line(tmp_path, text, code, message):
  (tmp_path / 'log').write_text(text)
  assert describe_failure(code, tmp_path / 'log').removesuffix(str(tmp_path / 'log')) == message
  assert describe_failure(-9, tmp_path / 'missing').startswith('ended by SIGKILL')


def test_a_failure_outside_of_the_command_is_described_unless_the_log_has_an_error(tmp_path):
  (tmp_path / 'log').write_text('step 3\n')
  assert describe_failure(1, tmp_path / 'log', 'job 7 ended in the state TIMEOUT') == 'job 7 ended in the state TIMEOUT'
  (tmp_path / 'log').write_text('error: no such file\n')
  assert describe_failure(1, tmp_path / 'log', 'job 7 ended in the state FAILED') == 'no such file'


class RecordedProgress:
  """Progress that records lines, and the units of each update, instead of printing them."""

  def __init__(self, on_update=lambda count: None):
    self.lines = []
    self.counted = []
    self._on_update = on_update

  def log(self, line):
    self.lines.append(line)

  def log_with_counts(self, entries, running, line):
    self.lines.append(line)

  def update(self, entries, running):
    self.counted.append([entry.unit.id for entry in entries])
    self._on_update(len(self.counted))


class FakeJob:
  """A job that ends with a code after some polls, or with the code `stopped` when it is stopped."""

  ends_with_sweep = True
  failure = ''

  def __init__(self, code, polls=1, stopped=75):
    self.record = {'pid': 1}
    self._code = code
    self._polls = polls
    self._stopped = stopped

  def poll(self):
    self._polls -= 1
    return self._code if self._polls <= 0 else None

  def stop(self):
    self._code, self._polls = self._stopped, 1


class FakeExecutor:
  """Starts jobs from a list; their results are written by the fixture `ledger`."""

  slots = 2

  def __init__(self, jobs: Sequence[FakeJob], found=()):
    self._jobs = list(jobs)
    self._found = list(found)
    self.most_jobs = 0

  def start(self, requests):
    self.most_jobs = max(self.most_jobs, len(requests))
    return [self._jobs.pop(0) for _ in requests]

  def find(self, record):
    return self._found.pop(0) if self._found else None


@pytest.fixture
def ledger(tmp_path, monkeypatch):
  monkeypatch.setattr('attention_jax.sweeps.driver.POLL_SECONDS', 0.0)
  with open_ledger(tmp_path) as opened:
    for i in range(3):
      unit = Unit(f'u{i}', f'id{i}', {}, 'f.py', {}, (0,), f'u{i}')
      opened.append(PLANNED, **planned_event(unit))
      (tmp_path / unit.folder).mkdir()
      (tmp_path / unit.folder / 'results.json').write_text('{}')
    yield opened


def states(ledger):
  return [entry.state for entry in ledger.state.units.values()]


def run(ledger, executor, stop=None, progress=None):
  progress = progress or RecordedProgress()
  driver = Driver(ledger, executor, lambda unit: ['train', f'--workdir={unit.folder}'], progress, stop or StopRequest())
  driver.run(['u0', 'u1', 'u2'])
  return progress.lines


def test_exit_codes_become_states(ledger, tmp_path):
  (tmp_path / 'u2' / 'results.json').unlink()  # an exit status of 0 without results is no success
  executor = FakeExecutor([FakeJob(0, 3), FakeJob(75), FakeJob(0)])
  run(ledger, executor)
  assert states(ledger) == [FINISHED, INTERRUPTED, FAILED]
  assert executor.most_jobs == 2
  assert '$ train --workdir=u0' in (tmp_path / 'u0.log').read_text()


def test_a_unit_whose_folder_is_locked_waits_and_is_named_once(ledger, tmp_path, monkeypatch):
  answers = iter([True, False, True])
  monkeypatch.setattr('attention_jax.sweeps.driver.is_training', lambda folder: next(answers, False))
  lines = run(ledger, FakeExecutor([FakeJob(0, 3), FakeJob(0), FakeJob(0)]))
  assert states(ledger) == [FINISHED] * 3
  assert [line for line in lines if 'waits' in line] == [
    f'{unit} waits until another process that trains in {tmp_path / unit} has ended' for unit in ('u0', 'u2')
  ]


def test_units_that_are_not_run_are_not_counted_as_left(ledger):
  for name in ('of another setting', 'finished'):
    ledger.append(PLANNED, **planned_event(Unit(name, 'id', {}, 'f.py', {}, (0,), name)))
  ledger.append(FINISHED, unit='finished')
  progress = RecordedProgress()
  run(ledger, FakeExecutor([FakeJob(0) for _ in range(3)]), progress=progress)
  assert progress.counted and all(ids == ['u0', 'u1', 'u2', 'finished'] for ids in progress.counted)


@pytest.mark.parametrize(('polls', 'seconds'), [(3, 100), (1, 0)])
def test_a_job_that_still_runs_is_taken_over_with_its_duration(ledger, polls, seconds):
  """The duration of a job that has ended before the sweep resumes is unknown: 0."""
  ledger.append(STARTED, unit='u0', job={'job': '17'}, time=time.time() - 100)
  lines = run(ledger, FakeExecutor([FakeJob(0), FakeJob(0)], found=[FakeJob(0, polls)]))
  assert states(ledger) == [FINISHED] * 3
  assert [line for line in lines if line.startswith('started')] == ['started u1', 'started u2']
  assert ledger.state.units['u0'].seconds == pytest.approx(seconds, abs=20)


@pytest.mark.parametrize('code', [-signal.SIGTERM, -signal.SIGKILL])
def test_a_signal_stops_processes_and_starts_no_more(ledger, code):
  progress = RecordedProgress(lambda count: count == 4 and signal.raise_signal(signal.SIGTERM))
  with StopRequest() as stop:
    run(ledger, FakeExecutor([FakeJob(0, 10**6), FakeJob(0, 10**6, code)]), stop, progress)
  assert stop.reason == 'SIGTERM' and states(ledger) == [INTERRUPTED, INTERRUPTED, PLANNED]


def test_jobs_of_a_cluster_continue_after_a_signal(ledger):
  stop = StopRequest()
  stop.reason = 'SIGINT'
  job = FakeJob(0, 10**6)
  job.ends_with_sweep = False
  ledger.append(STARTED, unit='u0', job={'job': '17'})
  run(ledger, FakeExecutor([], found=[job]), stop)
  assert states(ledger) == [STARTED, PLANNED, PLANNED]
