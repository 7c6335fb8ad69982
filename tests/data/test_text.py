"""Reading text: every file is read, or reported in one line with the position of the mistake."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.text import Corpus, from_pairs, group_references, parallel_paths, read_parallel, read_tsv
from tests.data.helpers import LINE, error_message


def test_read_parallel_reads_plain_and_compressed_files(write):
  write('train.en', 'a\nb\n')
  write('train.de.gz', gzip.compress(b'A\nB\n'))
  assert parallel_paths('train', 'en', 'de') == ('train.en', 'train.de.gz')
  assert read_parallel('train.en', 'train.de.gz')[:3] == (['a', 'b'], ['A', 'B'], None)


def test_parallel_files_of_different_lengths_are_reported(write):
  long, short = write('a', 'x\ny\n'), write('b', 'x\n')
  message = 'a has 2 lines but b has 1; parallel files have one line per pair'
  assert error_message(read_parallel, long, short) == message
  assert error_message(read_parallel, short, long).startswith('b has 1 line but a has 2;')


def test_blank_lines_are_skipped_and_reported(write):
  corpus = read_parallel(write('a', 'x\n\n \ny\nz\n'), write('b', 'X\n\nB\n\t\nZ\n'))
  assert (corpus.source, corpus.target) == (['x', 'z'], ['X', 'Z'])
  assert corpus.report == ('a, b: 3 pairs with a blank side skipped (lines 2, 3, 4)',)
  assert [corpus.line(row) for row in range(2)] == [1, 5]
  corpus = read_parallel(write('a', 'x\n' + '\n' * 9), write('b', 'x\n' * 10))
  assert corpus.report == ('a, b: 9 pairs with a blank side skipped (lines 2, 3, 4, 5, 6, ...)',)
  message = error_message(read_parallel, write('a', '\n\n'), write('b', 'x\n\n'))
  assert message == 'a, b: no pairs, all 2 are blank on one side or both'


def test_read_tsv_reads_pairs_and_links(write):
  corpus = read_tsv(write('a.tsv', 'a b\tA\t0-0 1-0\nc\tC\n\nd\tD\t\ne\t \n'))
  assert corpus[:3] == (['a b', 'c', 'd'], ['A', 'C', 'D'], [((0, 0), (1, 0)), (), ()])
  assert corpus.report == ('a.tsv: 2 pairs with a blank side skipped (lines 3, 5)',)
  assert read_tsv(write('b.tsv', 'a\tA\r\nb\tB\r\n'))[:3] == (['a', 'b'], ['A', 'B'], None)


def test_possible_links_of_a_tsv_have_a_question_mark(write):
  corpus = read_tsv(write('a.tsv', 'a b\tA B\t0-0 1?0\nc\tC\t0-0\n'))
  assert corpus.links == [((0, 0),), ((0, 0),)]
  assert corpus.possible == [((0, 0), (1, 0)), ((0, 0),)]
  assert read_tsv(write('b.tsv', 'c\tC\t0-0\n')).possible is None


def test_links_of_parallel_files_are_read_from_a_third_file(write):
  texts = {'en': 'a b\n\nc\n', 'de': 'A\n\nC\n', 'links': '1?0\n\n0-0\n'}
  paths = [write(f'a.{name}', text) for name, text in texts.items()]
  assert read_parallel(*paths[:2]).links is None
  corpus = read_parallel(*paths)
  assert (corpus.links, corpus.possible) == ([(), ((0, 0),)], [((1, 0),), ((0, 0),)])
  assert 'has 3 lines but' in error_message(read_parallel, *paths[:2], write('b.links', '0-0\n'))
  assert error_message(read_parallel, *paths[:2], write('c.links', '\n\n0-1\n')).startswith("c.links:3: link '0-1' is")


def test_links_of_a_tsv_may_count_characters(write):
  path = write('a.tsv', 'ab\tA\t1-0\n')
  assert read_tsv(path, 'char').links == [((1, 0),)]
  assert error_message(read_tsv, path) == (
    "a.tsv:1: link '1-0' is out of range, counted from 0 in words: the source has 1, the target 1"
  )
  assert error_message(read_tsv, path, 'chars').startswith("unknown level of links 'chars' (did you mean 'char'?)")


LINK_ERROR = (
  'a link must be source-target (sure) or source?target (possible), counted from 0 with at most 9 '
  "digits, such as '0-0 1-2 1?3', got"
)


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('alone', '1 column; expected source TAB target, or source TAB target TAB links'),
    ('a\tb\t0-0\td', '4 columns; expected source TAB target, or source TAB target TAB links'),
    ('a\tb\t0-0 1:2', f"{LINK_ERROR} '1:2'"),
    ('a\tb\t-1-0', f"{LINK_ERROR} '-1-0'"),
    ('a\tb\t٠-0', f"{LINK_ERROR} '٠-0'"),
    ('a b\tc\t1-1', "link '1-1' is out of range, counted from 0 in words: the source has 2, the target 1"),
  ],
)
def test_invalid_lines_of_a_tsv_are_reported(write, line, message):
  assert error_message(read_tsv, write('a.tsv', f'x\ty\t0-0\n\n{line}\n')) == f'a.tsv:3: {message}'


@pytest.mark.long
@given(st.lists(st.tuples(LINE, LINE), min_size=1))
def test_every_pair_is_kept_or_reported(pairs):
  source = [s for s, _ in pairs]
  target = [t for _, t in pairs]
  kept = [i for i, (s, t) in enumerate(pairs) if s.strip() and t.strip()]
  if not kept:
    return
  corpus = from_pairs(source, target, name='pairs')
  assert [(corpus.source[r], corpus.target[r]) for r in range(len(kept))] == [pairs[i] for i in kept]
  assert [corpus.line(r) - 1 for r in range(len(kept))] == kept
  assert bool(corpus.report) == (len(kept) < len(pairs))


def test_group_references_joins_the_targets_of_equal_sources():
  corpus = Corpus(['a', 'b', 'a'], ['x', 'y', 'z'])
  assert group_references(corpus) == (['a', 'b'], [['x', 'z'], ['y']], [0, 1])
