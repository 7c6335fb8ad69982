"""The dates data set: one reading for every example, links, splits kept apart, and a round trip through tfds."""

import datetime
import functools
import itertools
import os
import re
import subprocess
import sys
import unicodedata
import zlib

import pytest
from babel.dates import format_date

from attention_jax.data.builders import date_formats, dates
from attention_jax.errors import UserError

SPLITS = ('train', 'validation', 'test', 'unseen')
FEW = 200  # examples of a split, where it matters how they are stored and not what they are


@functools.cache
def of(split):
  return list(dates.generate(split))


def every():
  return itertools.chain.from_iterable(map(of, SPLITS))


def parse(links):
  return [tuple(map(int, link.split('-'))) for link in links.split()]


def squeezed(text):
  return re.sub(r'(?<!\d) | (?!\d)', '', text.casefold())


def test_sizes_and_lengths():
  assert {split: len(of(split)) for split in SPLITS} == {
    'train': 20000,
    'validation': 1000,
    'test': 1000,
    'unseen': 1000,
  }
  lengths = sorted(len(row['source']) for row in every())
  assert lengths[-1] <= 40
  assert 14 <= lengths[len(lengths) // 2] <= 20


def test_locales():
  seen, unseen = ({row['locale'] for row in of(split)} for split in ('train', 'unseen'))
  assert len(seen) >= 60
  assert len(unseen) == 10
  assert not seen & unseen
  assert all({row['locale'] for row in of(split)} <= seen for split in ('validation', 'test'))


def test_no_source_is_in_two_splits_or_twice():
  keys = {split: [squeezed(row['source']) for row in of(split)] for split in SPLITS}
  assert all(len(set(rows)) == len(rows) for rows in keys.values())
  assert all(set(keys[a]).isdisjoint(keys[b]) for a, b in itertools.combinations(SPLITS, 2))
  other = {squeezed(row['source']) for row in dates.generate('test', seed=1)}
  assert other.isdisjoint(keys['train'])
  assert other != set(keys['test'])


def test_the_same_from_one_process_to_the_next():
  program = (
    'import zlib; from attention_jax.data.builders.dates import generate;'
    "print(zlib.crc32(repr(list(generate('validation', seed=3))).encode()))"
  )
  run = functools.partial(subprocess.run, [sys.executable, '-c', program], capture_output=True, check=True)
  first, second = (run(env=os.environ | {'PYTHONHASHSEED': salt}).stdout for salt in ('1', '2'))
  assert first == second != b''


def test_text_is_what_people_see():
  for row in every():
    source = row['source']
    assert unicodedata.is_normalized('NFC', source)
    assert source == source.strip()
    assert not any(unicodedata.category(char) in ('Cf', 'Cc') for char in source)
    assert all(char == ' ' for char in source if char.isspace())
    assert 1900 <= datetime.date.fromisoformat(row['target']).year <= 2099


def test_links_are_inside_and_say_the_digits():
  for row in every():
    source, target = row['source'], row['target']
    by_target = {place: [i for i, j in parse(row['links']) if j == place] for place in range(10)}
    assert not by_target.pop(4)
    assert not by_target.pop(7)
    assert all(0 <= i < len(source) for span in by_target.values() for i in span)
    assert all(by_target.values())
    century = len(by_target[0]) == 2  # a year of two digits: its century is written nowhere
    for place, span in by_target.items():
      said = not (century and place < 2) and not (place in (5, 8) and target[place] == '0')
      if said and len(span) == 1 and source[span[0]].isdigit():
        assert unicodedata.digit(source[span[0]]) == int(target[place]), row
      elif said and len(span) > 1:  # only a month's name has more than one character, both places alike
        assert place in (5, 6), row
        assert by_target[5] == by_target[6] == list(range(span[0], span[-1] + 1)), row
    assert all(len(by_target[place]) == 1 for place in (2, 3, 9)), row
    assert [source[i].isdigit() for i in by_target[0]] in ([True], [True, True]), row


def test_fields_do_not_share_characters():
  for row in every():
    spans = [{i for i, j in parse(row['links']) if j in places} for places in dates.PLACES.values()]
    assert sum(map(len, spans)) == len(set().union(*spans))


def known_names():
  """Every way to write a month (its number) or a weekday (0) in any locale, and a pattern that finds them."""
  names = {}
  for code in date_formats.SEEN_LOCALES + date_formats.UNSEEN_LOCALES:
    for field, values in date_formats.language(code).names.items():
      for (number, name), case in itertools.product(values.items(), (str, str.lower, str.upper, str.title)):
        text = unicodedata.normalize('NFC', case(name)).casefold()
        for form in (text, text.removesuffix('.')):
          if field[0] in 'ML':
            names[form] = number
          else:
            names.setdefault(form, 0)
  alternatives = []
  for name in sorted(names, key=len, reverse=True):
    start = r'(?<!\d)' if name[0].isdigit() else r'(?<![^\W\d_ב])'  # Hebrew writes 'in' at the beginning of the word
    alternatives.append(start + re.escape(name) + (r'(?!\d)' if name[-1].isdigit() else ''))
  return names, re.compile('|'.join(alternatives))


def read(source, names, pattern):
  """Reads a date by the rules of the docstring, from the source alone."""
  found = []
  rest = pattern.sub(lambda match: found.append(match.group()) or ' ', source.casefold())
  month = names[max((name for name in found if names[name]), key=len)] if any(names[name] for name in found) else None
  numbers = re.findall(r'\d+', rest)
  if len(numbers) == 1:
    numbers = [numbers[0][:4], numbers[0][4:6], numbers[0][6:]]
  year, *others = numbers if len(numbers[0]) == 4 else numbers[::-1]
  short = len(year) == 2
  month, day = (month, others[0]) if len(others) == 1 else others
  return datetime.date(int(year) + (0 if not short else 1900 if int(year) >= 50 else 2000), int(month), int(day))


def test_every_source_has_one_reading():
  names, pattern = known_names()
  for row in itertools.islice(every(), 17000, None):  # all of them but most of train
    assert read(row['source'], names, pattern).isoformat() == row['target'], row


@pytest.mark.parametrize('code', date_formats.SEEN_LOCALES + date_formats.UNSEEN_LOCALES)
def test_pieces_are_what_babel_writes(code):
  date = datetime.date(2005, 5, 14)
  language = date_formats.language(code)
  written = {
    ''.join(dates._format_piece(piece, date, language, '0') for piece in pattern) for pattern in language.patterns
  }
  assert date_formats.normalize_text(format_date(date, 'long', code)) in written


def test_variety():
  train = of('train')
  letters = [row for row in train if any(char.isalpha() for char in row['source'])]
  assert 0.6 < len(letters) / len(train) < 0.8
  assert sum(any(char.isdigit() and not char.isascii() for char in row['source']) for row in train) > 300
  assert sum('  ' in row['source'] for row in train) > 500
  assert sum(row['source'].isupper() for row in train) > 500
  assert sum(row['source'][0:4].isdigit() for row in train) > 2000
  assert len({row['target'] for row in train}) > 15000


@pytest.fixture
def few(monkeypatch):
  """Little to prepare; what there is, is the beginning of the whole."""
  for split in SPLITS:
    of(split)  # the whole, before
  monkeypatch.setattr(dates, 'SIZES', dict.fromkeys(dates.SIZES, FEW))


def test_through_tfds(tmp_path, few, capfd):
  loaded = dates.load('validation', str(tmp_path))
  assert loaded == {field: [row[field] for row in of('validation')[:FEW]] for field in dates.FIELDS}
  assert dates.load('train', str(tmp_path))['source'] == [row['source'] for row in of('train')[:FEW]]
  written = capfd.readouterr()
  assert written.out == ''
  assert written.err == ''
  assert 'tensorflow' not in sys.modules


def test_another_seed_lives_beside_it(tmp_path, few):
  other = dates.load('unseen', str(tmp_path), seed=5)
  assert other['source'] == [row['source'] for row in dates.generate('unseen', seed=5)]
  assert other['source'] != [row['source'] for row in of('unseen')[:FEW]]


def test_two_processes_at_once(tmp_path):
  program = (
    f'import sys, zlib; from attention_jax.data.builders import dates; dates.SIZES = dict.fromkeys(dates.SIZES, {FEW});'
    "print(zlib.crc32(repr(dates.load('test', sys.argv[1])['source']).encode()))"
  )
  both = [subprocess.Popen([sys.executable, '-c', program, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)]
  expected = zlib.crc32(repr([row['source'] for row in of('test')[:FEW]]).encode())
  assert [int(process.communicate()[0]) for process in both] == [expected] * 2
  assert not [path for path in tmp_path.rglob('*') if 'incomplete' in path.name]


def test_who_comes_second_uses_what_is_there(tmp_path, few, monkeypatch):
  def overtaken(split, seed):
    if split == 'unseen':
      monkeypatch.setattr(dates, 'generate', generate)
      dates.load('test', str(tmp_path), seed)  # the faster process
    return generate(split, seed)

  generate = dates.generate
  monkeypatch.setattr(dates, 'generate', overtaken)
  assert dates.load('test', str(tmp_path))['source'] == [row['source'] for row in of('test')[:FEW]]


def test_a_killed_preparation_leaves_nothing_that_looks_prepared(tmp_path, few):
  program = (
    'import os; from attention_jax.data.builders import dates\n'
    f'generate, dates.SIZES = dates.generate, dict.fromkeys(dates.SIZES, {FEW})\n'
    'def dying(split, seed):\n'
    '  yield from generate(split, seed)\n'
    "  if split == 'validation': os.kill(os.getpid(), 9)\n"
    'dates.generate = dying\n'
    f'dates.load("test", {str(tmp_path)!r})\n'
  )
  assert subprocess.run([sys.executable, '-c', program], check=False).returncode == -9
  assert any('incomplete' in str(path) for path in tmp_path.rglob('*'))
  assert dates.load('test', str(tmp_path))['source'] == [row['source'] for row in of('test')[:FEW]]


def test_unknown_split():
  with pytest.raises(UserError, match="did you mean 'validation'"):
    dates.load('valid', '/nowhere')
  with pytest.raises(UserError, match='train'):
    next(dates.generate('all'))


def test_a_folder_that_is_a_file(tmp_path):
  path = tmp_path / 'taken'
  path.write_text('mine')
  with pytest.raises(UserError, match=f'^{path}: cannot hold the dates data'):
    dates.load('test', str(path))
  assert path.read_text() == 'mine'
