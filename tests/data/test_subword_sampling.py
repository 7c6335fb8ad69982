"""Random segmentations: equal to those of sentencepiece without dropout, with the right probabilities, reproducible."""

import collections
import itertools
import math
import random
import subprocess
import sys
import tracemalloc

import pytest

from attention_jax.data import vocab
from attention_jax.data.subword_sampling import bpe_dropout, unigram_sampling

SCORES = {'a': -1.0, 'b': -1.5, 'ab': -1.2, 'ba': -2.0, 'aba': -1.9, '▁': -1.0, '▁a': -1.1}
LINES = ['a station of the nation', 'international relations', 'stations and rations ▁ as they are', 'the  ration']
SPECS = {'subword': 'subword(size=40, dropout=0.3)', 'unigram': 'unigram(size=25, sampling=0.1)'}


def test_without_dropout_merges_equal_those_of_sentencepiece():
  vocabulary = vocab.train('subword(size=60)', LINES)
  scores = {vocabulary.id_to_token(id): vocabulary._processor.get_score(id) for id in range(4, len(vocabulary))}
  segment = bpe_dropout(scores, 0.0)
  rng = random.Random(0)
  for _ in range(200):
    word = '▁' + ''.join(rng.choices('stationred', k=rng.randrange(1, 12)))
    assert segment(word, rng) == vocabulary.tokenize(word[1:])
  assert bpe_dropout(scores, 1.0)('▁nation', rng) == list('▁nation')


def test_bpe_dropout_skips_merges_with_its_probability():
  segment = bpe_dropout({'ab': -1.0, 'abc': -2.0}, 0.25)
  rng = random.Random(0)
  counts = collections.Counter(tuple(segment('abc', rng)) for _ in range(4000))
  expected = {('abc',): 0.75**2, ('ab', 'c'): 0.75 * 0.25, ('a', 'b', 'c'): 0.25}
  assert set(counts) == set(expected)
  assert all(abs(counts[pieces] / 4000 - share) < 0.03 for pieces, share in expected.items())


@pytest.mark.parametrize('alpha', [0.2, 1.0, 3.0])
def test_unigram_sampling_draws_each_segmentation_with_its_probability(alpha):
  word = '▁ababa'
  segment = unigram_sampling(SCORES, alpha)
  rng = random.Random(0)
  counts = collections.Counter(tuple(segment(word, rng)) for _ in range(6000))
  weights = {}
  for ends in itertools.product([False, True], repeat=len(word) - 1):
    bounds = [0, *(i for i, end in enumerate(ends, 1) if end), len(word)]
    pieces = tuple(word[a:b] for a, b in itertools.pairwise(bounds))
    if all(piece in SCORES for piece in pieces):
      weights[pieces] = math.exp(alpha * sum(SCORES[piece] for piece in pieces))
  assert len(weights) > 10 and set(counts) <= set(weights)
  total = sum(weights.values())
  assert all(abs(counts[pieces] / 6000 - weight / total) < 0.025 for pieces, weight in weights.items())


def test_tables_of_long_words_are_not_stored():
  segment = unigram_sampling(SCORES, 0.2)
  rng = random.Random(0)
  words = [''.join(rng.choices('ab', k=1000)) for _ in range(20)]
  tracemalloc.start()
  for word in words:
    assert ''.join(segment(word, rng)) == word
  stored, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert stored < 1e6


@pytest.mark.parametrize('kind', SPECS)
def test_sampling_is_deterministic_across_processes(kind, tmp_path):
  vocabulary = vocab.train(SPECS[kind], LINES)
  vocabulary.save(str(tmp_path), 'source')
  code = f"""from attention_jax.data import vocab
vocabulary = vocab.load_stored({SPECS[kind]!r}, {str(tmp_path)!r}, 'source')
print([vocabulary.sample(line, seed) for seed in (0, 3, 2**32 + 5) for line in {LINES!r}])"""
  output = subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.PIPE, text=True).stdout
  samples = [vocabulary.sample(line, seed) for seed in (0, 3, 2**32 + 5) for line in LINES]
  assert output == f'{samples}\n' and samples[: len(LINES)] != samples[len(LINES) : 2 * len(LINES)]
  texts = [vocabulary.decode(vocabulary.encode(line)) for line in LINES]
  assert [vocabulary.decode(ids) for ids in samples] == 3 * texts


def test_a_line_with_unknown_characters_is_not_sampled():
  vocabulary = vocab.train(SPECS['subword'], LINES)
  assert vocabulary.sample('the 漢 ration', 1) == vocabulary.encode('the 漢 ration')
