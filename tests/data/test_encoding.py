"""Encoded pairs: EOS on both sides, the number of tokens that cannot be copied, and the report of a split."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.batching import gather
from attention_jax.data.encoding import MAX_BUCKET_LENGTH, assign_buckets, choose_buckets, describe_corpus, encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import train, word
from attention_jax.tokens import EOS


@given(st.lists(st.tuples(st.text('ab ', min_size=1), st.text('xyz', min_size=1)), min_size=1))
def test_encoding_appends_eos_on_both_sides(pairs):
  corpus = Corpus([s for s, _ in pairs], [t for _, t in pairs])
  vocabularies = train('char', corpus.source), train('char', corpus.target)
  encoded = encode(corpus, *vocabularies)
  batch = gather(encoded, np.arange(encoded.rows), tuple(max(lengths) for lengths in encoded.lengths))
  for i, (source, target) in enumerate(pairs):
    assert batch.source[i][batch.source_mask[i]].tolist() == [*vocabularies[0].encode(source), EOS]
    assert batch.target[i][batch.target_mask[i]].tolist() == [*vocabularies[1].encode(target), EOS]


def test_num_uncopyable_tokens_counts_target_tokens_absent_from_the_source():
  vocab = word(['a b c d'])
  corpus = Corpus(['a b', 'c Ulm', 'd'], ['b a d', 'Ulm c', 'Bonn'])
  assert encode(corpus, vocab, vocab).num_uncopyable_tokens == 2  # d and Bonn; EOS is in every source


def test_buckets_are_chosen_from_the_lengths_of_the_pairs():
  lengths = range(1, 101)
  corpus = Corpus(['a ' * n for n in lengths], ['b ' * (n // 10 + 1) for n in lengths])
  encoded = encode(corpus, word(['a']), word(['b']))
  assert choose_buckets(encoded) == ((64, 8), (92, 12), (104, 12))
  assert np.all(assign_buckets(encoded, choose_buckets(encoded)) >= 0)
  longer = Corpus([*corpus.source[:3], 'a ' * 500], [*corpus.target[:3], 'b'])
  assert choose_buckets(encode(longer, word(['a']), word(['b']))) == ((4, 4), (MAX_BUCKET_LENGTH, 4))


def test_describe_corpus_reports_the_lines_of_pairs_that_fit_no_bucket():
  corpus = Corpus(['a', 'a a a', 'b', 'b'], ['x', 'x', 'x', 'x x x'], name='f.tsv', lines=[1, 4, 5, 9])
  vocabularies = train('word', ['a']), train('word', ['x'])
  assert describe_corpus('train', corpus, encode(corpus, *vocabularies), [(2, 2)], (5, 5)) == [
    'train: 4 pairs (f.tsv); buckets 2x2: 2',
    'train: unknown 20.00% of source tokens',
    'train: 2 of 4 pairs fit no bucket and are left out of training, loss and alignments (lines 4, 9 of f.tsv); '
    'the longest source and target have 4 and 4 tokens with EOS',
  ]
