"""Pieces that are drawn: sentencepiece's own where nothing is left to chance, each way as often as it should come, and
the same in every process."""

import collections
import itertools
import math
import random
import subprocess
import sys

import pytest

from attention_jax.data import vocab
from attention_jax.data.subword_sampling import bpe_dropout, unigram_sampling

SCORES = {'a': -1.0, 'b': -1.5, 'ab': -1.2, 'ba': -2.0, 'aba': -1.9, '▁': -1.0, '▁a': -1.1}
LINES = ['a station of the nation', 'international relations', 'stations and rations ▁ as they are', 'the  ration']
SPECS = {'subword': 'subword(size=40, dropout=0.3)', 'unigram': 'unigram(size=25, sampling=0.1)'}


def test_merges_of_which_none_is_left_out_are_those_of_sentencepiece():
  vocabulary = vocab.train('subword(size=60)', LINES)
  scores = {vocabulary.id_to_token(id): vocabulary._processor.get_score(id) for id in range(4, len(vocabulary))}
  cut, draws = bpe_dropout(scores, 0.0), random.Random(0)
  for _ in range(200):
    word = '▁' + ''.join(draws.choices('stationred', k=draws.randrange(1, 12)))
    assert cut(word, draws) == vocabulary.tokenize(word[1:])
  assert bpe_dropout(scores, 1.0)('▁nation', draws) == list('▁nation')


def test_a_merge_is_left_out_as_often_as_said():
  cut, draws = bpe_dropout({'ab': -1.0, 'abc': -2.0}, 0.25), random.Random(0)
  found = collections.Counter(tuple(cut('abc', draws)) for _ in range(4000))
  expected = {('abc',): 0.75**2, ('ab', 'c'): 0.75 * 0.25, ('a', 'b', 'c'): 0.25}
  assert set(found) == set(expected)
  assert all(abs(found[way] / 4000 - share) < 0.03 for way, share in expected.items())


@pytest.mark.parametrize('alpha', [0.2, 1.0, 3.0])
def test_each_way_comes_as_often_as_its_probability_says(alpha):
  word, cut, draws = '▁ababa', unigram_sampling(SCORES, alpha), random.Random(0)
  found = collections.Counter(tuple(cut(word, draws)) for _ in range(6000))
  ways = {}
  for ends in itertools.product([False, True], repeat=len(word) - 1):
    bounds = [0, *(i for i, end in enumerate(ends, 1) if end), len(word)]
    parts = tuple(word[a:b] for a, b in itertools.pairwise(bounds))
    if all(part in SCORES for part in parts):
      ways[parts] = math.exp(alpha * sum(SCORES[part] for part in parts))
  assert len(ways) > 10 and set(found) <= set(ways)
  assert all(abs(found[way] / 6000 - weight / sum(ways.values())) < 0.025 for way, weight in ways.items())


@pytest.mark.parametrize('kind', SPECS)
def test_another_process_draws_the_same(kind, tmp_path):
  vocabulary = vocab.train(SPECS[kind], LINES)
  vocabulary.save(str(tmp_path), 'source')
  code = f"""from attention_jax.data import vocab
found = vocab.load_stored({SPECS[kind]!r}, {str(tmp_path)!r}, 'source')
print([found.sample(line, seed) for seed in (0, 3, 2**32 + 5) for line in {LINES!r}])"""
  said = subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.PIPE, text=True).stdout
  drawn = [vocabulary.sample(line, seed) for seed in (0, 3, 2**32 + 5) for line in LINES]
  assert said == f'{drawn}\n' and drawn[: len(LINES)] != drawn[len(LINES) : 2 * len(LINES)]
  whole = [vocabulary.decode(vocabulary.encode(line)) for line in LINES]
  assert [vocabulary.decode(ids) for ids in drawn] == 3 * whole


def test_a_line_with_characters_that_no_piece_has_is_cut_as_always():
  vocabulary = vocab.train(SPECS['subword'], LINES)
  assert vocabulary.sample('the 漢 ration', 1) == vocabulary.encode('the 漢 ration')
