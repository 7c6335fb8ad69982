"""Flags of programs that several processes run together, and errors when a process is lost or has another config."""

import socket
import time

import pytest

from tests.experiments.helpers import start_together, start_training, tiny_arguments, wait_for_outputs, wait_for_step
from tests.experiments.test_bad_input import assert_user_error, run

FLAGS = ('--coordinator=127.0.0.1:7613', '--processes=2', '--process=1')
PEER_TIMEOUT = 5  # seconds


@pytest.mark.parametrize(
  ('flags', 'parts'),
  [
    (FLAGS[:2], ['--process is missing', '--coordinator, --processes and --process are set together']),
    (FLAGS[2:], ['--coordinator is missing']),
    ((*FLAGS, '--processes=1'), ['--process must be less than --processes=1, got 1']),
    ((*FLAGS, '--coordinator=nowhere'), ["--coordinator must be HOST:PORT with a port from 1 to 65535, got 'nowhere'"]),
    ((*FLAGS, '--coordinator=host:65536'), ["with a port from 1 to 65535, got 'host:65536'"]),
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


@pytest.mark.long
@pytest.mark.parametrize(
  ('killed', 'message'),
  [(1, 'The following tasks are unhealthy (stopped sending heartbeats):\n1\n'), (0, 'leader task')],
  ids=['process 1', 'process 0, the coordinator'],
)
def test_a_process_that_dies_ends_the_other_with_a_message_that_names_it(killed, message, task, tmp_path):
  folder = tmp_path / 'run'
  settings = [f'--config.training.{name}' for name in ('steps=1000000', 'evaluate_every=0', 'checkpoint_every=0')]
  arguments = tiny_arguments(task, folder, *settings, f'--peer_timeout={PEER_TIMEOUT}')
  processes = start_together('experiments.train', '--distributed', *arguments)
  wait_for_step(folder, 2, processes)
  processes[killed].kill()
  start = time.monotonic()
  output, _ = processes[1 - killed].communicate(timeout=120)
  processes[killed].communicate()
  assert processes[1 - killed].returncode not in (0, 75)
  assert time.monotonic() - start < 60
  assert message in output
  assert 'Traceback' not in output


def start_by_flags(*arguments):
  """Starts a process for each list of arguments; the processes find each other by flags."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    flags = (f'--coordinator=127.0.0.1:{free.getsockname()[1]}', f'--processes={len(arguments)}')
  return [start_training(*flags, f'--process={i}', *arguments[i]) for i in range(len(arguments))]


@pytest.mark.long
def test_processes_find_each_other_by_flags(task, tmp_path):
  arguments = tiny_arguments(task, tmp_path / 'run')
  first, _ = wait_for_outputs(start_by_flags(arguments, arguments))
  assert '4 x cpu' in first and 'all 4 steps are done' in first


@pytest.mark.long
def test_processes_with_different_configs_stop_with_one_line(task, tmp_path):
  arguments = tiny_arguments(task, tmp_path / 'run')
  for output in wait_for_outputs(start_by_flags(arguments, (*arguments, '--config.training.clip=2.0')), expected=2):
    (error,) = [line for line in output.splitlines() if 'error:' in line]
    assert 'config.training.clip is 1.0 in process 0, 2.0 in process 1' in error
  assert not (tmp_path / 'run').exists()
