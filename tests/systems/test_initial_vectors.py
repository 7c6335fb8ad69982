"""Training whose embeddings start from word vectors."""

import gzip

import jax
import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.errors import UserError
from attention_jax.modules.parameter_files import flatten_names
from attention_jax.systems.config import default_run_config, parse_config
from attention_jax.systems.experiment import check_config
from attention_jax.systems.initial_vectors import embedding_tables, read_word_vectors
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import open_run
from tests.systems.helpers import tiny_config, train_quietly, write_pairs

pytestmark = pytest.mark.usefixtures('on_two_devices')

CONSTANT_PARAMETERS = {  # parameters keep their initial values up to 1e-12
  'training__schedule': 'constant(rate=1e-12)',
  'training__steps': 1,
}
VECTORS = 'cat 1 2 3\ndog 4 5e-1 -6\nbird 7 8 9\n'
WORDS = vocab.word(['the cat sleeps', 'the dog sleeps', 'a cat eats', 'a dog eats'])


def write_vectors(path, tokens):
  path.write_text(''.join(f'{token} {i}.5 1 2 3\n' for i, token in enumerate(tokens)))
  return str(path)


@pytest.fixture
def data(tmp_path):
  return write_pairs(tmp_path / 'data')


def rows_by_token(array, vocabulary):
  return {vocabulary.id_to_token(id): row.tolist() for id, row in enumerate(np.asarray(array))}


@pytest.mark.long
def test_each_table_starts_from_its_file_and_the_run_resumes_without_the_files(data, tmp_path):
  source, target = write_vectors(tmp_path / 's.txt', 'abx'), write_vectors(tmp_path / 't.txt', 'cb')
  config = tiny_config(data, initial_vectors=f'{source}, {target}', **CONSTANT_PARAMETERS)
  folder = tmp_path / 'run'
  _, lines = train_quietly(config, folder)
  run = open_run(folder, 'latest')
  params = flatten_names(run.params)
  cases = (('encoder.embedding', source, 'ab', run.vocabularies[0]), ('embedding', target, 'cb', run.vocabularies[1]))
  for table, path, tokens, vocabulary in cases:
    assert f'{path}: vectors of 2 of 11 tokens for {table}' in lines
    rows = rows_by_token(params[f'{table}.table.embedding'], vocabulary)
    np.testing.assert_allclose([rows[token] for token in tokens], [[0.5, 1, 2, 3], [1.5, 1, 2, 3]], atol=1e-5)
    (tmp_path / path).unlink()
  _, lines = train_quietly(config | {'training': config['training'] | {'steps': 2}}, folder)
  assert any(line.startswith('all 2 steps are done') for line in lines)


@pytest.mark.long
def test_one_side_may_be_random(data, tmp_path):
  target = write_vectors(tmp_path / 't.txt', 'cb')
  _, lines = train_quietly(tiny_config(data, initial_vectors=f',{target}', **CONSTANT_PARAMETERS), tmp_path / 'run')
  assert f'{target}: vectors of 2 of 11 tokens for embedding' in lines
  assert any(line.startswith('starts with 1 of ') for line in lines)


@pytest.mark.parametrize(
  ('value', 'fields', 'message'),
  [
    ('{v},{v},{v}', {}, 'names 3 files; expected at most one for each of encoder.embedding, embedding'),
    ('{v}', {'model__embedding': 5}, 'is [11, 4] in config.initial_vectors='),
    ('{v}', {'initial_run': 'runs/x'}, 'initial_run and config.initial_vectors are both set; expected one of them'),
    ('nowhere.txt', {}, 'nowhere.txt: no such file'),
    (' ,', {}, "config.initial_vectors=' ,' names no file; expected at least one"),
  ],
)
def test_wrong_initial_vectors_are_reported_before_training(value, fields, message, data, tmp_path):
  vectors = write_vectors(tmp_path / 'v.txt', 'abc')
  with pytest.raises(UserError) as error:
    train_quietly(tiny_config(data, initial_vectors=value.format(v=vectors), **fields), tmp_path / 'run')
  assert message in str(error.value)
  assert not (tmp_path / 'run' / 'config.json').exists()


def tables_of(system):
  initializer = system.initializer()
  return embedding_tables(system, jax.eval_shape(lambda: initializer(0)))


def test_initial_vectors_of_a_system_without_embeddings_raise():
  config = default_run_config('recall')
  check_config(config)
  with pytest.raises(UserError, match="system 'recall' has no embeddings that can start from word vectors"):
    tables_of(SYSTEMS['recall'].load(config, None))


def test_shared_embeddings_are_one_table(data):
  fields = {'data__shared_vocabulary': True, 'model__share_embeddings': True}
  system = SYSTEMS['translation'].load(parse_config(tiny_config(data, **fields)), None)
  assert tables_of(system) == {'encoder.embedding': system.source_vocab}


@pytest.mark.long
def test_frozen_vectors_stay_as_in_the_file_when_training_resumes(data, tmp_path):
  vectors = write_vectors(tmp_path / 'v.txt', 'ab')
  fields = {'training__frozen': 'encoder.embedding', 'training__optimizer': 'adamw', 'training__average': 0.9}
  config = tiny_config(data, initial_vectors=vectors, **fields)
  folder = tmp_path / 'run'
  train_quietly(config | {'training': config['training'] | {'steps': 2}}, folder)
  train_quietly(config, folder)
  for checkpoint in ('latest', 'best'):
    run = open_run(folder, checkpoint)
    rows = rows_by_token(flatten_names(run.params)['encoder.embedding.table.embedding'], run.system.source_vocab)
    assert [rows['a'], rows['b']] == [[0.5, 1, 2, 3], [1.5, 1, 2, 3]]


@pytest.mark.parametrize('header', ['', '3 3\n', '\ufeff', '\ufeff3 3\n'])
@pytest.mark.parametrize('name', ['vectors.txt', 'vectors.txt.gz', 'vectors.npz'])
def test_rows_of_known_tokens_are_those_of_the_file(header, name, tmp_path):
  data = (header + VECTORS.replace('\n', ' \n') + 'cat 0 0 0\n').encode()  # word2vec ends lines with a space
  path = tmp_path / name
  if name.endswith('.npz'):
    np.savez(path, tokens=['cat', 'dog', 'bird', 'cat'], vectors=[[1, 2, 3], [4, 0.5, -6], [7, 8, 9], [0, 0, 0]])
  else:
    path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  table, num_found = read_word_vectors(str(path), WORDS)
  assert table.shape == (len(WORDS), 3) and table.dtype == np.float32 and num_found == 2
  rows = rows_by_token(table, WORDS)
  assert rows['cat'] == [1, 2, 3] and rows['dog'] == [4, 0.5, -6]  # of a token with two vectors the first


def test_tokens_absent_from_the_file_have_random_rows_with_its_spread_and_always_the_same(tmp_path):
  vocabulary = vocab.word([f'w{i}' for i in range(2000)])
  path = tmp_path / 'vectors.txt'
  path.write_text('w0 3 -3 3 -3\nw1 -3 3 -3 3\n')
  first, second = (read_word_vectors(str(path), vocabulary)[0] for _ in range(2))
  np.testing.assert_array_equal(first, second)
  assert first.std() == pytest.approx(3, rel=0.03) and abs(first.mean()) < 0.1


def test_tokens_may_contain_spaces(tmp_path):
  (tmp_path / 'vectors.txt').write_text('a 1 2\n  3 4\n')
  vocabulary = vocab.char(['a a'])
  table, num_found = read_word_vectors(str(tmp_path / 'vectors.txt'), vocabulary)
  rows = rows_by_token(table, vocabulary)
  assert num_found == 2 and rows['a'] == [1, 2] and rows[' '] == [3, 4]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('bird 1 2\n', 'vectors.txt: has a vector for none of the 6 tokens of the vocabulary'),
    ('cat\t1\t2\n', 'expected lines of a token and its numbers, separated by single spaces'),
    ('cat 1 1e50\n', "vectors.txt: the vector of 'cat' must consist of finite numbers"),
    ('cat 1 2\ndog 1 nan\n', "vectors.txt: the vector of 'dog' must consist of finite numbers"),
    ('cat 1 2\ndog 1\n', "vectors.txt:2: expected a token and 2 numbers, separated by single spaces, got 'dog 1'"),
    ('cat 1 2\ndog 1 x\n', "vectors.txt:2: expected a token and 2 numbers, separated by single spaces, got 'dog 1 x'"),
    ('cat\ndog\n', "vectors.txt:1: expected a token and 0 numbers, separated by single spaces, got 'cat'"),
    ('', 'vectors.txt: the file is empty'),
  ],
)
def test_invalid_text_files_are_reported(text, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'vectors.txt').write_text(text)
  with pytest.raises(UserError) as error:
    read_word_vectors('vectors.txt', WORDS)
  assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('vectors', [None, [1.0], [[1.0], [2.0]], [['x']]])
def test_invalid_arrays_are_reported(vectors, tmp_path):
  path = tmp_path / 'vectors.npz'
  np.savez(path, tokens=['cat'], **{} if vectors is None else {'vectors': vectors})
  with pytest.raises(UserError, match=r'vectors\.npz: expected the arrays tokens \[N\] and vectors \[N, F\]'):
    read_word_vectors(str(path), WORDS)
