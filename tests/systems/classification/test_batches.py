"""Documents are cut, encoded and batched as a function of seed and step."""

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.errors import UserError
from attention_jax.systems.classification.batches import (
  DocumentBatches,
  check_document_buckets,
  describe_documents,
  encode_documents,
  eval_document_batches,
  largest_bucket,
)
from attention_jax.systems.classification.data import Documents
from attention_jax.tokens import PAD

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


@pytest.mark.parametrize(('sentences', 'pairs'), [(['▁'], False), (['▁', 'a b'], True), (['a b', '▁'], True)])
def test_a_text_without_tokens_raises(sentences, pairs):
  subwords = vocab.train('subword(size=12)', ['a b c d'] * 9)
  assert encode_documents(Documents([['a', '▁']], ['x'], 'here', [1]), subwords, ['x'], (2, 4), False).rows == 1
  documents = Documents([['a', 'b'], sentences], ['x', 'x'], 'here', [1, 2], pairs)
  with pytest.raises(UserError, match='here:2: a text has no token, got'):
    encode_documents(documents, subwords, ['x'], (2, 4), joined=False)


def test_a_label_that_the_model_does_not_have_raises():
  words = vocab.train('word', ['a b'])
  documents = Documents([['a'], ['b']], ['x', 'z'], 'here', [1, 4])
  with pytest.raises(UserError, match=r"^here:4: unknown label 'z'; expected one of the labels of the model: x, y$"):
    encode_documents(documents, words, ['x', 'y'], (2, 4), joined=False)


def test_batches_are_a_function_of_seed_and_step():
  _, encoded = encode((5, 5))
  buckets = check_document_buckets([[5, 5], (2, 5)])
  first, same, other = (DocumentBatches(encoded, buckets, 2, seed) for seed in (0, 0, 1))
  assert len(first) == 3 and first.shapes == [(2, 2, 5), (2, 5, 5)]
  epoch = [first[step] for step in range(len(first))]
  assert sorted(i for batch in epoch for i in batch.index if i >= 0) == [0, 1, 2, 3]
  for step in (5, 2, 9):
    assert all(np.array_equal(x, y) for x, y in zip(first[step], same[step], strict=True))
    assert first[step].source.shape == other[step].source.shape
  assert any(not np.array_equal(first[step].index, other[step].index) for step in range(9))
  filler = next(batch for batch in epoch if -1 in batch.index)
  assert not filler.source_mask[filler.index == -1].any() and not filler.source[filler.index == -1].any()


@pytest.mark.parametrize('buckets', [(), ((1,),), ((0, 3),), 'ab', 5])
def test_invalid_buckets_are_reported(buckets):
  with pytest.raises(UserError, match=r'must be pairs \(sentences, words\)'):
    check_document_buckets(buckets)


def test_one_bucket_must_have_the_most_sentences_and_the_most_words():
  with pytest.raises(UserError, match=r'must have the most sentences and the most words, \(4, 9\)'):
    largest_bucket(check_document_buckets(((4, 3), (2, 9))))
