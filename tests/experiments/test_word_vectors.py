"""Word vectors are learned by one command, and a run starts from them."""

import json

import pytest

from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error


@pytest.fixture
def arguments(tmp_path):
  """The arguments of train.py for a few reviews."""
  words = {'good': 'praise', 'fine': 'praise', 'bad': 'blame', 'dull': 'blame'}
  lines = [json.dumps({'text': f'It was {word}.', 'label': label}) for word, label in words.items()] * 8
  for split in ('train', 'dev'):
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines), 'utf-8')
  task = "--config.data.task=jsonl(train='train.jsonl', validation='dev.jsonl')"
  sizes = ['--config.model.embedding=4', '--config.model.encoder=birnn(features=4)', '--config.training.steps=2']
  data = [f'--config.data.folder={tmp_path}', '--config.data.vocabulary=word', '--config.data.buckets=((2, 8),)']
  return ['--config=configs/imdb.py:yang2016', task, *data, *sizes]


def test_a_run_starts_from_learned_vectors(arguments, tmp_path):
  path = tmp_path / 'vectors.txt'
  result = run('word_vectors', *arguments, f'--output={path}', '--epochs=2')
  assert result.code == 0, result.err
  assert result.out == f'written to {path}: 7 vectors of 4 numbers\n'
  result = run('train', *arguments, f'--workdir={tmp_path}/run', f'--config.initial_vectors={path}')
  assert result.code == 0, result.err
  assert f'{path}: vectors of 7 of 11 tokens for embedding' in result.out


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    (['--table=decoder'], "unknown table 'decoder'; expected one of: embedding"),
    (['--epochs=0'], 'flag --epochs=0'),
    (['--window=100000000000'], 'flag --window=100000000000'),
    (['--seed=4294967296'], 'flag --seed=4294967296'),
    (['--config.initial_vectors=a', '--config.initial_run=b'], 'are both set; expected one of them at most'),
  ],
)
def test_mistakes_are_reported_in_one_line(changed, message, arguments, tmp_path):
  result = run('word_vectors', *arguments, f'--output={tmp_path}/vectors.txt', *changed)
  assert_user_error(result, [message])
  assert not (tmp_path / 'vectors.txt').exists()


def test_a_file_is_not_overwritten_and_a_config_is_required(arguments, tmp_path):
  path = tmp_path / 'vectors.txt'
  path.write_text('kept')
  result = run('word_vectors', *arguments, f'--output={path}')
  assert result.code == 2 and f'{path} exists; choose another --output' in result.err and path.read_text() == 'kept'
  assert '--config is missing' in run('word_vectors', f'--output={tmp_path}/other.txt').err
