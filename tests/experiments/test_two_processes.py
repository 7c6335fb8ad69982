"""Two processes that train together do what one does alone, in one folder."""

import json
import socket
import subprocess
import time

import jax
import numpy as np
import pytest

from attention_jax.systems.runs import open_run
from attention_jax.training.writers import METRICS, read_metrics
from tests.experiments.helpers import run, start_training, tiny_arguments

# Dropout draws by the place of a row in the batch, which is another one here; with SGD an update is as exact as its
# gradient.
ALIKE = (
  '--config.model.dropout=0.0',
  '--config.training.optimizer=sgd',
  '--config.training.schedule=constant(rate=0.5)',
  '--config.training.steps=3',
  '--config.training.evaluate_every=0',
  '--config.training.checkpoint_every=0',
  '--config.evaluation.beams=1',
)


def start_together(*args: object) -> list[subprocess.Popen]:
  """train.py --distributed in two processes of two devices each, as SLURM starts them on one machine."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  cluster = {'SLURM_JOB_ID': '1', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}
  cluster |= {'JAX_COORDINATOR_ADDRESS': address}
  return [
    start_training('--distributed', *args, **cluster, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)
  ]


def end(processes: list[subprocess.Popen], seconds: float = 240) -> list[str]:
  """What they printed. The others wait for one that has failed, so all are ended with the first of them."""
  stop = time.monotonic() + seconds
  while None in (codes := [p.poll() for p in processes]) and not any(codes) and time.monotonic() < stop:
    time.sleep(0.1)
  for process in processes:
    process.kill()
  printed = [process.communicate()[0] for process in processes]
  assert codes == [0, 0], f'exit codes {codes} (None: still running)\n' + '\n----\n'.join(printed)
  return printed


def test_two_processes_train_as_one_does(task, tmp_path):
  first, second = end(start_together(*tiny_arguments(task, tmp_path / 'two', *ALIKE)))
  assert '4 x cpu' in first and '(4, 5, 5)' in first and 'all 3 steps are done' in first
  assert not any(word in second for word in ('vocabulary', 'step', 'loss')), second  # one of them speaks
  assert run('train', *tiny_arguments(task, tmp_path / 'one', *ALIKE)).code == 0

  two, one = read_metrics(tmp_path / 'two'), read_metrics(tmp_path / 'one')
  assert (tmp_path / 'two' / METRICS).read_text().count('\n') == 4  # three updates, one evaluation, one writer
  for name in ('train/loss', 'train/grad_norm', 'validation/loss', 'validation/entropy'):
    values = lambda records, name=name: [record[name] for record in records if name in record]
    assert values(two) == pytest.approx(values(one), rel=1e-5)
  assert two[2]['train/loss'] < two[0]['train/loss'] - 0.01

  for checkpoint in ('latest', 'best'):
    two, one = (open_run(tmp_path / name, checkpoint) for name in ('two', 'one'))
    assert two.step == one.step == 3
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), two.params, one.params)
  values = lambda name: json.loads((tmp_path / name / 'results.json').read_text())['results']['test']['loss']['value']
  assert values('two') == pytest.approx(values('one'), rel=1e-5)
