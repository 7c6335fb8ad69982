"""Documents: readers and their errors, sentences, ids, batches, and generated pairs with their labels."""

import gzip
import json
import re

import numpy as np
import pytest

from attention_jax.data import sentences, vocab
from attention_jax.data.builders import entailment
from attention_jax.data.document_batches import (
  DocumentBatches,
  check_document_buckets,
  describe_documents,
  encode_documents,
  eval_document_batches,
  largest_bucket,
)
from attention_jax.data.documents import Documents, load_documents, parse_documents
from attention_jax.errors import UserError
from attention_jax.tokens import PAD
from tests.data.helpers import write_tfds_set

ROWS = [
  {'text': 'It is good. Very good!', 'label': 1},
  {'text': 'Not so<br />good &amp; long.', 'label': 0},
]


def write_jsonl(folder, rows, name='train.jsonl'):
  (folder / name).write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows), 'utf-8')
  return {'task': f"jsonl(train='{name}', html=True)", 'folder': str(folder)}


def test_texts_are_split_into_sentences_of_tokens(tmp_path):
  train = load_documents(write_jsonl(tmp_path, ROWS))['train']
  assert train.sentences == [['it is good .', 'very good !'], ['not so good & long .']]
  assert train.labels == ['1', '0'] and train.location(1).endswith('train.jsonl:2')


def test_each_text_of_a_pair_is_one_sentence(tmp_path):
  row = {'a': 'One. Two.', 'b': 'Three', 'gold': 'yes'}
  write_jsonl(tmp_path, [row, row | {'gold': 'no'}])
  config = {'task': "jsonl(train='train.jsonl', text=('a', 'b'), label='gold')", 'folder': str(tmp_path)}
  assert load_documents(config)['train'][:1] == ([['one . two .', 'three']] * 2,)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """A folder with a tfds set of documents."""

  def features(tfds):
    return tfds.features.FeaturesDict(
      {'text': tfds.features.Text(), 'label': tfds.features.ClassLabel(names=['bad', 'good'])}
    )

  sizes = {'train': 20, 'test': 2}
  splits = {split: [{'text': f'{split} {i}', 'label': i % 2} for i in range(n)] for split, n in sizes.items()}
  return write_tfds_set(tmp_path_factory.mktemp('tfds'), features, splits, 'all')


@pytest.mark.parametrize(
  ('options', 'sizes'),
  [
    ('', {'train': 20, 'test': 2}),
    (", validation='train[90%:]'", {'train': 18, 'validation': 2, 'test': 2}),
    (", validation='train[:5]'", {'train': 15, 'validation': 5, 'test': 2}),
    (", validation='train[10:12]'", {'train': 18, 'validation': 2, 'test': 2}),
    (", validation='test'", {'train': 20, 'validation': 2, 'test': 2}),
  ],
)
def test_tfds_splits(prepared, options, sizes):
  splits = load_documents({'task': f"tfds(name='tiny/all'{options})", 'folder': str(prepared)})
  assert {split: len(documents.labels) for split, documents in splits.items()} == sizes
  assert set(splits['train'].labels) == {'bad', 'good'}
  if "validation='train" in options:
    assert not {str(s) for s in splits['train'].sentences} & {str(s) for s in splits['validation'].sentences}


@pytest.mark.parametrize(
  ('validation', 'message'),
  [
    (
      'train[:]',
      r"validation='train\[:\]' leaves nothing to train on; expected a part such as 'train\[90%:\]', or a split",
    ),
    ('train', "validation='train' leaves nothing to train on"),
    ('trian[90%:]', r"split of tfds set 'tiny/all': 'trian' \(did you mean 'train'\?\); expected one of: test, train"),
  ],
)
def test_invalid_parts_of_a_tfds_set_are_reported(prepared, validation, message):
  with pytest.raises(UserError, match=message):
    load_documents({'task': f"tfds(name='tiny/all', validation='{validation}')", 'folder': str(prepared)})


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ('train=5', "task 'jsonl': option train must be a string, got 5"),
    ("train='a', html=1", 'option html must be True or False, got 1'),
    ("train='a', text=('a', 'b', 'c')", r'option text must be str \| tuple\[str, str\], got'),
  ],
)
def test_options_of_another_type_are_reported(options, message):
  with pytest.raises(UserError, match=message):
    load_documents({'task': f'jsonl({options})', 'folder': ''})


@pytest.mark.parametrize(
  ('rows', 'message'),
  [
    ([*ROWS, '{'], 'train.jsonl:3: invalid JSON'),
    ([*ROWS, ' ', *ROWS], 'train.jsonl:3: expected a JSON object, got a blank line'),
    ([*ROWS, '[' * 100_000], 'train.jsonl:3: invalid JSON'),
    ([*ROWS, '[1]'], "train.jsonl:3: expected a JSON object, got '[1]'"),
    ([*ROWS, {'label': 1}], "train.jsonl:3: no field 'text'; it has: label"),
    ([*ROWS, {'text': ' <p> ', 'label': 1}], 'train.jsonl:3: the text is empty'),
    ([*ROWS, {'text': 3, 'label': 1}], 'train.jsonl:3: text must be a string, got 3'),
    (
      [*ROWS, {'text': 'a', 'label': True}],
      'train.jsonl:3: label must be a non-empty string or a whole number, got True',
    ),
    (
      [*ROWS, {'text': 'a', 'label': None}],
      'train.jsonl:3: label must be a non-empty string or a whole number, got None',
    ),
    (ROWS[:1], "expected at least two labels, but every label is '1'"),
  ],
)
def test_invalid_rows_are_reported(tmp_path, rows, message):
  with pytest.raises(UserError, match=re.escape(message)):
    load_documents(write_jsonl(tmp_path, rows))


def test_labels_and_languages_that_are_unknown_are_reported(tmp_path):
  write_jsonl(tmp_path, [*ROWS, {'text': 'a', 'label': 2}], 'dev.jsonl')
  config = write_jsonl(tmp_path, ROWS)
  config['task'] = "jsonl(train='train.jsonl', validation='dev.jsonl')"
  with pytest.raises(UserError, match=r"dev\.jsonl:3: unknown label '2'; expected one of training: 0, 1"):
    load_documents(config)
  with pytest.raises(UserError, match="unknown language 'xx_no' of spaCy"):
    load_documents(config | {'task': "jsonl(train='train.jsonl', language='xx_no')"})


def test_sentences_of_large_texts_are_cached(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'MIN_CACHED_CHARACTERS', 10)
  texts = ['One. Two.', 'Three, four?']
  expected = [['one .', 'two .'], ['three , four ?']]
  assert sentences.split(texts) == expected
  (path,) = (tmp_path / 'attention_jax' / 'sentences').iterdir()
  monkeypatch.setattr(sentences, '_split', None)
  assert sentences.split(texts) == expected
  monkeypatch.undo()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'MIN_CACHED_CHARACTERS', 10)
  path.write_bytes(gzip.compress(b'[')[:9])  # truncated: split again
  assert sentences.split(texts) == expected and sentences.split(texts, whole=True)[0] == ['one . two .']


TEXTS = Documents(
  [['a b c d e', 'f'], ['a b'], ['c', 'd e', 'f a', 'b', 'c'], ['a b c', 'd']], ['x', 'y', 'x', 'x'], 'here', range(4)
)


def encode(limits, joined=False):
  words = vocab.train('word', (line for lines in TEXTS.sentences for line in lines))
  return words, encode_documents(TEXTS, words, ['x', 'y'], limits, joined)


def test_long_sentences_are_split_and_the_remainder_is_truncated():
  words, encoded = encode((3, 2))
  rows = next(iter(eval_document_batches(encoded, ((3, 2),), 4)))
  texts = [[' '.join(words.id_to_token(i) for i in line if i != PAD) for line in row] for row in rows.source]
  by_row = dict(zip(rows.index.tolist(), texts, strict=True))
  assert by_row == {0: ['a b', 'c d', 'e'], 1: ['a b', '', ''], 2: ['c', 'd e', 'f a'], 3: ['a b', 'c', 'd']}
  assert rows.label.tolist() == [{0: 0, 1: 1, 2: 0, 3: 0}[i] for i in rows.index]
  assert describe_documents('train', encoded, ['x', 'y']).endswith(
    '4 documents (3 x, 1 y); unknown words: 0.00 %; 15.8 % of the words exceed the largest bucket'
  )
  characters = vocab.train('char', ['a b c d e'])
  encoded = encode_documents(Documents([['a b c d e']], ['x'], 'here', [1]), characters, ['x'], (1, 3), True)
  assert describe_documents('train', encoded, ['x']).endswith('66.7 % of the words exceed the largest bucket')
  words, encoded = encode((1, 4), joined=True)
  (rows,) = eval_document_batches(encoded, ((1, 4),), 4)
  assert sorted(rows.source_mask.sum((1, 2)).tolist()) == [2, 4, 4, 4]


def test_a_long_text_of_a_pair_does_not_displace_the_other():
  pair = Documents([['a b c d e f g', 'x y z']], ['x'], 'here', [1], pairs=True)
  words = vocab.train('word', pair.sentences[0])
  encoded = encode_documents(pair, words, ['x'], (2, 4), joined=False)
  (rows,) = eval_document_batches(encoded, ((2, 4),), 1)
  assert rows.source[0].tolist() == [words.encode('a b c d'), [*words.encode('x y z'), PAD]]


def test_batches_are_a_function_of_seed_and_step():
  _, encoded = encode((5, 5))
  buckets = check_document_buckets([[5, 5], (2, 5)])
  first, second = (DocumentBatches(encoded, buckets, 2, seed) for seed in (0, 1))
  assert len(first) == 3 and first.shapes == [(2, 2, 5), (2, 5, 5)]
  epoch = [first[step] for step in range(len(first))]
  assert sorted(i for batch in epoch for i in batch.index if i >= 0) == [0, 1, 2, 3]
  for step in (5, 2, 9):
    assert all(np.array_equal(x, y) for x, y in zip(first[step], first[step], strict=True))
    assert first[step].source.shape == second[step].source.shape
  filler = next(batch for batch in epoch if -1 in batch.index)
  assert not filler.source_mask[filler.index == -1].any() and not filler.source[filler.index == -1].any()


@pytest.mark.parametrize('buckets', [(), ((1,),), ((0, 3),), 'ab', 5])
def test_invalid_buckets_are_reported(buckets):
  with pytest.raises(UserError, match=r'different \(sentences, words\)'):
    check_document_buckets(buckets)


def test_one_bucket_must_be_the_largest_on_both_sides():
  with pytest.raises(UserError, match=r'must have the most sentences and the most words, \(4, 9\)'):
    largest_bucket(check_document_buckets(((4, 3), (2, 9))))


def test_generated_pairs_are_consistent_with_their_labels():
  rows = list(entailment.generate('test'))
  assert rows == list(entailment.generate('test')) != list(entailment.generate('test', seed=1))
  assert {label: sum(row['label'] == label for row in rows) for label in entailment.LABELS} == {
    'entailment': 334,
    'neutral': 333,
    'contradiction': 333,
  }
  groups = [*entailment.AGENTS.items(), *entailment.OBJECTS.items()]
  wider = {noun: wide for wide, nouns in groups for noun in nouns}
  for row in rows:
    premise, hypothesis = (set(row[name].split()) for name in ('premise', 'hypothesis'))
    if row['label'] == 'entailment':
      assert hypothesis - premise <= {'some', *(wider[word] for word in premise if word in wider)}
    assert row['premise'] != row['hypothesis']
    assert not premise & entailment.UNSEEN_NOUNS
  assert any(entailment.UNSEEN_NOUNS & set(row['premise'].split()) for row in entailment.generate('unseen'))


def test_parse_documents_uses_the_options_of_the_task():
  config = {'task': "jsonl(train='a.jsonl', html=True)", 'folder': ''}
  texts = parse_documents(['It<br />was. We left.'], 'stdin', config, pairs=False, label='x', first=7)
  assert texts.sentences == [['it was .', 'we left .']] and texts.labels == ['x'] and texts.location(0) == 'stdin:7'
  pairs = parse_documents(['A dog. Runs.\tIt moves.'], 'stdin', {'task': 'entailment'}, pairs=True, label='x')
  assert pairs.pairs and pairs.sentences == [['a dog . runs .', 'it moves .']]
  for line in ('one', 'one\ttwo\tthree'):
    with pytest.raises(
      UserError, match=f'stdin:2: expected two texts with a tab between them, got {len(line.split())}'
    ):
      parse_documents(['a\tb', line], 'stdin', {'task': 'entailment'}, pairs=True, label='x')
