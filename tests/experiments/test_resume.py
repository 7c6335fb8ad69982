"""The whole program, killed at any moment, ends as if it had never been."""

import json
import random
import signal
import time

import numpy as np

from attention_jax.systems.runs import open_run
from attention_jax.training.writers import read_metrics
from tests.experiments.helpers import start_training, tiny_arguments

TIMES = {'train/tokens_per_second', 'train/steps_per_second', 'train/compilations'}


def end(process):
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output


def test_killed_anywhere_ends_with_the_same_bits(task, tmp_path):
  longer = ('--config.training.steps=30', '--config.training.evaluate_every=6', '--config.training.checkpoint_every=4')
  end(start_training(*tiny_arguments(task, tmp_path / 'whole', *longer)))
  codes = []
  for sight in ('step 1/30', 'step 12/30  validation', 'all 30 steps'):
    process = start_training(*tiny_arguments(task, tmp_path / 'run', *longer))
    for line in process.stdout:
      if sight in line:
        break
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    codes.append(process.returncode)
  end(start_training(*tiny_arguments(task, tmp_path / 'run', *longer)))
  assert -signal.SIGKILL in codes
  for kind in ('latest', 'best'):
    whole, run = open_run(tmp_path / 'whole', kind), open_run(tmp_path / 'run', kind)
    assert whole.step == run.step
    for name, value in flat(whole.params).items():
      assert np.array_equal(value, flat(run.params)[name]), name
  for name in ('results.json', 'hypotheses.test.txt', 'config.json', 'vocabulary.source.json'):
    assert (tmp_path / 'whole' / name).read_bytes() == (tmp_path / 'run' / name).read_bytes()
  assert records(tmp_path / 'whole') == records(tmp_path / 'run')


def flat(params, prefix=''):
  if not isinstance(params, dict):
    return {prefix: np.asarray(params)}
  return {path: leaf for name, value in params.items() for path, leaf in flat(value, f'{prefix}/{name}').items()}


def records(folder):
  return [json.dumps({k: v for k, v in record.items() if k not in TIMES}) for record in read_metrics(folder)]


def test_a_signal_is_told_by_the_exit_status(task, tmp_path):
  process = start_training(*tiny_arguments(task, tmp_path / 'run', '--config.training.steps=3000'))
  for line in process.stdout:
    if 'step 1/' in line or 'step 2' in line:
      break
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 75 and 'the same command goes on from step' in output
