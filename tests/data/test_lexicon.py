"""IBM model 1 against a literal loop and a corpus that is solved by hand, and the selection of shortlists."""

import collections
import itertools
from fractions import Fraction

import numpy as np
import pytest

from attention_jax.data import lexicon as lexicon_module
from attention_jax.data.encoding import EncodedCorpus, encode
from attention_jax.data.lexicon import (
  Lexicon,
  cooccurring_positions,
  ibm_model_1,
  load_lexicon,
  make_lexicon,
  save_lexicon,
)
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import word
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, UNK


def corpus_of(pairs) -> EncodedCorpus:
  """Returns a split of pairs of id lists."""
  sides = []
  for rows in zip(*pairs, strict=True):
    sides += [np.array(list(itertools.chain(*rows)), np.int32), np.cumsum([0, *map(len, rows)])]
  return EncodedCorpus(*sides)


def estimate(pairs, iterations):
  """Returns {(source, target): t(target | source)} of the vectorised model."""
  corpus = corpus_of(pairs)
  source, target = cooccurring_positions(corpus, np.arange(corpus.rows))
  return {
    (e, f): prob
    for e, f, prob in zip(
      *(x.tolist() for x in ibm_model_1(corpus.source[source], corpus.target[target], target, iterations)), strict=True
    )
  }


def reference(pairs, iterations, one=1.0):
  """IBM model 1 in loops over sentences and tokens, with numbers of the type of `one`; Brown et al. 1993."""
  t = collections.defaultdict(lambda: one)
  for _ in range(iterations):
    counts = collections.defaultdict(lambda: 0 * one)
    totals = collections.defaultdict(lambda: 0 * one)
    for source, target in pairs:
      for f in target:
        normalizer = sum(t[e, f] for e in source)
        for e in source:
          counts[e, f] += t[e, f] / normalizer
          totals[e] += t[e, f] / normalizer
    t = {(e, f): count / totals[e] for (e, f), count in counts.items()}
  return t


@pytest.mark.parametrize('iterations', [1, 2, 7])
def test_model_1_equals_a_literal_loop(iterations):
  random = np.random.default_rng(3)
  pairs = [
    (random.integers(4, 9, random.integers(1, 6)), random.integers(4, 11, random.integers(1, 7))) for _ in 'abcde'
  ]
  pairs = [(source.tolist(), target.tolist()) for source, target in pairs]
  expected = reference(pairs, iterations)
  actual = estimate(pairs, iterations)
  assert actual.keys() == expected.keys()
  np.testing.assert_allclose([actual[pair] for pair in expected], list(expected.values()), rtol=1e-12)


def test_model_1_has_the_probabilities_of_a_corpus_solved_by_hand():
  """Das Haus, das Buch, ein Buch: the example of Koehn 2010, figure 4.4, after two iterations."""
  das, haus, buch, ein, the, house, book, a = range(4, 12)
  pairs = [([das, haus], [the, house]), ([das, buch], [the, book]), ([ein, buch], [a, book])]
  expected = {
    (das, the): Fraction(7, 11),
    (das, house): Fraction(2, 11),
    (das, book): Fraction(2, 11),
    (haus, the): Fraction(3, 7),
    (haus, house): Fraction(4, 7),
    (buch, the): Fraction(2, 11),
    (buch, book): Fraction(7, 11),
    (buch, a): Fraction(2, 11),
    (ein, a): Fraction(4, 7),
    (ein, book): Fraction(3, 7),
  }
  assert reference(pairs, 2, Fraction(1)) == expected
  assert estimate(pairs, 2) == pytest.approx({pair: float(prob) for pair, prob in expected.items()})


@pytest.fixture
def lexicon():
  """Target tokens from 16 down to 4 are ever less frequent; source token i is translated by i to i + 2."""
  offsets = np.array([0, 0, 0, 0, 1, 4, 7, 10])  # UNK (3) has one translation, tokens 4 to 6 three each
  targets = np.array([9, 4, 5, 6, 5, 6, 7, 6, 7, 8], np.int32)
  by_frequency = np.array([0, 1, 2, 3, *range(16, 3, -1)], np.int32)
  return Lexicon(offsets, targets, np.ones(10, np.float32), by_frequency, 'abc')


@pytest.mark.parametrize(
  ('source', 'count', 'required', 'multiple', 'expected'),
  [
    ([[4, 0]], 1, None, 1, [0, 1, 2, 3, 4, 16]),
    ([[4, 6]], 2, None, 1, [0, 1, 2, 3, 4, 5, 6, 7, 15, 16]),
    ([[4, 6]], 2, None, 6, [0, 1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 16]),  # filled with the next most frequent
    ([[99, 7]], 1, None, 1, [0, 1, 2, 3, 9, 16]),  # out-of-vocabulary ids have the translations of UNK
    ([[4]], 1, [[8, 0], [99, 0]], 1, [0, 1, 2, 3, 4, 8, 16]),
    ([[4]], 1, None, 512, list(range(17))),  # never more than the vocabulary
    ([[4]], 99, None, 1, list(range(17))),
  ],
)
def test_shortlists_have_translations_and_frequent_and_required_tokens(
  lexicon, monkeypatch, source, count, required, multiple, expected
):
  monkeypatch.setattr(lexicon_module, 'SHORTLIST_MULTIPLE', multiple)
  ids = lexicon.shortlist(np.array(source), count, required and np.array(required))
  assert ids.tolist() == expected and ids.dtype == np.int32


def test_a_lexicon_sorts_translations_by_probability_and_is_stored_exactly(tmp_path):
  corpus = Corpus(['a b', 'a c', 'b', 'Ulm c'], ['x y', 'x z', 'y', 'z z'])
  vocabularies = word(['a b c']), word(['x y z'])
  encoded = encode(corpus, *vocabularies)
  sizes = [len(vocabulary) for vocabulary in vocabularies]
  made = make_lexicon(encoded, *sizes, 'abc')
  source_ids, target_ids = (
    {token: vocabulary.encode(token)[0] for token in tokens}
    for vocabulary, tokens in zip(vocabularies, ('abc', 'xyz'), strict=True)
  )
  for source, target in zip('abc', 'xyz', strict=True):
    start, stop = made.offsets[source_ids[source] :][:2]
    assert made.targets[start] == target_ids[target]
    assert np.all(np.diff(made.probs[start:stop]) <= 0)
    np.testing.assert_allclose(made.probs[start:stop].sum(), 1, rtol=1e-6)
  start, stop = made.offsets[UNK : UNK + 2]
  assert set(made.targets[start:stop].tolist()) == {EOS, target_ids['z']}  # Ulm
  assert made.by_frequency.tolist() == [0, 1, 2, 3, target_ids['z'], target_ids['x'], target_ids['y']]
  again = make_lexicon(encoded, *sizes, 'abc')
  save_lexicon(tmp_path / 'lexicon.npz', made)
  for copy in (again, load_lexicon(tmp_path / 'lexicon.npz')):
    for field, value in made._asdict().items():
      np.testing.assert_array_equal(getattr(copy, field), value)
  assert [path.name for path in tmp_path.iterdir()] == ['lexicon.npz']


def test_large_splits_use_rows_at_equal_distances(monkeypatch):
  monkeypatch.setattr(lexicon_module, 'MAX_COOCCURRENCES', 5)
  pairs = [([token], [token]) for token in range(4, 14)]
  made = make_lexicon(corpus_of(pairs), 14, 14)
  assert made.targets.tolist() == [4, 6, 8, 10, 12]
  # The same order as that of a split on disk, of which only these rows are read.
  assert made.by_frequency.tolist() == [*range(4), *range(4, 14, 2), *range(5, 14, 2)]


def test_files_that_are_no_lexicon_are_reported(tmp_path):
  path = tmp_path / 'lexicon.npz'
  assert load_lexicon(path) is None
  for data in (b'', b'PK'):
    path.write_bytes(data)
    with pytest.raises(UserError, match=r'lexicon\.npz: cannot be read as a lexicon \(.*\); delete the file to make'):
      load_lexicon(path)
  np.savez(path, offsets=np.zeros(1))
  with pytest.raises(UserError, match='cannot be read as a lexicon'):
    load_lexicon(path)
  data = bytearray(path.read_bytes())
  data[data.index(b'PK\x01\x02') + 8] = 1  # in the directory of the zip file: the first array is encrypted
  path.write_bytes(data)
  with pytest.raises(UserError, match='cannot be read as a lexicon'):
    load_lexicon(path)
