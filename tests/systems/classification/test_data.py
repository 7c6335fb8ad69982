"""Documents: sentences, labels and splits of JSON lines and tfds sets, lines as documents, and errors."""

import dataclasses
import json
import re
import types

import pytest

from attention_jax.data.tfds_sets import tfds_split_parts
from attention_jax.errors import UserError
from attention_jax.systems.classification.config import ClassificationDataConfig
from attention_jax.systems.classification.data import load_documents, parse_documents
from tests.data.helpers import write_tfds_set

ROWS = [
  {'text': 'It is good. Very good!', 'label': 1},
  {'text': 'Not so<br />good &amp; long.', 'label': 0},
]


def write_jsonl(folder, rows, name='train.jsonl'):
  (folder / name).write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows), 'utf-8')
  return ClassificationDataConfig(f"jsonl(train='{name}', html=True)", str(folder))


def load_tfds(folder, name, options=''):
  return load_documents(ClassificationDataConfig(f"tfds(name='tiny/{name}'{options})", str(folder)))


@pytest.mark.long
def test_texts_are_split_into_sentences_of_tokens(tmp_path):
  train = load_documents(write_jsonl(tmp_path, ROWS))['train']
  assert train.sentences == [['it is good .', 'very good !'], ['not so good & long .']]
  assert train.labels == ['1', '0'] and train.location(1).endswith('train.jsonl:2')


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
  ('validation', 'sizes'),
  [
    (None, {'train': 20, 'test': 2}),
    ('train[90%:]', {'train': 18, 'validation': 2, 'test': 2}),
    ('train[:5]', {'train': 15, 'validation': 5, 'test': 2}),
    ('train[10:12]', {'train': 18, 'validation': 2, 'test': 2}),
    ('test', {'train': 20, 'validation': 2, 'test': 2}),
  ],
)
def test_validation_of_a_tfds_set_is_a_part_of_train_or_another_split(prepared, validation, sizes):
  splits = load_tfds(prepared, 'all', f", validation='{validation}'" if validation else '')
  assert {split: len(documents.labels) for split, documents in splits.items()} == sizes
  assert set(splits['train'].labels) == {'bad', 'good'}
  if validation and validation != 'test':
    assert not {str(s) for s in splits['train'].sentences} & {str(s) for s in splits['validation'].sentences}


def test_tfds_rows_without_a_label_or_with_a_number_as_text_raise(tmp_path):
  """tfds stores a missing label as class -1; a test split without labels is left out."""

  def features(tfds):
    text = tfds.features.Text()
    return tfds.features.FeaturesDict(
      {'text': text, 'label': tfds.features.ClassLabel(names=['bad', 'good']), 'class_name': text}
    )

  def write(name, labels):
    rows = {
      split: [{'text': 'a', 'label': i, 'class_name': f'c{n}'} for n, i in enumerate(values)]
      for split, values in labels.items()
    }
    write_tfds_set(tmp_path, features, rows, name)

  write('unlabelled', {'train': [0, 1], 'validation': [1, -1], 'test': [-1, -1]})
  with pytest.raises(UserError, match=r'^tiny/unlabelled validation:\d: label is missing \(class -1\)$'):
    load_tfds(tmp_path, 'unlabelled')
  with pytest.raises(UserError, match=r'^tiny/unlabelled train:0: label must be a text in UTF-8, got [01]$'):
    load_tfds(tmp_path, 'unlabelled', ", text='label'")
  assert set(load_tfds(tmp_path, 'unlabelled', ", label='class_name'")['test'].labels) == {'c0', 'c1'}
  write('no_test', {'train': [0, 1], 'test': [-1]})
  assert set(load_tfds(tmp_path, 'no_test')) == {'train'}


# Parts of tfds splits that cannot be read, have no examples, or leave none for training.
UNUSABLE_PARTS = ['train', 'train[0:]', 'train[99%:]', 'train[5:5]', 'train[-5000:]', 'train[5]', 'test[x]', 'test[9:]']


def test_a_split_whose_name_begins_with_train_is_not_a_part_of_the_training_split():
  splits = dict.fromkeys(['train', 'train_hard', 'train_hard[:50%]'], types.SimpleNamespace(num_examples=2))
  builder = types.SimpleNamespace(info=types.SimpleNamespace(splits=splits))
  parts = tfds_split_parts(builder, 'tiny/all', 'train_hard[:50%]')
  assert parts == {'train': 'train', 'validation': 'train_hard[:50%]'}


@pytest.mark.parametrize(
  ('validation', 'message'),
  [
    (
      'train[:]',
      r"^tfds set 'tiny/all': validation must have examples, and be a split other than 'train' or one part of 'train' "
      r"that leaves training examples, such as 'train\[90%:\]'; got 'train\[:\]'; split 'train' has 20 examples$",
    ),
    *((part, f"must have examples, .*; got '{re.escape(part)}'; split 'train' has 20") for part in UNUSABLE_PARTS),
    ('trian[90%:]', r"split of tfds set 'tiny/all': 'trian' \(did you mean 'train'\?\); expected one of: test, train"),
  ],
)
def test_invalid_parts_of_a_tfds_set_are_reported(prepared, validation, message):
  with pytest.raises(UserError, match=message):
    load_tfds(prepared, 'all', f", validation='{validation}'")


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    ('{', 'invalid JSON'),
    (' \n{"text": "a", "label": 1}', 'expected a JSON object, got a blank line'),
    ('[' * 100_000, 'invalid JSON'),
    ('[1]', "expected a JSON object, got '[1]'"),
    ({'label': 1}, "no field 'text'; it has: label"),
    ({}, "no field 'text'; it has: none"),
    ({'text': ' <p> ', 'label': 1}, 'the text is empty'),
    ({'text': 3, 'label': 1}, 'text must be a string, got 3'),
    ({'text': 'a', 'label': True}, 'label must be a non-empty string or a whole number, got True'),
    ({'text': 'a', 'label': None}, 'label must be a non-empty string or a whole number, got None'),
    ({'text': 'a \ud800', 'label': 1}, 'text contains an unpaired surrogate'),
    ({'text': 'a', 'label': '\ud800'}, 'label contains an unpaired surrogate'),
  ],
)
def test_invalid_rows_are_reported(tmp_path, row, message):
  with pytest.raises(UserError, match=re.escape(f'train.jsonl:3: {message}')):
    load_documents(write_jsonl(tmp_path, [*ROWS, row]))


def test_labels_and_languages_that_are_unknown_are_reported(tmp_path):
  write_jsonl(tmp_path, [*ROWS, {'text': 'a', 'label': 2}], 'dev.jsonl')
  write_jsonl(tmp_path, ROWS)
  config = ClassificationDataConfig("jsonl(train='train.jsonl', validation='dev.jsonl')", str(tmp_path))
  with pytest.raises(UserError, match=r"dev\.jsonl:3: unknown label '2'; expected one of the training labels: 0, 1"):
    load_documents(config)
  with pytest.raises(UserError, match="unknown language 'xx_no' of spaCy"):
    load_documents(dataclasses.replace(config, task="jsonl(train='train.jsonl', language='xx_no')"))
  with pytest.raises(UserError, match="expected at least two labels, but every label is '1'"):
    load_documents(write_jsonl(tmp_path, ROWS[:1]))


def test_parse_documents_uses_the_options_of_the_task():
  config = ClassificationDataConfig("jsonl(train='a.jsonl', html=True)", '')
  texts = parse_documents(['It<br />was. We left.'], 'stdin', config, label='x', first=7)
  assert texts.sentences == [['it was .', 'we left .']] and texts.labels == ['x'] and texts.location(0) == 'stdin:7'
  config = ClassificationDataConfig('entailment')
  pairs = parse_documents(['A dog. Runs.\tIt moves.'], 'stdin', config, label='x')
  assert pairs.pairs and pairs.sentences == [['a dog . runs .', 'it moves .']]
  for line, number in (('one', 1), ('one\ttwo\tthree', 3)):
    with pytest.raises(UserError, match=f'stdin:2: expected two texts with a tab between them, got {number}'):
      parse_documents(['a\tb', line], 'stdin', config, label='x')


def test_lines_of_a_task_of_pairs_equal_the_rows_of_its_files(tmp_path):
  """The task determines whether a line has two texts, each of which is one sentence: here one with two fields."""
  write_jsonl(tmp_path, [{'a': 'One. Two.', 'b': 'Three', 'gold': label} for label in 'xy'])
  config = ClassificationDataConfig("jsonl(train='train.jsonl', text=('a', 'b'), label='gold')", str(tmp_path))
  documents = parse_documents(['One. Two.\tThree'], 'stdin', config, label='x')
  assert documents.pairs and documents.sentences == [['one . two .', 'three']]
  assert load_documents(config)['train'].sentences == documents.sentences * 2
