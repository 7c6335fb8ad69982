"""Lines that are cut anew: the same text, a function of (seed, epoch, row), never larger than their bucket."""

import concurrent.futures

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.data.batching import Batches
from attention_jax.data.encoding import assign_buckets, encode
from attention_jax.data.resegment import make_resegmenter
from attention_jax.data.text import Corpus
from attention_jax.errors import UserError
from attention_jax.tokens import EOS

SPEC, BUCKETS = 'subword(size=40, dropout=0.3)', ((12, 12), (20, 22))
SPECS = (SPEC, 'unigram(size=19, sampling=0.02)')
WORDS = ['station', 'nation', 'international', 'relation', 'ration']


def make(spec=SPEC, rows=40):
  random = np.random.default_rng(0)
  lines = [[' '.join(random.choice(WORDS, random.integers(1, 4))) for _ in range(rows)] for _ in range(2)]
  corpus = Corpus(*lines, name='words')
  vocabulary = vocab.train(spec, lines[0] + lines[1])
  return corpus, vocabulary, encode(corpus, vocabulary, vocabulary)


@pytest.fixture(scope='module', params=SPECS)
def made(request):
  return make(request.param)


def batches(made, seed=0, **given):
  corpus, vocabulary, encoded = made
  anew = make_resegmenter(encoded, corpus, vocabulary, vocabulary, seed)
  return Batches(encoded, BUCKETS, 4, seed=seed, resegment=anew, **given)


def rows_of(run, epoch):
  """row -> (source, target) ids of an epoch."""
  found = {}
  for step in range(epoch * len(run), (epoch + 1) * len(run)):
    batch = run[step]
    for i in np.flatnonzero(batch.index >= 0):
      ids = (batch.source[i][batch.source_mask[i]], batch.target[i][batch.target_mask[i]])
      found[int(batch.index[i])] = tuple(tuple(map(int, side)) for side in ids)
    assert not batch.source_mask[batch.index < 0].any()
  return found


def test_it_is_the_same_text_in_other_pieces(made):
  corpus, vocabulary, encoded = made
  run = batches(made)
  epochs = [rows_of(run, epoch) for epoch in range(3)]
  chosen = assign_buckets(encoded, BUCKETS)
  whole = {row: [encode_row(encoded, row, side) for side in range(2)] for row in range(encoded.rows)}
  changed = 0
  for epoch in epochs:
    assert sorted(epoch) == np.flatnonzero(chosen >= 0).tolist()
    for row, pair in epoch.items():
      for ids, lines, size in zip(pair, (corpus.source, corpus.target), BUCKETS[chosen[row]], strict=True):
        assert vocabulary.decode(ids) == lines[row] and ids[-1] == EOS and len(ids) <= size
      changed += list(pair[0]) != whole[row][0]
  assert changed > 10
  assert all(any(a[row] != b[row] for row in a) for a, b in ((epochs[0], epochs[1]), (epochs[1], epochs[2])))
  assert any(list(map(list, pair)) == whole[row] for row, pair in epochs[0].items())  # one that would not have fitted


def encode_row(encoded, row, side):
  flat, offsets = encoded[2 * side], encoded[2 * side + 1]
  return flat[offsets[row] : offsets[row + 1]].tolist()


def test_it_is_a_function_of_seed_and_step_whichever_thread_asks(made):
  run, again = batches(made), batches(made)
  steps = list(range(3 * len(run)))
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    threaded = list(pool.map(run.__getitem__, reversed(steps)))[::-1]
  for step in steps:
    for mine, theirs in zip(again[step], threaded[step], strict=True):
      np.testing.assert_array_equal(mine, theirs)
  other, same = rows_of(batches(made, seed=1), 0), rows_of(run, 0)
  assert any(other[row] != same[row] for row in same)


def test_shards_are_cut_as_the_whole_is(made):
  whole, parts = batches(made)[1], [batches(made, shard=i, shards=2)[1] for i in range(2)]
  for i, part in enumerate(parts):
    np.testing.assert_array_equal(part.source, whole.source[i::2])


@pytest.mark.parametrize('spec', SPECS)
def test_nothing_else_is_sampled_and_a_stored_vocabulary_knows_how(spec, tmp_path):
  corpus, vocabulary, encoded = make(spec)
  without = spec[: spec.index(',')] + ')'
  plain = make(without)
  np.testing.assert_array_equal(encoded.source, plain[2].source)
  assert make_resegmenter(plain[2], corpus, plain[1], plain[1], 0) is None
  vocabulary.save(str(tmp_path), 'source')
  stored = vocab.load_stored(spec, str(tmp_path), 'source')
  for seed in (3, 2**32 - 1, 2**32 + 5):
    assert stored.sample(corpus.source[0], seed) == vocabulary.sample(corpus.source[0], seed)
  assert stored.encode(corpus.source[0]) == vocabulary.encode(corpus.source[0])
  assert vocab.load_stored(without, str(tmp_path), 'source').sample is None


def test_what_does_not_go(made):
  outside, no_number = 'vocabulary option dropout is a number from 0 to below 1, got', 'dropout is of type float, got'
  for value, said in (('1', outside), ('-0.1', outside), ('True', no_number), ("'x'", no_number)):
    with pytest.raises(UserError, match=said):
      vocab.train(f'subword(size=40, dropout={value})', ['a b'])
  for value in ('-0.1', '1e999'):
    with pytest.raises(UserError, match='vocabulary option sampling is a number of 0 or more, got'):
      vocab.train(f'unigram(size=19, sampling={value})', ['a b'])
  corpus, vocabulary, _ = made
  linked = corpus._replace(links=[((0, 0),)] * len(corpus.source))
  with pytest.raises(UserError, match=r'links are asked for, but they are between tokens, .*: dropout=0'):
    batches((linked, vocabulary, encode(linked, vocabulary, vocabulary)), links=True)


def test_a_process_whose_rows_are_all_filler_has_empty_ones():
  made, alone = make(rows=9), []
  for shard in range(4):
    run = batches(made, shard=shard, shards=4)
    for step in range(2 * len(run)):
      batch = run[step]
      assert (batch.source_mask.any(1) == (batch.index >= 0)).all()
      alone += [batch.index] if (batch.index < 0).all() else []
  assert alone
