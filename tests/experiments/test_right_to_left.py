"""A run that predicts targets from right to left: texts, scores and alignments are those of the text."""

import json

import numpy as np
import pytest

from tests.experiments.helpers import read_tree, run, tiny_arguments
from tests.experiments.test_bad_input import assert_user_error

SOURCE = 'eins zwei drei\nneun fünf\n'


@pytest.fixture(scope='module')
def backward(task, tmp_path_factory):
  folder = tmp_path_factory.mktemp('right_to_left') / 'run'
  flags = ('--config.data.right_to_left', '--config.training.steps=30', '--config.training.evaluate_every=30')
  result = run('train', *tiny_arguments(task, folder), *flags)
  assert result.code == 0, result.err
  return folder


def test_hypotheses_have_the_scores_and_the_alignments_of_their_text(backward, tmp_path):
  (tmp_path / 'source').write_text(SOURCE)
  workdir = f'--workdir={backward}'
  translated = run('translate', workdir, f'--input={tmp_path}/source', '--beams=3', '--json')
  records = [json.loads(line) for line in translated.out.splitlines()]
  hypotheses = [record['hypotheses'][0] for record in records]
  (tmp_path / 'target').write_text(''.join(hypothesis['text'] + '\n' for hypothesis in hypotheses))
  scored = run('score', workdir, f'--source={tmp_path}/source', f'--target={tmp_path}/target')
  scores = [json.loads(line) for line in scored.out.splitlines()]
  for hypothesis, score in zip(hypotheses, scores, strict=True):
    assert hypothesis['text'] == ' '.join(hypothesis['tokens']) and hypothesis['tokens'] == score['tokens']
    assert hypothesis['log_prob'] == pytest.approx(sum(score['log_probs']), abs=1e-4)
    assert hypothesis['alignment'] == score['alignment']
    np.testing.assert_allclose(hypothesis['weights'], score['weights'], atol=2e-4)
  aligned = run('align', workdir, f'--source={tmp_path}/source', f'--target={tmp_path}/target')
  assert aligned.out.split('\n')[0] == ' '.join(f'{s}-{t}' for s, t in scores[0]['alignment'])


def test_evaluation_and_pictures_of_rows_use_the_same_weights(backward, tmp_path):
  record = json.loads(run('evaluate', f'--workdir={backward}', '--json').out)
  assert record['results']['alignment_error_rate']['value'] <= 100
  result = run('inspect_attention', f'--workdir={backward}', '--rows=1', f'--output={tmp_path}/picture.png')
  assert result.code == 0, result.err


def test_prefixes_streams_and_ensembles_with_the_other_direction_are_errors(backward, trained, tmp_path):
  (tmp_path / 'prefixes').write_text('eins\n\n')
  (tmp_path / 'source').write_text(SOURCE)
  before = read_tree(backward)
  result = run('translate', f'--workdir={backward}', f'--input={tmp_path}/source', f'--prefixes={tmp_path}/prefixes')
  assert_user_error(result, ['prefixes are predicted last by a run with config.data.right_to_left'])
  result = run('translate', f'--workdir={backward},{trained[0]}', f'--input={tmp_path}/source')
  assert_user_error(result, ['in different directions (config.data.right_to_left), cannot be an ensemble'])
  assert read_tree(backward) == before
