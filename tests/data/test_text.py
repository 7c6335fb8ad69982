"""Reading text: every file is read, or reported in one line with the position of the mistake."""

import gzip
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.files import read_arrays, read_lines
from attention_jax.data.text import Corpus, from_pairs, group_references, parallel_paths, read_parallel, read_tsv
from attention_jax.errors import UserError

LINE = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\r\n')).filter(lambda s: s[:1] != '\ufeff')


@pytest.fixture
def write(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def write_file(name, content):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    return name

  return write_file


@pytest.mark.parametrize('read', [read_lines, read_arrays])
def test_pipes_and_devices_are_not_read(read, tmp_path):
  os.mkfifo(tmp_path / 'pipe')
  for path in (tmp_path / 'pipe', '/dev/zero'):
    with pytest.raises(UserError, match=f'{path}: is a pipe or a device, expected a file'):
      read(str(path))


def error_message(function, *args):
  """The message, one line, of the UserError that a call raises."""
  with pytest.raises(UserError) as caught:
    function(*args)
  assert '\n' not in str(caught.value)
  return str(caught.value)


@given(st.lists(LINE, min_size=1).filter(any), st.sampled_from(['\n', '\r\n']), st.booleans(), st.booleans())
def test_read_lines_round_trip(tmp_path_factory, lines, end, has_mark, compress):
  path = tmp_path_factory.mktemp('text') / ('a.gz' if compress else 'a')
  data = (('\ufeff' if has_mark else '') + end.join(lines) + end).encode()
  path.write_bytes(gzip.compress(data) if compress else data)
  assert read_lines(str(path)) == lines


def test_the_last_line_end_is_optional(write):
  assert read_lines(write('a', 'x\ny')) == read_lines(write('b', 'x\ny\n')) == ['x', 'y']


def test_missing_file_is_reported(write):
  write('train.en', 'x\n')
  assert error_message(read_lines, 'trian.en') == "trian.en: no such file (did you mean 'train.en'?)"
  assert error_message(read_lines, 'nowhere/a') == "nowhere/a: no such file (there is no folder 'nowhere')"


def test_directory_is_reported(tmp_path):
  assert error_message(read_lines, str(tmp_path)) == f'{tmp_path}: is a directory, expected a file'


def test_empty_file_is_reported(write):
  assert error_message(read_lines, write('a', '')) == 'a: the file is empty'
  assert error_message(read_lines, write('b', '\ufeff')) == 'b: the file is empty'


def test_unreadable_file_is_reported(write, monkeypatch):
  def deny(path, mode):
    raise PermissionError(13, 'Permission denied')

  write('a', 'x\n')
  monkeypatch.setattr('builtins.open', deny)
  assert error_message(read_lines, 'a') == "'a': cannot be read (Permission denied)"


def test_invalid_utf8_is_reported(write):
  assert (
    error_message(read_lines, write('a', b'good\nsch\xf6n\n')) == 'a:2: not UTF-8 (byte 0xf6, number 4 of the line); '
    'convert the file to UTF-8'
  )
  assert error_message(read_lines, write('b', b'\xff\xfea')).startswith(
    'b:1: not UTF-8 (byte 0xff, number 1 of the line)'
  )


@pytest.mark.parametrize('damage', [lambda data: data[:-9], lambda data: b'plain text'])
def test_damaged_gzip_is_reported(write, damage):
  path = write('a.gz', damage(gzip.compress(b'some text\n' * 99)))
  assert error_message(read_lines, path).startswith('a.gz: not a whole gzip file (')


def test_read_parallel(write):
  write('train.en', 'a\nb\n')
  write('train.de.gz', gzip.compress(b'A\nB\n'))
  assert parallel_paths('train', 'en', 'de') == ('train.en', 'train.de.gz')
  assert read_parallel('train.en', 'train.de.gz')[:3] == (['a', 'b'], ['A', 'B'], None)


def test_parallel_files_of_different_lengths_are_reported(write):
  assert (
    error_message(read_parallel, write('a', 'x\ny\n'), write('b', 'x\n'))
    == 'a has 2 lines but b has 1; parallel files have '
    'one line per pair'
  )


def test_blank_lines_are_skipped_and_reported(write):
  corpus = read_parallel(write('a', 'x\n\n \ny\nz\n'), write('b', 'X\n\nB\n\t\nZ\n'))
  assert (corpus.source, corpus.target) == (['x', 'z'], ['X', 'Z'])
  assert corpus.report == ('a, b: 3 blank lines skipped (lines 2, 3, 4)',)
  assert [corpus.line(row) for row in range(2)] == [1, 5]


def test_only_the_first_blank_lines_are_listed(write):
  corpus = read_parallel(write('a', 'x\n' + '\n' * 9), write('b', 'x\n' * 10))
  assert corpus.report == ('a, b: 9 blank lines skipped (lines 2, 3, 4, 5, 6, ...)',)


def test_a_file_of_blank_lines_is_reported(write):
  assert error_message(read_parallel, write('a', '\n\n'), write('b', 'x\n\n')) == (
    'a, b: no pairs, all 2 are blank on one side or both'
  )


def test_read_tsv(write):
  corpus = read_tsv(write('a.tsv', 'a b\tA\t0-0 1-0\nc\tC\n\nd\tD\t\ne\t \n'))
  assert corpus[:3] == (['a b', 'c', 'd'], ['A', 'C', 'D'], [((0, 0), (1, 0)), (), ()])
  assert corpus.report == ('a.tsv: 2 blank lines skipped (lines 3, 5)',)
  assert read_tsv(write('b.tsv', 'a\tA\r\nb\tB\r\n'))[:3] == (['a', 'b'], ['A', 'B'], None)


def test_possible_links_of_a_tsv(write):
  corpus = read_tsv(write('a.tsv', 'a b\tA B\t0-0 1?0\nc\tC\t0-0\n'))
  assert corpus.links == [((0, 0),), ((0, 0),)]
  assert corpus.possible == [((0, 0), (1, 0)), ((0, 0),)]
  assert read_tsv(write('b.tsv', 'c\tC\t0-0\n')).possible is None


def test_links_of_parallel_files(write):
  texts = {'en': 'a b\n\nc\n', 'de': 'A\n\nC\n', 'links': '1?0\n\n0-0\n'}
  paths = [write(f'a.{name}', text) for name, text in texts.items()]
  assert read_parallel(*paths[:2]).links is None
  corpus = read_parallel(*paths)
  assert (corpus.links, corpus.possible) == ([(), ((0, 0),)], [((1, 0),), ((0, 0),)])
  assert 'has 3 lines but' in error_message(read_parallel, *paths[:2], write('b.links', '0-0\n'))


def test_links_of_a_tsv_may_count_characters(write):
  path = write('a.tsv', 'ab\tA\t1-0\n')
  assert read_tsv(path, 'char').links == [((1, 0),)]
  assert error_message(read_tsv, path) == (
    "a.tsv:1: link '1-0' is out of range, counted from 0 in words: the source has 1, the target 1"
  )
  assert error_message(read_tsv, path, 'chars').startswith("unknown level of links 'chars' (did you mean 'char'?)")


LINK_ERROR = (
  "a link must be source-target or, if it is possible, source?target, counted from 0, such as '0-0 1-2 1?3', got"
)


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('alone', '1 column; expected source TAB target, or source TAB target TAB links'),
    ('a\tb\t0-0\td', '4 columns; expected source TAB target, or source TAB target TAB links'),
    (
      'a\tb\t0-0 1:2',
      f"{LINK_ERROR} '1:2'",
    ),
    (
      'a\tb\t-1-0',
      f"{LINK_ERROR} '-1-0'",
    ),
    (
      'a\tb\t٠-0',
      f"{LINK_ERROR} '٠-0'",
    ),
    ('a b\tc\t1-1', "link '1-1' is out of range, counted from 0 in words: the source has 2, the target 1"),
  ],
)
def test_invalid_lines_of_a_tsv_are_reported(write, line, message):
  assert error_message(read_tsv, write('a.tsv', f'x\ty\t0-0\n\n{line}\n')) == f'a.tsv:3: {message}'


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


def test_group_references():
  corpus = Corpus(['a', 'b', 'a'], ['x', 'y', 'z'])
  assert group_references(corpus) == (['a', 'b'], [['x', 'z'], ['y']], [0, 1])
