"""Documents: what readers say of wrong files, sentences, ids and batches, and pairs whose label is known."""

import gzip
import json

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


def write(folder, rows, name='train.jsonl'):
  (folder / name).write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows), 'utf-8')
  return {'task': f"jsonl(train='{name}', html=True)", 'folder': str(folder)}


def test_texts_are_sentences_of_tokens(tmp_path):
  found = load_documents(write(tmp_path, ROWS))['train']
  assert found.sentences == [['it is good .', 'very good !'], ['not so good & long .']]
  assert found.labels == ['1', '0'] and found.location(1).endswith('train.jsonl:2')


def test_pairs_are_one_sentence_each(tmp_path):
  row = {'a': 'One. Two.', 'b': 'Three', 'gold': 'yes'}
  write(tmp_path, [row, row | {'gold': 'no'}])
  config = {'task': "jsonl(train='train.jsonl', text=('a', 'b'), label='gold')", 'folder': str(tmp_path)}
  assert load_documents(config)['train'][:1] == ([['one . two .', 'three']] * 2,)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """A folder with a set of documents."""
  features = lambda tfds: tfds.features.FeaturesDict(
    {'text': tfds.features.Text(), 'label': tfds.features.ClassLabel(names=['bad', 'good'])}
  )
  rows = lambda split, size: [{'text': f'{split} {i}', 'label': i % 2} for i in range(size)]
  splits = {'train': rows('train', 20), 'test': rows('test', 2)}
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
def test_tfds(prepared, options, sizes):
  found = load_documents({'task': f"tfds(name='tiny/all'{options})", 'folder': str(prepared)})
  assert {split: len(documents.labels) for split, documents in found.items()} == sizes
  assert set(found['train'].labels) == {'bad', 'good'}
  if "validation='train" in options:
    assert not {str(s) for s in found['train'].sentences} & {str(s) for s in found['validation'].sentences}


@pytest.mark.parametrize(
  ('validation', 'said'),
  [
    ('train[:]', r"validation='train\[:\]' leaves nothing to train on; possible: 'train\[90%:\]', or a split"),
    ('train', "validation='train' leaves nothing to train on"),
    ('trian[90%:]', r"split of tfds set 'tiny/all': 'trian' \(did you mean 'train'\?\); possible: test, train"),
  ],
)
def test_wrong_parts_of_a_tfds_set(prepared, validation, said):
  with pytest.raises(UserError, match=said):
    load_documents({'task': f"tfds(name='tiny/all', validation='{validation}')", 'folder': str(prepared)})


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ('train=5', "task 'jsonl': option train is of type str, got 5"),
    ("train='a', html=1", 'option html is of type bool, got 1'),
    ("train='a', text=('a', 'b', 'c')", r'option text is of type str \| tuple\[str, str\], got'),
  ],
)
def test_options_of_a_wrong_type(options, said):
  with pytest.raises(UserError, match=said):
    load_documents({'task': f'jsonl({options})', 'folder': ''})


@pytest.mark.parametrize(
  ('rows', 'said'),
  [
    ([*ROWS, '{'], 'train.jsonl:3: no JSON'),
    ([*ROWS, ' ', *ROWS], 'train.jsonl:3: a blank line; a JSON object is expected in each'),
    ([*ROWS, '[' * 100_000], 'train.jsonl:3: no JSON'),
    ([*ROWS, '[1]'], 'train.jsonl:3: a JSON object is expected'),
    ([*ROWS, {'label': 1}], "train.jsonl:3: no field 'text'; it has: label"),
    ([*ROWS, {'text': ' <p> ', 'label': 1}], 'train.jsonl:3: the text is empty'),
    ([*ROWS, {'text': 3, 'label': 1}], 'train.jsonl:3: text is no text but 3'),
    ([*ROWS, {'text': 'a', 'label': True}], 'train.jsonl:3: label is True; possible: a text or a whole number'),
    ([*ROWS, {'text': 'a', 'label': None}], 'train.jsonl:3: label is None; possible: a text or a whole number'),
    (ROWS[:1], "every label is '1'"),
  ],
)
def test_wrong_rows_are_named(tmp_path, rows, said):
  with pytest.raises(UserError, match=said.replace('[', r'\[').replace('?', r'\?')):
    load_documents(write(tmp_path, rows))


def test_labels_that_training_has_not_are_named(tmp_path):
  write(tmp_path, [*ROWS, {'text': 'a', 'label': 2}], 'dev.jsonl')
  config = write(tmp_path, ROWS)
  config['task'] = "jsonl(train='train.jsonl', validation='dev.jsonl')"
  with pytest.raises(UserError, match=r"dev\.jsonl:3: label '2' is unknown; in training: 0, 1"):
    load_documents(config)
  with pytest.raises(UserError, match="spaCy has no language 'xx_no'"):
    load_documents(config | {'task': "jsonl(train='train.jsonl', language='xx_no')"})


def test_what_was_split_is_remembered(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'LARGE', 10)
  texts = ['One. Two.', 'Three, four?']
  wanted = [['one .', 'two .'], ['three , four ?']]
  assert sentences.split(texts) == wanted
  (path,) = (tmp_path / 'attention_jax' / 'sentences').iterdir()
  monkeypatch.setattr(sentences, '_split', None)
  assert sentences.split(texts) == wanted
  monkeypatch.undo()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'LARGE', 10)
  path.write_bytes(gzip.compress(b'[')[:9])  # cut short: made again
  assert sentences.split(texts) == wanted and sentences.split(texts, whole=True)[0] == ['one . two .']


TEXTS = Documents(
  [['a b c d e', 'f'], ['a b'], ['c', 'd e', 'f a', 'b', 'c'], ['a b c', 'd']], ['x', 'y', 'x', 'x'], 'here', range(4)
)


def encoded(most, joined=False):
  words = vocab.train('word', (line for lines in TEXTS.sentences for line in lines))
  return words, encode_documents(TEXTS, words, ['x', 'y'], most, joined)


def test_long_sentences_are_cut_and_the_rest_is_left_out():
  words, found = encoded((3, 2))
  rows = next(iter(eval_document_batches(found, ((3, 2),), 4)))
  read = [[' '.join(words.id_to_token(i) for i in line if i != PAD) for line in row] for row in rows.source]
  by_row = dict(zip(rows.index.tolist(), read, strict=True))
  assert by_row == {0: ['a b', 'c d', 'e'], 1: ['a b', '', ''], 2: ['c', 'd e', 'f a'], 3: ['a b', 'c', 'd']}
  assert rows.label.tolist() == [{0: 0, 1: 1, 2: 0, 3: 0}[i] for i in rows.index]
  assert describe_documents('train', found, ['x', 'y']).endswith(
    '4 documents (3 x, 1 y); unknown words: 0.00 %; 15.8 % of the words are behind the largest bucket'
  )
  characters = vocab.train('char', ['a b c d e'])
  found = encode_documents(Documents([['a b c d e']], ['x'], 'here', [1]), characters, ['x'], (1, 3), True)
  assert describe_documents('train', found, ['x']).endswith('66.7 % of the words are behind the largest bucket')
  words, found = encoded((1, 4), joined=True)
  (rows,) = eval_document_batches(found, ((1, 4),), 4)
  assert sorted(rows.source_mask.sum((1, 2)).tolist()) == [2, 4, 4, 4]


def test_a_long_text_of_a_pair_leaves_the_other_its_place():
  pair = Documents([['a b c d e f g', 'x y z']], ['x'], 'here', [1], pairs=True)
  words = vocab.train('word', pair.sentences[0])
  found = encode_documents(pair, words, ['x'], (2, 4), joined=False)
  (rows,) = eval_document_batches(found, ((2, 4),), 1)
  assert rows.source[0].tolist() == [words.encode('a b c d'), [*words.encode('x y z'), PAD]]


def test_batches_are_a_function_of_seed_and_step():
  _, found = encoded((5, 5))
  buckets = check_document_buckets([[5, 5], (2, 5)])
  one, two = (DocumentBatches(found, buckets, 2, seed) for seed in (0, 1))
  assert len(one) == 3 and one.shapes == [(2, 2, 5), (2, 5, 5)]
  epoch = [one[step] for step in range(len(one))]
  assert sorted(i for batch in epoch for i in batch.index if i >= 0) == [0, 1, 2, 3]
  for step in (5, 2, 9):
    assert all(np.array_equal(x, y) for x, y in zip(one[step], one[step], strict=True))
    assert one[step].source.shape == two[step].source.shape
  filler = next(batch for batch in epoch if -1 in batch.index)
  assert not filler.source_mask[filler.index == -1].any() and not filler.source[filler.index == -1].any()


@pytest.mark.parametrize('buckets', [(), ((1,),), ((0, 3),), 'ab', 5])
def test_wrong_buckets_are_refused(buckets):
  with pytest.raises(UserError, match=r'different \(sentences, words\)'):
    check_document_buckets(buckets)


def test_one_bucket_holds_everything():
  with pytest.raises(UserError, match=r'must hold all that is read: \(4, 9\)'):
    largest_bucket(check_document_buckets(((4, 3), (2, 9))))


def test_pairs_have_the_labels_that_their_words_say():
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


def test_what_is_given_is_read_as_the_task_is():
  config = {'task': "jsonl(train='a.jsonl', html=True)", 'folder': ''}
  found = parse_documents(['It<br />was. We left.'], 'stdin', config, pairs=False, label='x', first=7)
  assert found.sentences == [['it was .', 'we left .']] and found.labels == ['x'] and found.location(0) == 'stdin:7'
  pairs = parse_documents(['A dog. Runs.\tIt moves.'], 'stdin', {'task': 'entailment'}, pairs=True, label='x')
  assert pairs.pairs and pairs.sentences == [['a dog . runs .', 'it moves .']]
  for line in ('one', 'one\ttwo\tthree'):
    with pytest.raises(UserError, match=f'stdin:2: {len(line.split())} texts; possible: two, with a tab between'):
      parse_documents(['a\tb', line], 'stdin', {'task': 'entailment'}, pairs=True, label='x')
