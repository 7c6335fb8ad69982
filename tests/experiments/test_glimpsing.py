"""The programs on glimpses: trained, resumed, drawn, refused."""

import json

import numpy as np
import pytest

from attention_jax.systems.glimpsing import GlimpsingSystem
from attention_jax.systems.runs import open_run
from tests.experiments.helpers import copy_interrupted_run, run

SMALL = {
  'model.features': 16,
  'model.hidden': 8,
  'model.glimpses': 3,
  'model.samples': 2,
  'training.steps': 20,
  'training.evaluate_every': 10,
  'training.checkpoint_every': 5,
  'training.schedule': 'constant(rate=3e-3)',
  'evaluation.samples': 2,
}
ARGS = ['--config=configs/digits.py:mnih2014', *(f'--config.{name}={value}' for name, value in SMALL.items())]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('glimpsed') / 'run'
  ran = run('train', *ARGS, f'--workdir={folder}')
  assert ran.code == 0, ran.err
  return folder, ran.out


def test_what_is_measured(trained):
  folder, out = trained
  assert 'train: 1297 pictures (20 x 20)' in out and 'hard, by glimpses' in out
  results = json.loads((folder / 'results.json').read_text())['results']['test']
  errors = {'error', 'error_of_one', 'error_of_means'}
  assert set(results) == {'loss', *errors} and results['error']['signature'] == 'samples:2|rows:250'
  assert results['error_of_means']['value'] != results['error_of_one']['value']  # other places were looked at
  assert len((folder / 'hypotheses.test.txt').read_text().split()) == 250


def test_the_same_command_goes_on_exactly(trained, tmp_path):
  folder = copy_interrupted_run(trained[0], tmp_path / 'run')
  assert 'going on at' in run('train', *ARGS, f'--workdir={folder}').out
  whole, parts = (json.loads((path / 'results.json').read_text()) for path in (trained[0], folder))
  assert whole == parts


def test_it_is_evaluated_and_drawn(trained):
  folder, _ = trained
  ran = run('evaluate', f'--workdir={folder}', '--split=validation')
  assert ran.code == 0 and 'error' in ran.out
  assert run('inspect_attention', f'--workdir={folder}', '--rows=0,5').code == 0
  assert (folder / 'glimpses.png').exists()
  ran = run('inspect_attention', f'--workdir={folder}', '--text=7')
  assert ran.code == 2 and '--text has nothing to look at' in ran.err


def test_where_it_looks_is_a_function_of_the_picture_alone(trained):
  opened = open_run(trained[0])
  found = []
  for size in (16, 128):
    config = opened.config | {'evaluation': {'batch_size': size, 'samples': 2}}
    found.append(GlimpsingSystem.open(config, str(trained[0])).evaluate(opened.params, 'test'))
  (one, looks), (other, same) = found
  assert one['loss'].value == pytest.approx(other['loss'].value, rel=1e-5)
  for look, again in zip(looks, same, strict=True):
    np.testing.assert_allclose(look.locations, again.locations, atol=1e-4)


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    ('model.glimpses=0', 'model.glimpses is 0; possible: 1 or more'),
    ('model.deviation=0.0', 'model.deviation is 0.0; possible: more than 0'),
    ('model.dtype=int8', "unknown dtype 'int8'"),
    ('data.task=digit', "unknown task 'digit'"),
    ('data.task=digits(canvas=4)', 'canvas=4 is smaller than the pictures'),
    ('training.objective=r_drop', 'possible for glimpses'),
    ('training.auxiliary=coverage', 'possible for glimpses'),
    ('training.select=accuracy', "unknown metric in training.select: 'accuracy'"),
    ('evaluation.samples=0', 'evaluation.samples is 0'),
    ('model.attention.score=dot', "unknown field of config.model: 'attention'"),
  ],
)
def test_mistakes_are_one_line(tmp_path, flag, said):
  ran = run('train', *ARGS, f'--config.{flag}', f'--workdir={tmp_path}/run')
  assert ran.code == 2 and said in ran.err and ran.err.count('\n') == 1
  assert not (tmp_path / 'run').exists()
