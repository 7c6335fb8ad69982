"""Prepared data sets: the same batches as from memory, each process reads its own rows, damage raises UserError."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from attention_jax.data import preparing
from attention_jax.data.batching import WHOLE_BATCH, Batches, Share
from attention_jax.data.pipeline import stream
from attention_jax.data.prepared import (
  MANIFEST,
  PAIRS,
  READ_ROWS,
  PreparedField,
  PreparedTable,
  index_name,
  make_unpack,
  pack,
)
from attention_jax.data.preparing import prepare
from attention_jax.data.tasks import TranslationDataConfig, load, save_vocabularies
from attention_jax.errors import UserError

TEXT = "text(train='train', validation='val', source='en', target='de')"
BUCKETS = ((4, 4), (8, 8))
ROWS = 50


def make_config(folder, task, vocabulary='word', shared=False):
  return TranslationDataConfig(task, str(folder), vocabulary, shared, buckets=BUCKETS, batch_size=6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Text files, of which small shards are made."""
  monkeypatch.setattr(preparing, 'SHARD_ROWS', 20)
  monkeypatch.setattr(preparing, 'CHUNK_ROWS', 7)
  rng = np.random.default_rng(0)
  for side in ('en', 'de'):
    lines = [' '.join(rng.choice([*'abcdefgü'], rng.integers(1, 8))) for _ in range(ROWS)]
    lines[10] = ''
    (tmp_path / f'train.{side}').write_text('\n'.join(lines) + '\n', 'utf-8')
    (tmp_path / f'val.{side}').write_text('a b new\n', 'utf-8')
  return tmp_path


@pytest.fixture
def both(folder):
  """The same data set in memory and prepared."""
  output = prepare(make_config(folder, TEXT), folder / 'prepared', log=lambda line: None)
  return load(make_config(folder, TEXT), None), load(make_config(output, 'prepared'), None)


def batches(data, share=WHOLE_BATCH, **options):
  return Batches(data.encoded['train'], BUCKETS, 6, seed=3, share=share, **options)


def assert_same(actual, expected):
  assert type(actual) is type(expected)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_batches_are_those_from_memory(both):
  in_memory, prepared = map(batches, both)
  assert prepared.shapes == in_memory.shapes and len(prepared) == len(in_memory) > 5
  for step in range(2 * len(prepared)):
    assert_same(prepared[step], in_memory[step])
  for start in (0, 5):  # in the middle of an epoch
    for step, batch in enumerate(stream(prepared, start, start + 3), start):
      assert_same(batch, in_memory[step])


def test_reports_and_corpora_are_those_from_memory(both):
  in_memory, prepared = both
  assert prepared.report[3:] == in_memory.report[3:]
  assert all('1 pair with a blank side skipped (line 11)' in data.report[2] for data in both)
  assert prepared.corpora['validation'] == in_memory.corpora['validation']
  assert list(prepared.corpora['train'].source) == in_memory.corpora['train'].source
  assert prepared.corpora['train'].target[3:5] == in_memory.corpora['train'].target[3:5]
  assert prepared.corpora['train'].line(10) == in_memory.corpora['train'].line(10) == 12
  splits = [data.encoded['train'] for data in both]
  assert splits[0].num_uncopyable_tokens == splits[1].num_uncopyable_tokens > 0
  assert splits[0].num_tokens == splits[1].num_tokens


def test_prepared_text_is_normalised(folder):
  config = dataclasses.replace(make_config(folder, TEXT), normalization='NFC')
  for side in ('en', 'de'):
    path = folder / f'train.{side}'
    path.write_text(path.read_text('utf-8').replace('ü', 'u\u0308'), 'utf-8')
  output = prepare(config, folder / 'prepared', log=lambda line: None)
  config_of_prepared = dataclasses.replace(config, folder=str(output), task='prepared')
  in_memory, prepared = load(config, None), load(config_of_prepared, None)
  assert list(prepared.corpora['train'].source) == in_memory.corpora['train'].source
  assert_same(batches(prepared)[0], batches(in_memory)[0])
  with pytest.raises(UserError, match=r"config.data.normalization is 'none', but .* was prepared with 'NFC'"):
    load(dataclasses.replace(config_of_prepared, normalization='none'), None)


def test_a_line_is_read_without_a_list_of_all_rows():
  table = types.SimpleNamespace(rows=10**12, read=lambda rows, name: [[f'{row}' for row in rows]])
  lines = PreparedField(table, 'source_text')
  assert lines[3] == '3' and lines[-1] == f'{10**12 - 1}' and lines[5:7] == ['5', '6'] and lines[4:4] == []
  with pytest.raises(IndexError):
    lines[10**12]


def test_a_pass_over_all_lines_reads_many_at_once():
  reads = []

  def read(rows, name):
    reads.append(len(rows))
    return [[f'{row}' for row in rows]]

  table = types.SimpleNamespace(rows=READ_ROWS + 3, read=read)
  assert list(PreparedField(table, 'target_text', int)) == [*range(READ_ROWS + 3)]
  assert reads == [READ_ROWS, 3]


def test_a_set_behind_a_url_is_that_on_disk(both, folder, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
  _, on_disk = both
  behind_url = load(make_config(f'file://{folder}/prepared', 'prepared'), None)
  for step in range(3):
    assert_same(*(batches(data)[step] for data in (on_disk, behind_url)))
  assert len(behind_url.source_vocab) == len(on_disk.source_vocab)


def test_ids_of_unknown_words_are_those_from_memory(folder):
  config = make_config(folder, TEXT, 'word(min_count=60)', shared=True)
  prepare(config, folder / 'prepared', log=lambda line: None)
  prepared = make_config(folder / 'prepared', 'prepared', 'word(min_count=60)', shared=True)
  in_memory, on_disk = (load(x, None) for x in (config, prepared))
  assert 'train: unknown 47.99% of source tokens' in on_disk.report[3]
  assert on_disk.report[2:] == in_memory.report[2:]
  batch = batches(on_disk)[1]
  assert batch.source.max() >= len(on_disk.source_vocab)  # an unknown token has the id V + its first position
  assert_same(batch, batches(in_memory)[1])


def test_a_vocabulary_other_than_that_of_the_preparation_raises(both, folder):
  _, prepared = both
  config = make_config(folder / 'prepared', 'prepared')
  empty, other = folder / 'empty', folder / 'other'
  assert load(config, str(empty)).report[0].endswith(' entries, stored')  # not made a second time
  save_vocabularies(config, prepared.source_vocab, prepared.source_vocab, str(other))
  with pytest.raises(UserError, match=r'prepared was prepared with another target vocabulary than that of this run'):
    load(config, str(other))
  save_vocabularies(config, prepared.source_vocab, prepared.target_vocab, str(other))
  assert_same(batches(load(config, str(other)))[0], batches(prepared)[0])


def test_each_process_reads_its_own_rows_only(both, monkeypatch):
  read = []
  read_records = PreparedTable.read_records
  monkeypatch.setattr(PreparedTable, 'read_records', lambda table, rows: read.append(rows) or read_records(table, rows))
  whole = batches(both[0])
  for count in (2, 3):
    shares = [batches(both[1], Share(index, count)) for index in range(count)]
    for step in range(len(whole)):
      read.clear()
      parts = [share[step] for share in shares]
      joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
      assert_same(joined, whole[step])
      rows = np.concatenate(read)
      assert len(rows) == len(set(rows.tolist())) == np.sum(whole[step].index >= 0)


def test_identities_differ_if_and_only_if_rows_do(folder, both):
  again = load(make_config(folder / 'prepared', 'prepared'), None)
  assert_same(again.encoded['train'].identity, both[1].encoded['train'].identity)
  lines = (folder / 'train.en').read_text('utf-8').split('\n')
  (folder / 'train.en').write_text('\n'.join(['c', *lines[1:]]), 'utf-8')
  prepare(make_config(folder, TEXT), folder / 'changed', log=lambda line: None)
  changed = load(make_config(folder / 'changed', 'prepared'), None)
  assert not np.array_equal(changed.encoded['train'].identity[0], both[1].encoded['train'].identity[0])


def test_damage_raises_a_user_error(folder, both):
  prepared = folder / 'prepared'
  config = make_config(prepared, 'prepared')

  def error(config=config):
    with pytest.raises(UserError) as caught:
      encoded = load(config, None).encoded['train']
      encoded.read(np.arange(encoded.rows))
    return str(caught.value)

  assert 'holds no prepared data set' in error(make_config(folder, 'prepared'))
  message = error(make_config(prepared, 'prepared', 'char'))
  assert "config.data.vocabulary is 'char'" in message and "prepared with 'word'" in message
  shard = prepared / 'train-00001.array_record'
  content = shard.read_bytes()
  damaged = bytearray(content)
  damaged[content.index(b'a b') + 1] ^= 4
  for data, reason in ((bytes(damaged), 'cannot read its rows'), (content[:-1], 'bytes, expected')):
    shard.write_bytes(data)
    assert reason in error()
  shard.unlink()
  assert 'No such file' in error()
  shard.write_bytes(content)
  reasons = {index_name('train'): 'cannot be read', 'validation.json': 'not a split', MANIFEST: 'cannot read'}
  for name, reason in reasons.items():
    content = (prepared / name).read_bytes()
    (prepared / name).write_bytes(content[:10])
    assert reason in error()
    (prepared / name).write_bytes(content)
  manifest = json.loads((prepared / MANIFEST).read_text())
  for field, value, reason in (
    ('tables', {'train': [{'name': 'x'}]}, 'not the manifest'),
    ('format', 3, 'format 3, expected 4'),
    ('system', 'classification', "was prepared for system 'classification', not for 'translation'"),
  ):
    (prepared / MANIFEST).write_text(json.dumps(manifest | {field: value}))
    assert reason in error()


def test_unpack_inverts_pack():
  record = pack([np.array([5, 70_000, 2], np.int32), np.array([2], np.int32), 'ü b', ''])
  source, target, *texts = make_unpack(PAIRS, [*PAIRS.fields])(record)
  assert source.tolist() == [5, 70_000, 2] and target.tolist() == [2] and texts == ['ü b', '']
  assert make_unpack(PAIRS, ['source_text'])(record) == ['ü b']
