"""The programs on glimpses: training, plots, mistakes."""

import dataclasses
import json

import numpy as np
import pytest

from attention_jax.systems.glimpsing.config import GlimpsingEvaluationConfig
from attention_jax.systems.glimpsing.system import GlimpsingSystem
from attention_jax.systems.runs import open_run
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error
from tests.systems.helpers import two_devices

SMALL = {
  'model.features': 16,
  'model.hidden': 8,
  'model.glimpses': 2,
  'model.samples': 2,
  'training.steps': 4,
  'training.evaluate_every': 2,
  'training.checkpoint_every': 2,
  'training.schedule': 'constant(rate=3e-3)',
  'evaluation.samples': 2,
}
ARGS = ['--config=configs/digits.py:mnih2014', *(f'--config.{name}={value}' for name, value in SMALL.items())]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('glimpsed') / 'run'
  result = run('train', *ARGS, f'--workdir={folder}')
  assert result.code == 0, result.err
  return folder, result.out


@pytest.mark.long
def test_a_run_writes_results_and_hypotheses(trained):
  folder, out = trained
  assert 'train: 1297 pictures (20 x 20)' in out and 'hard, by glimpses' in out
  results = json.loads((folder / 'results.json').read_text())['results']['test']
  errors = {'error', 'error_of_one_sample', 'error_of_mean_locations'}
  assert set(results) == {'loss', *errors} and results['error']['signature'] == 'samples:2|rows:250'
  assert results['error_of_mean_locations']['value'] != results['error_of_one_sample']['value']  # at other locations
  assert len((folder / 'hypotheses.test.txt').read_text().split()) == 250


@pytest.mark.long
def test_splits_are_evaluated_and_drawn(trained):
  folder, _ = trained
  result = run('evaluate', f'--workdir={folder}', '--split=validation')
  assert result.code == 0 and 'error' in result.out
  assert run('inspect_attention', f'--workdir={folder}', '--rows=0,5').code == 0
  assert (folder / 'glimpses.png').exists()
  result = run('inspect_attention', f'--workdir={folder}', '--text=7')
  assert_user_error(result, ['--text: this run reads pictures'])


@pytest.mark.long
def test_locations_do_not_depend_on_the_batch(trained):
  opened = open_run(trained[0])
  results = []
  predictions = []
  for batch_size in (16, 128):
    evaluation = GlimpsingEvaluationConfig(samples=2, batch_size=batch_size)
    config = dataclasses.replace(opened.config, evaluation=evaluation)
    with two_devices():  # those of training, whose program is used again for 128
      metrics, glimpses = GlimpsingSystem.open(config, str(trained[0])).evaluate(opened.params, 'test')
    results.append(metrics)
    predictions.append(glimpses)
  assert results[0]['loss'].value == pytest.approx(results[1]['loss'].value, rel=1e-5)
  for small_batch, large_batch in zip(*predictions, strict=True):
    np.testing.assert_allclose(small_batch.locations, large_batch.locations, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('model.glimpses=0', 'config.model.glimpses must be at least 1 and at most 10000, got 0'),
    ('model.deviation=0.0', 'config.model.deviation must be greater than 0, got 0.0'),
    ('model.dtype=int8', "unknown dtype 'int8'"),
    ('data.task=digit', "unknown task 'digit'"),
    ('training.objective=r_drop', "training.objective must be 'likelihood' for system 'glimpsing'"),
    ('training.auxiliary=coverage', "training.auxiliary must be '' for system 'glimpsing'"),
    ('training.select=accuracy', "unknown metric in training.select: 'accuracy'"),
    ('evaluation.samples=0', 'config.evaluation.samples must be at least 1 and at most 10000, got 0'),
  ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, flag, message):
  assert_user_error(run('train', *ARGS, f'--config.{flag}', f'--workdir={tmp_path}/run'), [message])
  assert not (tmp_path / 'run').exists()
