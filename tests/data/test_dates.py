"""The dates data set: targets that follow from the sources, links, disjoint splits, and a round trip through tfds."""

import datetime
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import unicodedata

import pytest
from babel.dates import format_date

from attention_jax.data.builders import date_formats, dates
from attention_jax.data.splits import SPLITS
from attention_jax.errors import UserError

FEW = 50  # examples of a split in tests of storage
FIRST = 3000  # examples of train in the short forms of the tests of all rows


@functools.cache
def rows_of(split, first=None):
  """The rows of a split, or at most the first ones: those of an incomplete split are the first of the whole one."""
  return list(itertools.islice(dates.generate(split), first))


def all_rows(first):
  return itertools.chain.from_iterable(rows_of(split, first) for split in SPLITS)


@pytest.fixture(params=[FIRST, pytest.param(None, marks=pytest.mark.long)])
def first(request):
  """The number of rows of train, or None for all."""
  return request.param


def parse_links(links):
  return [tuple(map(int, link.split('-'))) for link in links.split()]


def normalize_spacing(text):
  return re.sub(r'(?<!\d) | (?!\d)', '', text.casefold())


def test_splits_have_their_sizes_and_sources_of_at_most_40_characters(first):
  assert dates.SIZES == {'train': 20000, 'validation': 1000, 'test': 1000, 'unseen': 1000}
  sizes = [len(rows_of(split, first)) for split in SPLITS]
  assert sizes == [first or dates.SIZES['train'], 1000, 1000, 1000]
  lengths = sorted(len(row['source']) for row in all_rows(first))
  assert lengths[-1] <= 40
  assert 14 <= lengths[len(lengths) // 2] <= 20


def test_locales_of_unseen_occur_in_no_other_split(first):
  seen, unseen = ({row['locale'] for row in rows_of(split, first)} for split in ('train', 'unseen'))
  assert len(seen) >= 60
  assert len(unseen) == 10
  assert not seen & unseen
  assert all({row['locale'] for row in rows_of(split, first)} <= seen for split in ('validation', 'test'))


@pytest.mark.long
def test_no_source_occurs_twice_in_a_split_or_in_two_splits(first):
  keys = {split: [normalize_spacing(row['source']) for row in rows_of(split, first)] for split in SPLITS}
  assert all(len(set(rows)) == len(rows) for rows in keys.values())
  assert all(set(keys[a]).isdisjoint(keys[b]) for a, b in itertools.combinations(SPLITS, 2))
  other = {normalize_spacing(row['source']) for row in dates.generate('test', seed=1)}
  assert other.isdisjoint(keys['train'])
  assert other != set(keys['test'])


@pytest.mark.long
def test_generation_is_deterministic_across_processes():
  program = (
    'import zlib; from attention_jax.data.builders.dates import generate;'
    "print(zlib.crc32(repr(list(generate('validation', seed=3))).encode()))"
  )
  run = functools.partial(subprocess.run, [sys.executable, '-c', program], capture_output=True, check=True)
  first, second = (run(env=os.environ | {'PYTHONHASHSEED': salt}).stdout for salt in ('1', '2'))
  assert first == second != b''


def test_text_is_normalised_and_visible(first):
  for row in all_rows(first):
    source = row['source']
    assert unicodedata.is_normalized('NFC', source)
    assert source == source.strip()
    assert not any(unicodedata.category(char) in ('Cf', 'Cc') for char in source)
    assert all(char == ' ' for char in source if char.isspace())
    assert 1900 <= datetime.date.fromisoformat(row['target']).year <= 2099


@pytest.mark.long
def test_links_are_in_range_and_join_equal_digits_and_fields_share_no_character(first):
  for row in all_rows(first):
    source, target = row['source'], row['target']
    links = parse_links(row['links'])
    spans = [{i for i, j in links if j in places} for places in dates.PLACES.values()]
    assert sum(map(len, spans)) == len(set().union(*spans)), row
    by_target = {place: [i for i, j in links if j == place] for place in range(10)}
    assert not by_target.pop(4) and not by_target.pop(7)  # the hyphens of an ISO date
    assert all(span and min(span) >= 0 and max(span) < len(source) for span in by_target.values()), row
    is_short_year = len(by_target[0]) == 2  # its century is not in the source
    for place, span in by_target.items():
      is_in_source = not (is_short_year and place < 2) and not (place in (5, 8) and target[place] == '0')
      if is_in_source and len(span) == 1 and source[span[0]].isdigit():
        assert unicodedata.digit(source[span[0]]) == int(target[place]), row
      elif is_in_source and len(span) > 1:  # only the name of a month, to which both digits link
        assert place in (5, 6), row
        assert by_target[5] == by_target[6] == list(range(span[0], span[-1] + 1)), row
    assert all(len(by_target[place]) == 1 for place in (2, 3, 9)), row
    assert [source[i].isdigit() for i in by_target[0]] in ([True], [True, True]), row


def known_names():
  """Returns {name: number of the month, or 0 for a weekday} over all locales, and a pattern that matches a name."""
  names = {}
  for code in date_formats.SEEN_LOCALES + date_formats.UNSEEN_LOCALES:
    for field, values in date_formats.locale_formats(code).names.items():
      for (number, name), case in itertools.product(values.items(), (str, str.lower, str.upper, str.title)):
        text = unicodedata.normalize('NFC', case(name)).casefold()
        for form in (text, text.removesuffix('.')):
          if field[0] in 'ML':
            names[form] = number
          else:
            names.setdefault(form, 0)
  alternatives = []
  for name in sorted(names, key=len, reverse=True):
    start = r'(?<!\d)' if name[0].isdigit() else r'(?<![^\W\d_ב])'  # a Hebrew name may begin with the prefix 'in'
    alternatives.append(start + re.escape(name) + (r'(?!\d)' if name[-1].isdigit() else ''))
  return names, re.compile('|'.join(alternatives))


def parse_date(source, names, pattern):
  """Parses a date by the rules in the docstring of the builder, from the source alone."""
  text = source.casefold()
  month_names = [name for name in pattern.findall(text) if names[name]]
  numbers = re.findall(r'\d+', pattern.sub(' ', text))
  if len(numbers) == 1:
    numbers = [numbers[0][:4], numbers[0][4:6], numbers[0][6:]]
  year, *fields = numbers if len(numbers[0]) == 4 else numbers[::-1]
  month, day = (names[max(month_names, key=len)], fields[0]) if len(fields) == 1 else fields
  century = 0
  if len(year) == 2:
    century = 1900 if int(year) >= 50 else 2000
  return datetime.date(century + int(year), int(month), int(day))


@pytest.mark.long
def test_the_target_follows_from_the_source(first):
  names, pattern = known_names()
  for row in itertools.islice(all_rows(first), 0, None, 9):
    assert parse_date(row['source'], names, pattern).isoformat() == row['target'], row


@pytest.mark.long
@pytest.mark.parametrize('code', date_formats.SEEN_LOCALES + date_formats.UNSEEN_LOCALES)
def test_formatted_pieces_contain_the_long_format_of_babel(code):
  date = datetime.date(2005, 5, 14)
  formats = date_formats.locale_formats(code)
  formatted = {
    ''.join(dates._format_piece(piece, date, formats, '0') for piece in pattern) for pattern in formats.patterns
  }
  assert date_formats.normalize_text(format_date(date, 'long', code)) in formatted


def test_examples_vary_in_script_case_and_spacing(first):
  train = rows_of('train', first)
  count = len(train)
  letters = [row for row in train if any(char.isalpha() for char in row['source'])]
  assert 0.6 < len(letters) / count < 0.8
  assert sum(any(char.isdigit() and not char.isascii() for char in row['source']) for row in train) > 0.015 * count
  assert sum('  ' in row['source'] for row in train) > 0.025 * count
  assert sum(row['source'].isupper() for row in train) > 0.025 * count
  assert sum(row['source'][0:4].isdigit() for row in train) > 0.1 * count
  assert len({row['target'] for row in train}) > 0.75 * count


@pytest.fixture
def few(monkeypatch):
  """Limits each split to its first FEW examples."""
  monkeypatch.setattr(dates, 'SIZES', dict.fromkeys(dates.SIZES, FEW))


def test_loaded_rows_equal_the_generated_ones_without_output_or_tensorflow(tmp_path, few, capfd):
  loaded = dates.load('validation', str(tmp_path))
  assert loaded == {field: [row[field] for row in rows_of('validation', FEW)] for field in dates.FIELDS}
  assert dates.load('train', str(tmp_path))['source'] == [row['source'] for row in rows_of('train', FEW)]
  other = dates.load('unseen', str(tmp_path), seed=5)['source']  # stored separately
  assert other == [row['source'] for row in dates.generate('unseen', seed=5)]
  assert other != [row['source'] for row in rows_of('unseen', FEW)]
  assert capfd.readouterr() == ('', '')
  assert 'tensorflow' not in sys.modules


def test_the_slower_of_two_processes_loads_the_same_rows(tmp_path, few, monkeypatch):
  generate = dates.generate

  def generate_slowly(split, seed):
    if split == 'unseen':
      monkeypatch.setattr(dates, 'generate', generate)
      dates.load('test', str(tmp_path), seed)  # the faster process
    return generate(split, seed)

  monkeypatch.setattr(dates, 'generate', generate_slowly)
  assert dates.load('test', str(tmp_path))['source'] == [row['source'] for row in rows_of('test', FEW)]
  assert not [path for path in tmp_path.rglob('*') if 'incomplete' in path.name]


@pytest.mark.long
def test_a_killed_preparation_is_repeated(tmp_path, few):
  program = (
    'import os; from attention_jax.data.builders import dates\n'
    f'generate, dates.SIZES = dates.generate, dict.fromkeys(dates.SIZES, {FEW})\n'
    'def generate_and_die(split, seed):\n'
    '  yield from generate(split, seed)\n'
    "  if split == 'validation': os.kill(os.getpid(), 9)\n"
    'dates.generate = generate_and_die\n'
    f'dates.load("test", {str(tmp_path)!r})\n'
  )
  assert subprocess.run([sys.executable, '-c', program], check=False).returncode == -9
  assert any('incomplete' in str(path) for path in tmp_path.rglob('*'))
  assert dates.load('test', str(tmp_path))['source'] == [row['source'] for row in rows_of('test', FEW)]


def test_unknown_splits_and_folders_are_reported(tmp_path):
  with pytest.raises(UserError, match="did you mean 'validation'"):
    dates.load('valid', '/nowhere')
  with pytest.raises(UserError, match='train'):
    next(dates.generate('all'))
  path = tmp_path / 'file'
  path.write_text('text')
  with pytest.raises(UserError, match=f'^{path}: cannot write the dates data'):
    dates.load('test', str(path))
  assert path.read_text() == 'text'


@pytest.mark.long
def test_damaged_data_are_reported(tmp_path, few):
  expected = dates.load('test', str(tmp_path))
  folder = tmp_path / 'dates' / 'seed0'
  for name in ('dataset_info.json', 'dates-test.array_record-00000-of-00001'):
    path = folder / '1.0.0' / name
    content = path.read_bytes()
    for damage in (lambda path=path: path.write_bytes(b''), path.unlink):
      damage()
      with pytest.raises(UserError, match=rf'^the dates data in {folder} cannot be read \(.*\); delete the folder'):
        dates.load('test', str(tmp_path))
    path.write_bytes(content)
  shutil.rmtree(folder)  # the remedy of the message
  assert dates.load('test', str(tmp_path)) == expected
