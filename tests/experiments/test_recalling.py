"""The programs on recall tasks: training, plots, mistakes."""

import json

import pytest

from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error

SMALL = {
  'model.cell': 'turing(features=8, slots=8, width=4)',
  'data.task': 'copy(bits=2, longest=1, beyond=5)',
  'training.steps': 4,
  'training.evaluate_every': 2,
  'training.checkpoint_every': 2,
  'data.batch_size': 8,
  'training.schedule': 'constant(rate=3e-3)',
}
ARGS = ['--config=configs/recall.py:graves2014', *(f'--config.{name}={value}' for name, value in SMALL.items())]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('recalled') / 'run'
  result = run('train', *ARGS, f'--workdir={folder}')
  assert result.code == 0, result.err
  return folder, result.out


@pytest.mark.long
def test_a_run_writes_results_and_hypotheses(trained):
  folder, out = trained
  assert 'unseen: 256 episodes of up to 11 steps' in out and 'cosine(beta=1.0) and addressing' in out
  results = json.loads((folder / 'results.json').read_text())['results']
  assert set(results) == {'test', 'unseen'} and set(results['unseen']) == {'loss', 'cost', 'error', 'exact_match'}
  unseen = results['unseen']
  bits = 256 * 5 * 2
  assert unseen['loss']['signature'] == f'bits:{bits}|episodes:256'
  # The loss is in nat per bit, the cost in bit per sequence of 10 bits.
  assert unseen['cost']['value'] == pytest.approx(unseen['loss']['value'] / 0.6931472 * 10, rel=1e-4)
  lines = (folder / 'hypotheses.unseen.txt').read_text().splitlines()
  assert len(lines) == 256 and all(len(line.split()) == 5 and set(line) <= {'0', '1', ' '} for line in lines)


@pytest.mark.long
def test_random_answers_are_compared_with_the_best_estimate(tmp_path):
  folder = tmp_path / 'run'
  task = '--config.data.task=ngrams(order=2, length=6, beyond=8)'
  assert run('train', *ARGS, task, '--config.training.steps=1', f'--workdir={folder}').code == 0
  unseen = json.loads((folder / 'results.json').read_text())['results']['unseen']
  costs = unseen['cost']['value'], unseen['cost_of_best_estimate']['value']
  assert 7.5 > costs[0] > costs[1] > 3  # fair coins for 7 bits cost 7
  assert run('inspect_attention', f'--workdir={folder}', '--split=unseen', '--rows=0').code == 0


@pytest.mark.long
def test_splits_are_evaluated_and_drawn(trained, tmp_path):
  folder, _ = trained
  result = run('evaluate', f'--workdir={folder}', '--split=validation')
  assert result.code == 0 and 'exact_match' in result.out
  for flags in ([], [f'--output={tmp_path}/page.html']):
    assert run('inspect_attention', f'--workdir={folder}', '--split=unseen', '--rows=0,5', *flags).code == 0
  assert (folder / 'memory.png').exists() and '<html' in (tmp_path / 'page.html').read_text('utf-8')
  result = run('inspect_attention', f'--workdir={folder}', '--text=7')
  assert_user_error(result, ['--text: this run reads vectors'])


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('model.alignment=hard', "alignment='hard'"),
    ('model.cell=turing(heads=2)', "option of cell 'turing': 'heads'"),
    ('data.batch_size=0', 'config.data.batch_size must be at least 1, got 0'),
    ('training.label_smoothing=0.1', "training.label_smoothing must be 0.0 for system 'recall', got 0.1"),
    ('training.auxiliary=coverage', "training.auxiliary must be '' for system 'recall', got 'coverage'"),
    pytest.param('training.select=bleu', "unknown metric in training.select: 'bleu'", marks=pytest.mark.long),
  ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, flag, message):
  assert_user_error(run('train', *ARGS, f'--config.{flag}', f'--workdir={tmp_path}/run'), [message])
  assert not (tmp_path / 'run').exists()
