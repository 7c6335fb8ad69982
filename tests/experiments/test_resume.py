"""A run that was killed at any moment and resumed ends with the results of an uninterrupted one."""

import json
import random
import signal
import time

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from attention_jax.systems.runs import open_run
from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import start_training, tiny_arguments

MACHINE_DEPENDENT = {'train/tokens_per_second', 'train/steps_per_second', 'train/compilations'}


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
  for kind in ('latest', 'best'):
    uninterrupted = open_run(tmp_path / 'uninterrupted', kind)
    resumed = open_run(tmp_path / 'run', kind)
    assert uninterrupted.step == resumed.step
    resumed_params = flatten_dict(resumed.params, sep='/')
    for name, value in flatten_dict(uninterrupted.params, sep='/').items():
      assert np.array_equal(value, resumed_params[name]), name
  for name in ('results.json', 'hypotheses.test.txt', 'config.json', 'vocabulary.source.json'):
    assert (tmp_path / 'uninterrupted' / name).read_bytes() == (tmp_path / 'run' / name).read_bytes()
  assert comparable_records(tmp_path / 'uninterrupted') == comparable_records(tmp_path / 'run')


def comparable_records(folder):
  """Returns the logged records without rates and compilations."""
  return [
    json.dumps({name: value for name, value in record.items() if name not in MACHINE_DEPENDENT})
    for record in read_metrics(folder)
  ]


def test_an_interrupted_run_exits_with_its_own_status(task, tmp_path):
  process = start_training(*tiny_arguments(task, tmp_path / 'run', '--config.training.steps=3000'))
  for line in process.stdout:
    if 'step 1/' in line or 'step 2' in line:
      break
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 75 and 'run the same command again to resume from step' in output
