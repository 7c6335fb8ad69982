"""A run that was killed at any moment and resumed ends with the results of an uninterrupted one.

`make chaos` makes 200 kills (chaos.py); the tests here run in `make test-all`.
"""

import os
import random
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest

from attention_jax.systems.runs import open_run
from attention_jax.training.writers import read_metrics
from tests.experiments.chaos import Chaos
from tests.experiments.helpers import ROOT, start_training, tiny_arguments
from tests.experiments.train_every_system import CONFIGS


def wait(process):
  """Waits for a program that must succeed."""
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output


@pytest.mark.long
@pytest.mark.parametrize('system', CONFIGS)
def test_every_system_survives_random_kills(system, task, tmp_path):
  counts = Chaos(system, tmp_path, task, kills=4, seed=random.randrange(1000)).run()
  assert sum(counts.values()) == 4


@pytest.mark.long
def test_a_run_resumes_on_another_number_of_devices_and_another_mesh(task, tmp_path):
  fields = ('--config.model.dropout=0.0', '--config.training.optimizer=sgd', '--config.training.steps=4')
  folders = [tmp_path / 'whole', tmp_path / 'run']
  wait(start_training(*tiny_arguments(task, folders[0], *fields)))
  wait(start_training(*tiny_arguments(task, folders[1], *fields, '--config.training.steps=2')))
  four_devices = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=4'
  mesh = ('--config.mesh.fsdp=2', '--config.mesh.tensor=2')
  wait(start_training(*tiny_arguments(task, folders[1], *fields, *mesh), XLA_FLAGS=four_devices))
  for kind in ('latest', 'best'):
    whole, resumed = (open_run(folder, kind) for folder in folders)
    assert whole.step == resumed.step
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), whole.params, resumed.params)
  losses = [[record['train/loss'] for record in read_metrics(x) if 'train/loss' in record] for x in folders]
  assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.long
def test_a_disk_that_is_full_ends_a_run_with_one_line(task, tmp_path):
  """A limit of the size of files stands for the full disk: it stops the files of checkpoints alone."""
  large = ('--config.model.embedding=512', '--config.model.encoder=birnn(features=64)', '--config.training.steps=50')
  command = ['train', *tiny_arguments(task, tmp_path / 'run', *large)]
  script = f'ulimit -f 64; exec {sys.executable} -m experiments.{" ".join(map(shlex.quote, command))}'
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
  result = subprocess.run(
    ['bash', '-c', script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
  )
  assert result.returncode == 2, result.stderr
  (line,) = result.stderr.splitlines()
  assert line.startswith(f'error: cannot save checkpoint {tmp_path}/run/') and 'there is no checkpoint yet' in line
