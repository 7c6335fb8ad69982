"""Resegmented lines: the same text, a function of (seed, epoch, row), never longer than their bucket."""

import concurrent.futures

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.data.batching import Batches, Share
from attention_jax.data.encoding import assign_buckets, encode
from attention_jax.data.resegment import make_resegmenter
from attention_jax.data.text import Corpus
from attention_jax.errors import UserError
from attention_jax.tokens import EOS

SPEC = 'subword(size=40, dropout=0.3)'
BUCKETS = ((12, 12), (20, 22))
SPECS = (SPEC, 'unigram(size=19, sampling=0.02)')
WORDS = ['station', 'nation', 'international', 'relation', 'ration']


def make_data(spec=SPEC, rows=40):
  random = np.random.default_rng(0)
  lines = [[' '.join(random.choice(WORDS, random.integers(1, 4))) for _ in range(rows)] for _ in range(2)]
  corpus = Corpus(*lines, name='words')
  vocabulary = vocab.train(spec, lines[0] + lines[1])
  return corpus, vocabulary, encode(corpus, vocabulary, vocabulary)


@pytest.fixture(scope='module', params=SPECS)
def data(request):
  """A corpus, its vocabulary, and its ids without sampling."""
  return make_data(request.param)


def make_batches(data, seed=0, **options):
  corpus, vocabulary, encoded = data
  resegment = make_resegmenter(encoded, corpus, vocabulary, vocabulary, seed)
  return Batches(encoded, BUCKETS, 4, seed=seed, resegment=resegment, **options)


def rows_of_epoch(batches, epoch):
  """row -> (source, target) ids of an epoch."""
  rows = {}
  for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
    batch = batches[step]
    for i in np.flatnonzero(batch.index >= 0):
      ids = (batch.source[i][batch.source_mask[i]], batch.target[i][batch.target_mask[i]])
      rows[int(batch.index[i])] = tuple(tuple(map(int, side)) for side in ids)
    assert not batch.source_mask[batch.index < 0].any()
  return rows


def test_resegmented_rows_have_the_same_text(data):
  corpus, vocabulary, encoded = data
  batches = make_batches(data)
  epochs = [rows_of_epoch(batches, epoch) for epoch in range(3)]
  bucket_index = assign_buckets(encoded, BUCKETS)
  plain = {row: [ids_of_row(encoded, row, side) for side in range(2)] for row in range(encoded.rows)}
  num_changed = 0
  for epoch in epochs:
    assert sorted(epoch) == np.flatnonzero(bucket_index >= 0).tolist()
    for row, pair in epoch.items():
      for ids, lines, size in zip(pair, (corpus.source, corpus.target), BUCKETS[bucket_index[row]], strict=True):
        assert vocabulary.decode(ids) == lines[row] and ids[-1] == EOS and len(ids) <= size
      num_changed += list(pair[0]) != plain[row][0]
  assert num_changed > 10
  assert all(any(a[row] != b[row] for row in a) for a, b in ((epochs[0], epochs[1]), (epochs[1], epochs[2])))
  # Such as a pair whose sample does not fit.
  assert any(list(map(list, pair)) == plain[row] for row, pair in epochs[0].items())


def ids_of_row(encoded, row, side):
  flat = encoded[2 * side]
  offsets = encoded[2 * side + 1]
  return flat[offsets[row] : offsets[row + 1]].tolist()


def test_batches_are_a_function_of_seed_and_step_on_any_thread(data):
  batches = make_batches(data)
  batches_again = make_batches(data)
  steps = list(range(3 * len(batches)))
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    from_threads = list(pool.map(batches.__getitem__, reversed(steps)))[::-1]
  for step in steps:
    for expected, array in zip(batches_again[step], from_threads[step], strict=True):
      np.testing.assert_array_equal(array, expected)
  rows = rows_of_epoch(batches, 0)
  rows_of_seed_1 = rows_of_epoch(make_batches(data, seed=1), 0)
  assert any(rows_of_seed_1[row] != rows[row] for row in rows)


def test_shares_partition_the_batch(data):
  whole = make_batches(data)[1]
  for i in range(2):
    part = make_batches(data, share=Share(i, 2))[1]
    np.testing.assert_array_equal(part.source, whole.source[2 * i : 2 * i + 2])
    np.testing.assert_array_equal(part.target, whole.target[2 * i : 2 * i + 2])


@pytest.mark.parametrize('spec', SPECS)
def test_encoding_is_not_sampled_and_a_stored_vocabulary_samples_equally(spec, tmp_path):
  corpus, vocabulary, encoded = make_data(spec)
  plain_spec = spec[: spec.index(',')] + ')'
  _, plain_vocabulary, plain_encoded = make_data(plain_spec)
  np.testing.assert_array_equal(encoded.source, plain_encoded.source)
  assert make_resegmenter(plain_encoded, corpus, plain_vocabulary, plain_vocabulary, 0) is None
  vocabulary.save(str(tmp_path), 'source')
  stored = vocab.load_stored(spec, str(tmp_path), 'source')
  for seed in (3, 2**32 - 1, 2**32 + 5):
    assert stored.sample(corpus.source[0], seed) == vocabulary.sample(corpus.source[0], seed)
  assert stored.encode(corpus.source[0]) == vocabulary.encode(corpus.source[0])
  assert vocab.load_stored(plain_spec, str(tmp_path), 'source').sample is None


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('subword(size=40, dropout=1)', 'option dropout must be at least 0 and less than 1, got 1'),
    ('subword(size=40, dropout=-0.1)', 'option dropout must be at least 0 and less than 1, got -0.1'),
    ('subword(size=40, dropout=True)', 'option dropout must be a number, got True'),
    ("subword(size=40, dropout='x')", "option dropout must be a number, got 'x'"),
    ('unigram(size=19, sampling=-0.1)', 'option sampling must be at least 0, got -0.1'),
    ('unigram(size=19, sampling=1e999)', 'option sampling must be finite, got inf'),
  ],
)
def test_invalid_sampling_options_are_reported(spec, message):
  with pytest.raises(UserError, match=message):
    vocab.train(spec, ['a b'])


def test_links_cannot_be_resegmented(data):
  corpus, vocabulary, _ = data
  linked = corpus._replace(links=[((0, 0),)] * len(corpus.source))
  with pytest.raises(
    UserError, match=r'links are required, but they join tokens, .*; expected a vocabulary without sampling'
  ):
    make_batches((linked, vocabulary, encode(linked, vocabulary, vocabulary)), links=True)


def test_a_share_of_filler_rows_is_masked():
  data = make_data(rows=9)
  num_filler_batches = 0
  for index in range(4):
    batches = make_batches(data, share=Share(index, 4))
    for step in range(2 * len(batches)):
      batch = batches[step]
      assert (batch.source_mask.any(1) == (batch.index >= 0)).all()
      num_filler_batches += (batch.index < 0).all()
  assert num_filler_batches
