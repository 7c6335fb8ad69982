"""Flags of programs that several processes run together, and errors when a process is lost or has another config."""

import re
import signal
import socket
import time

import pytest

from tests.experiments.helpers import (
  start_together,
  start_training,
  tiny_arguments,
  wait_for_outputs,
  wait_for_step,
  write_task,
)
from tests.experiments.test_bad_input import assert_user_error, run

FLAGS = ('--coordinator=127.0.0.1:7613', '--processes=2', '--process=1')
PEER_TIMEOUT = 5  # seconds
INTERRUPTED = 75  # exit code of train.py


@pytest.mark.parametrize(
  ('flags', 'parts'),
  [
    (FLAGS[:2], ['--process is missing', '--coordinator, --processes and --process are set together']),
    (FLAGS[2:], ['--coordinator is missing']),
    ((*FLAGS, '--processes=1'), ['--process must be less than --processes=1, got 1']),
    ((*FLAGS, '--coordinator=host:65536'), ["must be HOST:PORT with a port from 1 to 65535, got 'host:65536'"]),
    ((*FLAGS, '--process=-1'), ['--process=-1']),
    ((*FLAGS, '--distributed', '--processes=1'), ['--process must be less than --processes=1, got 1']),
  ],
  ids=' '.join,
)
def test_mistakes_in_the_flags_are_reported(flags, parts, task, tmp_path):
  assert_user_error(run('train', *tiny_arguments(task, tmp_path / 'run', *flags)), parts)


def test_a_port_in_use_is_reported(task, tmp_path):
  with socket.create_server(('', 0)) as server:
    flags = (f'--coordinator=127.0.0.1:{server.getsockname()[1]}', '--processes=2', '--process=0')
    result = run('train', *tiny_arguments(task, tmp_path / 'run', *flags))
  assert_user_error(result, ['process 0 cannot listen at port', 'expected a free port'])


@pytest.mark.long
def test_a_process_that_never_arrives_ends_the_others(task, tmp_path):
  process = start_training(*tiny_arguments(task, tmp_path / 'run', *FLAGS, f'--peer_timeout={PEER_TIMEOUT}'))
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 2
  expected = 'error: process 1 of 2 has waited 5 s at 127.0.0.1:7613 for process 0, which did not arrive; start one '
  assert expected in output and 'Traceback' not in output


UNHEALTHY = 'The following tasks are unhealthy (stopped sending heartbeats):\n{}\n'
SILENT = 'has had no answer from process 0 for 1.25 s; it ends after 5 s without one'


@pytest.mark.long
@pytest.mark.parametrize(
  ('count', 'lost', 'number', 'message'),
  [
    (2, 0, signal.SIGKILL, 'the leader (usually slice 0 task 0)'),
    (2, 1, signal.SIGKILL, UNHEALTHY),
    (2, 0, signal.SIGSTOP, SILENT),
    (2, 1, signal.SIGSTOP, UNHEALTHY),
    (4, 0, signal.SIGSTOP, SILENT),
    (4, 1, signal.SIGSTOP, UNHEALTHY),
    (4, 3, signal.SIGKILL, UNHEALTHY),
  ],
  ids=lambda value: '' if isinstance(value, str) else getattr(value, 'name', None),
)
def test_a_process_that_is_killed_or_stopped_ends_the_others_which_name_it(
  count, lost, number, message, task, tmp_path
):
  folder = tmp_path / 'run'
  settings = [f'--config.training.{name}' for name in ('steps=1000000', 'evaluate_every=0', 'checkpoint_every=0')]
  arguments = tiny_arguments(task, folder, *settings, f'--peer_timeout={PEER_TIMEOUT}')
  processes = start_together('experiments.train', '--distributed', *arguments, settings=[{}] * count)
  wait_for_step(folder, 2, processes)
  processes[lost].send_signal(number)
  start = time.monotonic()
  others = processes[:lost] + processes[lost + 1 :]
  try:
    outputs = [process.communicate(timeout=60)[0] for process in others]
    assert time.monotonic() - start < 2 * PEER_TIMEOUT  # twice, on a busy machine
    processes[lost].send_signal(signal.SIGCONT)  # one that continues later ends too
    processes[lost].communicate(timeout=60)
  finally:
    for process in processes:
      process.kill()
  assert not {process.returncode for process in processes} & {0, INTERRUPTED, None}
  for output in outputs:
    assert message.format(lost) in output and 'Traceback' not in output, output


def start_by_flags(*arguments, settings=({}, {})):
  """Starts a process for each list of arguments, with its environment variables; they find each other by flags."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    flags = (f'--coordinator=127.0.0.1:{free.getsockname()[1]}', f'--processes={len(arguments)}')
  return [start_training(*flags, f'--process={i}', *arguments[i], **settings[i]) for i in range(len(arguments))]


@pytest.mark.long
def test_processes_find_each_other_by_flags(task, tmp_path):
  arguments = tiny_arguments(task, tmp_path / 'run')
  first, _ = wait_for_outputs(start_by_flags(arguments, arguments))
  assert '4 x cpu' in first and 'all 4 steps are done' in first


def write_home(folder, rows=24, last=0, version=''):
  """Writes a home folder with a task, word vectors, and with `version` a package that claims to be grain."""
  write_task(folder / 'task', rows)
  (folder / 'vectors.txt').write_text(f'eins 0 1 2 {last}\n')
  package = folder / 'packages' / f'grain-{version}.dist-info'
  package.mkdir(parents=True)
  (package / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: grain\nVersion: {version}\n' if version else '')
  return {'HOME': str(folder), 'PYTHONPATH': str(folder / 'packages') if version else ''}


@pytest.mark.long
@pytest.mark.parametrize('count', [2, 4])
@pytest.mark.parametrize(
  ('home', 'flags', 'message'),
  [
    (
      {'version': '9.9.9'},
      [],
      r'the version of grain is [\d.]+ in process 0, 9\.9\.9 in process {}; all processes need ',
    ),
    ({}, ['--config.training.clip=2.0'], r'config\.training\.clip is 1\.0 in process 0, 2\.0 in process {}; '),
    ({'rows': 25}, [], r"split 'train' of the data is digest \w+.* in process 0, .* in process {}; "),
    ({'last': 1}, [], r"the content of config\.initial_vectors='~/vectors\.txt' is digest \w+ .* in process {}; "),
  ],
  ids=['package version', 'config', 'data', 'word vectors'],
)
def test_a_process_with_something_different_ends_all_with_one_line(home, flags, message, count, tmp_path):
  """The quick form is that of tests/training/test_peers.py."""
  arguments = tiny_arguments('~/task', tmp_path / 'run', '--config.initial_vectors=~/vectors.txt')
  homes = [write_home(tmp_path / str(i)) for i in range(count - 1)] + [write_home(tmp_path / 'different', **home)]
  processes = start_by_flags(*[arguments] * (count - 1), (*arguments, *flags), settings=homes)
  for output in wait_for_outputs(processes, expected=2):
    (error,) = [line for line in output.splitlines() if 'error:' in line]
    assert re.search(message.format(count - 1), error), error
  assert not (tmp_path / 'run').exists()
