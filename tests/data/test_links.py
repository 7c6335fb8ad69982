"""Gold links from text to batches: between tokens, as dense matrices, only for levels that a vocabulary supports."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.batching import Batches, Share, eval_batches, gather
from attention_jax.data.encoding import encode, token_units
from attention_jax.data.pipeline import stream
from attention_jax.data.text import LINK_LEVELS, Corpus, from_pairs
from attention_jax.data.vocab import train
from attention_jax.errors import UserError

BUCKETS = ((6, 9), (40, 40))
LINES = ['ab  cd', 'e\u0301f ab', 'cd 漢字 ab']
SPECS = {'char': 'char', 'word': 'word', 'subword': 'subword(size=18)'}
# level of links, vocabulary -> for each token of ' ab  漢字 q' the number of its unit; None: not supported
UNITS = {
  ('word', 'word'): [0, 1, 2],
  ('word', 'subword'): [0, 1, 1, 1, 2, 2],  # ▁ab ▁ 漢 字 ▁ q
  ('word', 'char'): [-1, 0, 0, -1, -1, 1, 1, -1, 2],
  ('char', 'char'): [0, 1, 2, 3, 4, 5, 6, 7, 8],
  ('char', 'word'): None,
  ('char', 'subword'): None,
}
SUPPORTED = [pair for pair, units in UNITS.items() if units]


def test_every_pair_of_level_and_vocabulary_has_a_case():
  assert set(UNITS) == set(itertools.product(LINK_LEVELS, SPECS))


@pytest.mark.parametrize(('level', 'kind'), UNITS)
def test_token_units_number_the_word_or_character_of_each_token(level, kind):
  vocabulary = train(SPECS[kind], LINES * 3)
  units = token_units(vocabulary, level)
  assert (units and list(units(' ab  漢字 q'))) == UNITS[level, kind]
  links = encode(Corpus(['ab cd'], ['ab'], [((0, 0),)], level), vocabulary, vocabulary).links
  assert (links is None) == (units is None)


def test_a_no_break_space_does_not_move_links():
  lines = "il coûte 10\u00a0000 euros aujourd'hui", 'it costs 10000 euros today'
  corpus = from_pairs(*([line] for line in lines), ['2-2 3-3 4-4'], name='nbsp')
  source, target = (train('word', [line]) for line in lines)
  linked = [
    (source.tokenize(lines[0])[i], target.tokenize(lines[1])[j]) for i, j in encode(corpus, source, target).links
  ]
  assert linked == [('10', '10000'), ('000', '10000'), ('euros', 'euros'), ("aujourd'hui", 'today')]


def test_a_link_between_words_joins_all_of_their_tokens():
  source = train('char', ['ab cd'])
  target = train('subword(size=18)', LINES * 3)
  corpus = Corpus(['ab c', 'ab', 'b'], ['漢字 ab', 'ab', '漢字'], [((0, 0), (1, 1)), (), ((0, 0),)])
  assert [target.tokenize(line) for line in corpus.target] == [['▁', '漢', '字', '▁ab'], ['▁ab'], ['▁', '漢', '字']]
  encoded = encode(corpus, source, target)
  pairs = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (3, 3)]
  assert encoded.links.tolist() == [list(pair) for pair in [*pairs, (0, 0), (0, 1), (0, 2)]]
  assert encoded.link_offsets.tolist() == [0, 7, 7, 10] and encoded.row_links(1).shape == (0, 2)
  assert (encoded.links.dtype, encoded.link_offsets.dtype) == (np.int32, np.int64)


def test_possible_links_take_precedence():
  vocabulary = train('word', ['a b'])
  corpus = Corpus(['a b'], ['b a'], [((0, 1),)], possible=[((0, 1), (1, 1))])
  assert encode(corpus, vocabulary, vocabulary).links.tolist() == [[0, 1], [1, 1]]
  assert encode(corpus._replace(links=None, possible=None), vocabulary, vocabulary).links is None


def random_corpus(rows=23, seed=0):
  """A corpus of words with random links; a quarter of the rows have none."""
  random = np.random.default_rng(seed)
  lengths = random.integers(1, 9, (rows, 2))
  links = [tuple(map(tuple, random.integers(0, pair, (row % 4, 2)).tolist())) for row, pair in enumerate(lengths)]
  return Corpus(*([' '.join('abcd'[i % 4] for i in range(n)) for n in side] for side in lengths.T), links=links)


@given(st.integers(1, 7), st.integers(0, 99), st.sampled_from(SUPPORTED))
def test_batches_contain_the_links_of_their_rows(size, step, pair):
  level, kind = pair
  vocabulary = train(SPECS[kind], LINES * 3)
  corpus = random_corpus()._replace(level=level)
  encoded = encode(corpus, vocabulary, vocabulary)
  for batch in (
    Batches(encoded, BUCKETS, size, links=True)[step],
    next(iter(eval_batches(encoded, BUCKETS, size, links=True))),
  ):
    assert batch.links.dtype == bool and batch.links.shape == (*batch.target.shape, batch.source.shape[1])
    for row, dense in zip(batch.index, batch.links, strict=True):
      gold = np.zeros_like(dense)
      if row >= 0:
        sides = (token_units(vocabulary, level)(side[row]) for side in (corpus.source, corpus.target))
        for (s, i), (t, j) in itertools.product(*map(enumerate, sides)):
          gold[t, s] = (i, j) in corpus.links[row]
      np.testing.assert_array_equal(dense, gold)
    outside = ~(batch.target_mask[:, :, None] & batch.source_mask[:, None, :])
    assert not batch.links[outside].any()


def test_links_do_not_change_other_arrays_and_work_with_shares_and_streams():
  vocabulary = train('word', ['a b c d'])
  encoded = encode(random_corpus(), vocabulary, vocabulary)
  plain = Batches(encoded, BUCKETS, 4)
  whole = Batches(encoded, BUCKETS, 4, links=True)
  parts = [Batches(encoded, BUCKETS, 4, share=Share(i, 2), links=True) for i in range(2)]
  for step, batch in enumerate(stream(whole, 0, 2 * len(whole))):
    np.testing.assert_array_equal(batch.links, whole[step].links)
    for with_links, without in zip(batch[:5], plain[step][:5], strict=True):
      np.testing.assert_array_equal(with_links, without)
    for i, part in enumerate(parts):
      np.testing.assert_array_equal(part[step].links, batch.links[2 * i : 2 * i + 2])
  assert plain[0].links is None and gather(encoded, np.array([-1]), (3, 2), links=True).links.shape == (1, 2, 3)


def test_requesting_links_of_a_split_without_links_is_reported():
  vocabulary = train('word', ['a'])
  encoded = encode(Corpus(['a'], ['a']), vocabulary, vocabulary)
  message = 'links are required, but the 1 pairs have no links between their tokens'
  with pytest.raises(UserError, match=f'^{message}$'):
    Batches(encoded, BUCKETS, 4, links=True)
