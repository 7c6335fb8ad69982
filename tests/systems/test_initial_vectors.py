"""Training whose embeddings start from word vectors."""

import jax
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.modules.weights import flatten_names
from attention_jax.systems.config import default_config
from attention_jax.systems.experiment import check_config
from attention_jax.systems.initial_vectors import embedding_tables
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.runs import open_run
from tests.systems.helpers import tiny_config, train_quietly, write_pairs

pytestmark = pytest.mark.usefixtures('on_two_devices')

CONSTANT_PARAMETERS = {  # parameters keep their initial values up to 1e-12
  'training__schedule': 'constant(rate=1e-12)',
  'training__steps': 1,
}


def write_vectors(path, tokens):
  path.write_text(''.join(f'{token} {i}.5 1 2 3\n' for i, token in enumerate(tokens)))
  return str(path)


def rows_by_token(array, vocabulary):
  return {vocabulary.id_to_token(id): row.tolist() for id, row in enumerate(np.asarray(array))}


def test_each_table_starts_from_its_file_and_the_run_resumes_without_the_files(tmp_path):
  data = write_pairs(tmp_path / 'data')
  source, target = write_vectors(tmp_path / 's.txt', 'abx'), write_vectors(tmp_path / 't.txt', 'cb')
  config = tiny_config(data, initial_vectors=f'{source}, {target}', **CONSTANT_PARAMETERS)
  folder = tmp_path / 'run'
  _, lines = train_quietly(config, folder)
  assert f'{source}: vectors of 2 of 11 tokens for encoder.embedding' in lines
  assert f'{target}: vectors of 2 of 11 tokens for embedding' in lines
  run = open_run(folder, 'latest')
  params = flatten_names(run.params)
  rows = rows_by_token(params['encoder.embedding.table.embedding'], run.system.source_vocab)
  np.testing.assert_allclose([rows['a'], rows['b']], [[0.5, 1, 2, 3], [1.5, 1, 2, 3]], atol=1e-5)
  rows = rows_by_token(params['embedding.table.embedding'], run.system.target_vocab)
  np.testing.assert_allclose([rows['c'], rows['b']], [[0.5, 1, 2, 3], [1.5, 1, 2, 3]], atol=1e-5)

  for path in (source, target):
    (tmp_path / path).unlink()
  _, lines = train_quietly(config | {'training': config['training'] | {'steps': 2}}, folder)
  assert any(line.startswith('all 2 steps are done') for line in lines)


def test_one_side_may_be_random(tmp_path):
  data = write_pairs(tmp_path / 'data')
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
def test_wrong_initial_vectors_are_reported_before_training(value, fields, message, tmp_path):
  data = write_pairs(tmp_path / 'data')
  vectors = write_vectors(tmp_path / 'v.txt', 'abc')
  config = tiny_config(data, initial_vectors=value.format(v=vectors), **fields)
  with pytest.raises(UserError) as error:
    train_quietly(config, tmp_path / 'run')
  assert message in str(error.value)
  assert not (tmp_path / 'run' / 'config.json').exists()


def test_initial_vectors_of_a_system_without_embeddings_raise():
  config = default_config('recall').to_dict()
  check_config(config)
  system = SYSTEMS['recall'].load(config, None)
  initializer = system.initializer()
  with pytest.raises(UserError, match="system 'recall' has no embeddings that can start from word vectors"):
    embedding_tables(system, jax.eval_shape(lambda: initializer(0)))


def test_shared_embeddings_are_one_table_of_the_text_of_both_sides(tmp_path):
  for split in ('train', 'validation', 'test'):
    (tmp_path / f'{split}.tsv').write_text('a b\tx y\n')
  fields = {'data__shared_vocabulary': True, 'model__share_embeddings': True}
  system = SYSTEMS['translation'].load(tiny_config(tmp_path, **fields), None)
  initializer = system.initializer()
  (table,) = embedding_tables(system, jax.eval_shape(lambda: initializer(0))).values()
  assert list(table.lines()) == ['a b', 'x y']


def test_frozen_vectors_stay_as_in_the_file_when_training_resumes(tmp_path):
  data = write_pairs(tmp_path / 'data')
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
