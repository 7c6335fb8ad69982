"""Data sets of Hugging Face on a disk: splits, formats, columns, classes, and one line for each mistake."""

import dataclasses
import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from attention_jax.data import hugging_face, tasks
from attention_jax.data.pair_streams import open_pairs
from attention_jax.data.tasks import TranslationDataConfig
from attention_jax.systems.classification.config import ClassificationDataConfig
from attention_jax.systems.classification.data import load_documents
from tests.data.helpers import error_message

PAIRS = [('ein Hund', 'a dog'), ('2020-01-02', 'a\ndate'), ('Grüße 漢字', 'greetings')]
NESTED = [{'id': str(i), 'translation': {'de': de, 'en': en}} for i, (de, en) in enumerate(PAIRS)]
PLAIN = [{'de': de, 'en': en, 'score': 0.5} for de, en in PAIRS]


def make_table(rows, **features):
  """A table with the metadata that `datasets` adds to a schema."""
  table = pa.Table.from_pylist(rows)
  return table.replace_schema_metadata({'huggingface': json.dumps({'info': {'features': features}})})


def write_arrow(path, table):
  path.parent.mkdir(parents=True, exist_ok=True)
  with pa.ipc.new_stream(path, table.schema) as writer:
    writer.write_table(table, max_chunksize=2)


def write_saved(folder, rows):
  """Writes splits as DatasetDict.save_to_disk does, with what `map` leaves beside them."""
  table = make_table(rows)
  (folder / 'train').mkdir(parents=True)
  for name in ('dataset_dict.json', 'train/state.json', 'train/dataset_info.json'):
    (folder / name).write_text('{}')
  write_arrow(folder / 'train/data-00000-of-00002.arrow', table[:2])
  write_arrow(folder / 'train/data-00001-of-00002.arrow', table[2:])
  write_arrow(folder / 'train/cache-49345d39a6982b82.arrow', pa.table({'x': [1]}))
  write_arrow(folder / 'validation/data-00000-of-00001.arrow', table[:1])


def write_parquet(folder, rows):
  """Writes splits as in a repository of data sets of the Hub."""
  (folder / 'data').mkdir(parents=True)
  table = make_table(rows)
  pa.parquet.write_table(table[:2], folder / 'data/train-00000-of-00002-a1b2.parquet')
  pa.parquet.write_table(table[2:], folder / 'data/train-00001-of-00002-a1b2.parquet')
  pa.parquet.write_table(table[:1], folder / 'data/dev-00000-of-00001.parquet')
  pa.parquet.write_table(table, folder / 'data/unsupervised-00000-of-00001.parquet')


def write_jsonl(folder, rows):
  folder.mkdir(parents=True)
  lines = [json.dumps(row, ensure_ascii=False) + '\n' for row in rows]
  (folder / 'README.md').write_text('train')
  (folder / 'de-en.train.jsonl.gz').write_bytes(gzip.compress(''.join(lines).encode()))
  (folder / 'de-en.valid.jsonl').write_text(lines[0], 'utf-8')


def load(task, folder):
  return tasks.load_corpora(TranslationDataConfig(task, str(folder)))


@pytest.mark.parametrize('rows', [NESTED, PLAIN], ids=['nested', 'plain'])
@pytest.mark.parametrize('write', [write_saved, write_parquet, write_jsonl])
def test_translations_are_read_from_each_format(write, rows, tmp_path):
  write(tmp_path / 'set', rows)
  corpora = load("huggingface(path='set', source='de', target='en')", tmp_path)
  assert list(corpora) == ['train', 'validation']
  assert corpora['train'].source == ['ein Hund', '2020-01-02', 'Grüße 漢字']
  assert corpora['train'].target == ['a dog', 'a date', 'greetings']
  assert corpora['train'].report == (f'{tmp_path}/set train: line breaks inside 1 text read as spaces',)
  assert corpora['validation'][:2] == (['ein Hund'], ['a dog'])
  stream, _ = open_pairs(TranslationDataConfig("huggingface(path='set', source='en', target='de')", str(tmp_path)))
  assert [pair for pair, _ in stream.pairs()] == list(
    zip(corpora['train'].target, corpora['train'].source, strict=True)
  )
  assert stream.notes == list(corpora['train'].report) and [share for _, share in stream.pairs()][-1] == 1


def test_files_without_a_split_are_training_data(tmp_path):
  write_arrow(tmp_path / 'saved/data-00000-of-00001.arrow', make_table(NESTED))
  for path in ('saved', 'saved/data-00000-of-00001.arrow'):
    assert list(load(f"huggingface(path='{path}', source='de', target='en')", tmp_path)) == ['train']
  *_, row = hugging_face.iter_rows([str(tmp_path / 'saved/data-00000-of-00001.arrow')], ['id', 'en'])
  assert row == (('2', 'greetings'), f'{tmp_path}/saved/data-00000-of-00001.arrow:3', 1.0)


def load_labelled(task, folder):
  return load_documents(dataclasses.replace(ClassificationDataConfig(), task=task, folder=str(folder)))


def test_labelled_texts_are_read_with_the_names_of_their_classes(tmp_path):
  label = {'names': ['neg', 'pos'], '_type': 'ClassLabel'}
  rows = [{'text': 'good . really', 'label': 1}, {'text': 'bad', 'label': 0}]
  write_arrow(tmp_path / 'train/data-0.arrow', make_table(rows, label=label))
  write_arrow(tmp_path / 'test/data-0.arrow', make_table([{'text': 'x', 'label': -1}], label=label))
  splits = load_labelled("huggingface(path='.')", tmp_path)
  assert list(splits) == ['train']  # a test split without labels is left out
  assert splits['train'].labels == ['pos', 'neg'] and splits['train'].sentences[1] == ['bad']
  write_arrow(tmp_path / 'validation/data-0.arrow', make_table([{'text': 'x', 'label': -1}], label=label))
  message = f'{tmp_path}/validation/data-0.arrow:1: label must be a non-empty string or a whole number, got None'
  assert error_message(load_labelled, f"huggingface(path='{tmp_path}')", '') == message
  (tmp_path / 'pairs.jsonl').write_text('{"a": "x", "b": "y", "c": 1}\n{"a": "z", "b": "y", "c": 0}\n')
  pairs = load_labelled("huggingface(path='pairs.jsonl', text=('a', 'b'), label='c')", tmp_path)['train']
  assert (pairs.sentences, pairs.labels) == ([['x', 'y'], ['z', 'y']], ['1', '0'])


def damaged_sets(folder):
  """Data sets by name, each with one mistake."""
  write_jsonl(folder / 'good', PLAIN)
  write_jsonl(folder / 'null', [{'de': None, 'en': 'x'}])
  write_arrow(folder / 'list/train.arrow', pa.table({'de': [['a']], 'en': ['b']}))
  invalid = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b'\0\0\0\0\1\0\0\0'), pa.py_buffer(b'\xff')])
  write_arrow(folder / 'latin1/train.arrow', pa.table({'de': invalid, 'en': ['b']}))
  for name in ('arrow', 'parquet', 'jsonl', 'jsonl.gz'):
    (folder / f'damaged.{name}').write_bytes(b'not such a file')
  (folder / 'array.jsonl').write_text('[1]')
  (folder / 'empty').mkdir()
  write_jsonl(folder / 'no_train', PLAIN)
  (folder / 'no_train/de-en.train.jsonl.gz').unlink()
  (folder / 'no_train/test.jsonl').write_text('{}')
  return folder


@pytest.mark.parametrize(
  ('path', 'source', 'message'),
  [
    ('goood', 'de', '{0}/goood: no such file (did you mean'),
    ('good/README.md', 'de', '{0}/good/README.md: no data; expected files with the suffix .arrow, .parquet, .jsonl'),
    ('empty', 'de', '{0}/empty: no data; expected files'),
    ('no_train', 'de', '{0}/no_train: no file of the split train, only of test, validation'),
    ('good', 'fr', "{0}/good/de-en.train.jsonl.gz:1: no column 'fr'; it has: de, en, score"),
    ('null', 'de', '{0}/null/de-en.train.jsonl.gz:1: de must be a string, got None'),
    ('list', 'de', "{0}/list/train.arrow:1: de must be a string, got ['a']"),
    ('latin1', 'de', '{0}/latin1/train.arrow: damaged, or not .arrow (Column 0: In chunk 0: Invalid: Inval'),
    ('damaged.arrow', 'de', '{0}/damaged.arrow: damaged, or not .arrow ('),
    ('damaged.parquet', 'de', '{0}/damaged.parquet: damaged, or not .parquet ('),
    ('damaged.jsonl', 'de', '{0}/damaged.jsonl:1: invalid JSON ('),
    ('damaged.jsonl.gz', 'de', '{0}/damaged.jsonl.gz: not a whole gzip file ('),
    ('array.jsonl', 'de', "{0}/array.jsonl:1: expected a JSON object, got '[1]'"),
  ],
)
def test_mistakes_are_reported(path, source, message, tmp_path):
  folder = damaged_sets(tmp_path)
  task = f"huggingface(path='{path}', source='{source}', target='en')"
  assert error_message(load, task, folder).startswith(message.format(folder))
