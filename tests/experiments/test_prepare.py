"""Prepared data sets train as the same data in memory does, and configs that cannot be prepared are errors."""

import jax
import numpy as np
import pytest

from attention_jax.systems.runs import open_run
from tests.experiments.helpers import run, start_together, tiny_arguments, wait_for_outputs
from tests.experiments.test_two_processes import SETTINGS


@pytest.fixture
def prepared(task, tmp_path):
  """A prepared folder of the tiny task."""
  arguments = [x for x in tiny_arguments(task, tmp_path) if not x.startswith('--workdir')]
  result = run('prepare', *arguments, f'--output={tmp_path / "prepared"}')
  assert result.code == 0 and '24 pairs in 1 file' in result.err, result.err
  return tmp_path / 'prepared'


def prepared_arguments(prepared, workdir, *fields):
  """Returns the arguments of train.py for prepared data."""
  return tiny_arguments(prepared, workdir, '--config.data.task=prepared', *fields)


def test_training_on_prepared_data_equals_training_on_data_in_memory(trained, prepared, tmp_path):
  folder, _ = trained
  result = run('train', *prepared_arguments(prepared, tmp_path / 'disk'))
  assert result.code == 0, result.err
  runs = [open_run(path, 'latest') for path in (tmp_path / 'disk', folder)]
  jax.tree.map(np.testing.assert_array_equal, runs[0].params, runs[1].params)
  for name in ('hypotheses.test.txt', 'vocabulary.source.json'):
    assert (tmp_path / 'disk' / name).read_bytes() == (folder / name).read_bytes()
  result = run('evaluate', f'--workdir={tmp_path / "disk"}', '--split=train')
  assert result.code == 0 and 'loss' in result.out, result.err


@pytest.mark.long
def test_another_number_of_processes_resumes_within_an_epoch(prepared, tmp_path):
  """Four updates of one process and two of two processes equal six of one process; an epoch has three batches."""
  arguments = [*SETTINGS, '--config.mesh.fsdp=1', '--config.training.checkpoint_every=4', '--config.training.steps=4']
  changed = '--config.training.steps=6'
  assert run('train', *prepared_arguments(prepared, tmp_path / 'uninterrupted', *arguments, changed)).code == 0
  assert run('train', *prepared_arguments(prepared, tmp_path / 'resumed', *arguments)).code == 0
  processes = start_together(
    'experiments.train', '--distributed', *prepared_arguments(prepared, tmp_path / 'resumed', *arguments, changed)
  )
  first, _ = wait_for_outputs(processes)
  assert 'resuming at step 4 of 6' in first
  runs = [open_run(tmp_path / name, 'latest') for name in ('uninterrupted', 'resumed')]
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *(x.params for x in runs))


def test_configs_that_cannot_be_prepared_are_errors(tmp_path):
  result = run('prepare', '--config=configs/digits.py:mnih2014', f'--output={tmp_path / "prepared"}')
  assert result.code == 2 and "got a config of system 'glimpsing'" in result.err
  result = run('prepare', f'--output={tmp_path / "prepared"}')
  assert result.code == 2 and '--config is missing' in result.err
  result = run('prepare', '--config=configs/dates.py', '--config.system=translate', f'--output={tmp_path / "prepared"}')
  assert result.code == 2 and "unknown system 'translate' (did you mean 'translation'?)" in result.err
