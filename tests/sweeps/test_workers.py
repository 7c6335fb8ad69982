"""Processes on this machine: cores and devices of their own, and an end when the sweep ends."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.ledger import open_ledger
from attention_jax.sweeps.workers import (
  CHILD,
  LocalExecutor,
  Request,
  Resources,
  detect_devices,
  divide_resources,
  is_training,
)
from attention_jax.training.folder import own_folder

CORES = sorted(os.sched_getaffinity(0))


def wait(job, seconds=20.0):
  stop = time.monotonic() + seconds
  while job.poll() is None:
    assert time.monotonic() < stop, 'the process does not end'
    time.sleep(0.02)
  return job.poll()


def test_resources_are_divided_in_order(monkeypatch):
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  assert divide_resources(1, 'cpu', [0, 1, 2]) == [Resources()]
  assert [resources.cores for resources in divide_resources(2, 'cpu', [0, 1, 2, 3, 7])] == [(0, 1), (2, 3, 7)]
  gpus = divide_resources(2, 'gpu', [0, 1])
  assert [resources.variables for resources in gpus] == [{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '1'}]
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,6,7')
  assert [r.variables['CUDA_VISIBLE_DEVICES'] for r in divide_resources(2, 'gpu', [0, 1, 2])] == ['4,6', '7']
  assert divide_resources(2, 'tpu', [0, 1, 2, 3])[1].variables['TPU_VISIBLE_CHIPS'] == '2,3'
  for workers, message in [(0, '--workers must be at least 1, got 0'), (3, '--workers=3: this machine has 2 cores')]:
    with pytest.raises(UserError, match=message):
      divide_resources(workers, 'cpu', [0, 1])


@pytest.mark.parametrize(
  ('stderr', 'reason'),
  [
    ('Traceback\nRuntimeError: no backend\n', 'RuntimeError: no backend'),
    ('', 'its process ended with exit status -9'),
  ],
)
def test_a_machine_without_the_device_raises_with_the_reason(monkeypatch, stderr, reason):
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  failed = subprocess.CompletedProcess([], -9, stdout='', stderr=stderr)
  monkeypatch.setattr(subprocess, 'run', lambda *args, **options: failed)
  with pytest.raises(UserError, match=rf"list its devices \(JAX_PLATFORMS='cuda'\): {reason}$"):
    detect_devices()


def test_a_process_is_pinned_and_its_output_is_appended(tmp_path):
  log = tmp_path / 'log'
  log.write_text('before\n')
  executor = LocalExecutor([Resources((CORES[-1],), {'NAME': 'value'})])
  code = 'import os; print(sorted(os.sched_getaffinity(0)), os.environ["NAME"]); raise SystemExit(3)'
  (job,) = executor.start([Request([sys.executable, '-c', code], log)])
  assert wait(job) == 3
  assert log.read_text() == f'before\n[{CORES[-1]}] value\n'
  (again,) = executor.start([Request(['sleep', '60'], log)])  # the slot is free again
  again.stop()
  assert wait(again) == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != 'linux', reason='prctl is a call of Linux')
def test_a_process_ends_when_its_parent_is_killed(tmp_path):
  code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, {str(CHILD)!r}, str(os.getpid()), '', 'sleep', '60'])
print(child.pid, flush=True)
time.sleep(60)
"""
  parent = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
  pid = int(parent.stdout.readline())
  command = Path(f'/proc/{pid}/cmdline')
  stop = time.monotonic() + 20
  while 'sleep' not in command.read_text().split('\0')[0]:
    assert time.monotonic() < stop
    time.sleep(0.02)
  parent.kill()
  parent.wait()
  parent.stdout.close()
  while command.exists() and command.read_text():  # a zombie has an empty command line
    assert time.monotonic() < stop
    time.sleep(0.02)


def test_a_child_of_a_parent_that_is_gone_does_not_start():
  # The parent is this process, not process 1. The status 75 is that of an interrupted process; `false` exits with 1.
  assert subprocess.run([sys.executable, str(CHILD), '1', '', 'false']).returncode == 75


def test_a_locked_run_folder_is_recognised(tmp_path):
  assert not is_training(tmp_path)
  with filelock.FileLock(tmp_path / '.lock'):
    assert is_training(tmp_path)
  assert not is_training(tmp_path)


@pytest.mark.parametrize('number', [errno.ENOSYS, errno.ENOLCK])
def test_a_folder_on_a_file_system_without_locks_is_never_locked(tmp_path, monkeypatch, number):
  def flock(*args):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr('fcntl.flock', flock)
  with own_folder(tmp_path, lambda line: None):
    pass
  assert (tmp_path / '.lock').exists() and not is_training(tmp_path)
  folder = tmp_path / 'sweep'
  reason = f'[Errno {number}] {os.strerror(number)}'
  for _ in range(2):  # the first one may have been killed
    with open_ledger(folder) as ledger:
      (line,) = ledger.report
      assert line.startswith(f'cannot lock {folder} ({reason}): another process that runs the sweep would not be ')
      assert not (folder / '.lock').read_text()
