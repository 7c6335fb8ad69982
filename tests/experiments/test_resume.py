"""A run that was killed at any moment and resumed ends with the results of an uninterrupted one.

`make chaos` makes 200 kills (chaos.py); the tests here run in `make test-all`.
"""

import random
import signal
import time

import pytest

from tests.experiments.chaos import Chaos, check_same_params, comparable_records
from tests.experiments.helpers import start_training, tiny_arguments
from tests.experiments.train_every_system import CONFIGS


def wait(process):
  """Waits for a program that must succeed."""
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output


@pytest.mark.long
def test_a_run_killed_at_any_moment_resumes_exactly(task, tmp_path):
  longer = ('--config.training.steps=30', '--config.training.evaluate_every=6', '--config.training.checkpoint_every=4')
  wait(start_training(*tiny_arguments(task, tmp_path / 'uninterrupted', *longer)))
  codes = []
  for output in ('step 1/30', 'step 12/30  validation', 'all 30 steps'):
    process = start_training(*tiny_arguments(task, tmp_path / 'run', *longer))
    for line in process.stdout:
      if output in line:
        break
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    codes.append(process.returncode)
  wait(start_training(*tiny_arguments(task, tmp_path / 'run', *longer)))
  assert -signal.SIGKILL in codes
  check_same_params(tmp_path / 'uninterrupted', tmp_path / 'run')
  for name in ('results.json', 'hypotheses.test.txt', 'config.json', 'vocabulary.source.json'):
    assert (tmp_path / 'uninterrupted' / name).read_bytes() == (tmp_path / 'run' / name).read_bytes()
  assert comparable_records(tmp_path / 'uninterrupted') == comparable_records(tmp_path / 'run')


@pytest.mark.long
@pytest.mark.parametrize('system', CONFIGS)
def test_every_system_survives_random_kills(system, task, tmp_path):
  counts = Chaos(system, tmp_path, task, kills=4, seed=random.randrange(1000)).run()
  assert sum(counts.values()) == 4


@pytest.mark.long
def test_an_interrupted_run_exits_with_its_own_status(task, tmp_path):
  """The quick form, with two processes, is in test_two_processes.py."""
  process = start_training(*tiny_arguments(task, tmp_path / 'run', '--config.training.steps=3000'))
  for line in process.stdout:
    if 'step 1/' in line or 'step 2' in line:
      break
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 75 and 'run the same command again to resume from step' in output
