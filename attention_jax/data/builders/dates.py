"""Dates as people write them in many languages -> ISO 8601, with gold links: the data set that ships with the package.

Sources come from CLDR's patterns and names (`date_formats`), in the Gregorian calendar, years 1900 to 2099, with case,
spacing and abbreviation noise; the target is always `YYYY-MM-DD`. Every source has exactly one reading, without knowing
its locale:

- a month in digits: day-month-year, or year-month-day with a year of four digits; never month-day-year;
- eight digits in a row: year, month, day;
- a year of two digits: 1950 to 2049, and it comes after the day (and after a month in digits);
- a name that is another month in another locale, or a weekday that is also a month somewhere, is not used;
- spaces vanish only where two kinds of characters meet (digit, letter, other), so that no two numbers or words merge.

Spaces are U+0020, text is NFC, and what nobody sees (direction marks, joiners) is left out. Locales whose default
numbering system is not Latin write NATIVE_SHARE of their dates with their own digits.

Gold links say which source characters each target character comes from: a digit written in the source gives one link;
the century of a two-digit year links to both its digits; a leading zero that is not written, to the digit that is; both
characters of a month by name, to the whole name. The two '-' have no links. Where a metric tells them apart, characters
with a single link are sure and those with several only possible.
"""

import calendar
import contextlib
import datetime
import io
import itertools
import random
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import tensorflow_datasets as tfds

from attention_jax.data.builders import date_formats
from attention_jax.errors import UserError, choose

SIZES = {'train': 20000, 'validation': 1000, 'test': 1000, 'unseen': 1000}
FIELDS = ('source', 'target', 'links', 'locale')
MAX_LENGTH = 40  # source characters
PLACES = {'y': (0, 1, 2, 3), 'M': (5, 6), 'd': (8, 9)}  # of the fields in YYYY-MM-DD

FREE_SHARE = 0.4  # of the examples use FREE_PATTERNS, the others the locale's own
NATIVE_SHARE = 0.5
CASES = (str, str, str, str, str.lower, str.lower, str.upper, str.title)  # str: as it is; drawn uniformly
SPACING_SHARE = 0.3  # of the examples have spacing noise
NO_DOT_SHARE = 0.2  # of the names lose the dot of their abbreviation
SEPARATORS = frozenset('./-,')
IDLE_SPACE = re.compile(r'(?<!\d) | (?!\d)')  # does not keep two numbers apart

Labelled = list[tuple[str, str]]  # (character, label of the piece it comes from)


class Splitting(NamedTuple):
  """Sources belong to splits by their hash, so that no split has to know another one: slots [start, stop) of 23."""

  start: int
  stop: int
  locales: tuple[str, ...]


SPLITS = {
  'train': Splitting(0, 20, date_formats.SEEN_LOCALES),
  'validation': Splitting(20, 21, date_formats.SEEN_LOCALES),
  'test': Splitting(21, 22, date_formats.SEEN_LOCALES),
  'unseen': Splitting(22, 23, date_formats.UNSEEN_LOCALES),
}


def generate(split: str, seed: int = 0) -> Iterator[dict[str, str]]:
  """Yields the examples of a split, a pure function of (split, seed).

  No two examples of all splits (of any seed, across splits) have the same source, case and spacing aside.

  Args:
    split: 'train', 'validation' and 'test' share their locales; 'unseen' has ten that no other split has.
    seed: any integer.

  Yields: source, target ('YYYY-MM-DD'), links (Pharaoh format, 'source-target' character indices, 0-based), locale.
  Raises: UserError for an unknown split.
  """
  start, stop, locales = SPLITS[choose(split, SPLITS, 'split of dates')]
  # Only random() is promised to stay the same from one Python version to the next, so every draw below comes from it.
  draw = random.Random(f'dates {split} {seed}').random
  seen = set()
  while len(seen) < SIZES[split]:
    locale = _pick(draw, locales)
    drawn = _draw(draw, date_formats.language(locale))
    if drawn is None:
      continue
    date, labelled = drawn
    source = ''.join(char for char, _ in labelled)
    key = IDLE_SPACE.sub('', source.casefold())
    slot = zlib.crc32(key.encode()) * 23 >> 32
    if key not in seen and start <= slot < stop:
      seen.add(key)
      yield {'source': source, 'target': date.isoformat(), 'links': _links(labelled), 'locale': locale}


class SeedConfig(tfds.core.BuilderConfig):
  """The data of one seed."""

  def __init__(self, seed: int):
    super().__init__(name=f'seed{seed}', description=f'Generated from seed {seed}.')
    self.seed = seed


class Dates(tfds.core.GeneratorBasedBuilder):
  """`generate` as a tfds data set (array_record, read by as_data_source). The order of the examples is kept."""

  url_infos = None  # nothing to download; and looking for checksums needs a package that tfds does not declare
  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES: ClassVar = {
    '1.0.0': f'{len(date_formats.SEEN_LOCALES)} locales and {len(date_formats.UNSEEN_LOCALES)} unseen ones.'
  }
  BUILDER_CONFIGS: ClassVar = [SeedConfig(0)]

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description='Dates as people write them in many languages -> ISO 8601, with gold character links.',
      features=tfds.features.FeaturesDict({field: tfds.features.Text() for field in FIELDS}),
      supervised_keys=('source', 'target'),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager) -> dict[str, Iterator]:
    return {split: self._generate_examples(split) for split in SPLITS}

  def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
    return enumerate(generate(split, self.builder_config.seed))


def load(split: str, data_dir: str, seed: int = 0) -> dict[str, list[str]]:
  """Returns one list per field of `generate`, read from `data_dir`, where the data set is prepared on first use.

  Preparing is atomic: tfds writes into a folder of its own and renames it, so that a killed preparation leaves nothing
  that could be taken for the data, and of two processes at once the slower one uses what the faster one wrote.

  Raises: UserError for an unknown split, or a `data_dir` that cannot be written to.
  """
  choose(split, SPLITS, 'split of dates')
  rows = _prepared(data_dir, seed).as_data_source(split)
  examples = [rows[i] for i in range(len(rows))]
  return {field: [example[field].decode() for example in examples] for field in FIELDS}


def _prepared(data_dir: str, seed: int) -> Dates:
  config = next((config for config in Dates.BUILDER_CONFIGS if config.seed == seed), None) or SeedConfig(seed)
  builder = Dates(data_dir=data_dir, config=config, file_format='array_record')
  if builder.data_path.exists():
    return builder
  tfds.disable_progress_bar()
  try:
    with contextlib.redirect_stdout(io.StringIO()):  # tfds announces downloads there, and programs write results there
      builder.download_and_prepare()
  except OSError as error:
    if not builder.data_path.exists():
      raise UserError(f'{data_dir}: cannot hold the dates data: {error.strerror or error}') from None
    builder = Dates(data_dir=data_dir, config=config, file_format='array_record')  # another process was faster
  finally:
    tfds.enable_progress_bar()
  return builder


def _pick(draw, options: Sequence):
  return options[int(draw() * len(options))]


def _draw(draw, language: date_formats.Language) -> tuple[datetime.date, Labelled] | None:
  """Draws a date and writes it; None when what comes out is too long or can be read in two ways."""
  pattern = _pick(draw, language.free if draw() < FREE_SHARE else language.patterns)
  date = _date(draw, short_year=any(piece.form == 'yy' for piece in pattern))
  zero = language.zero if draw() < NATIVE_SHARE else '0'
  case = _pick(draw, CASES) if language.cased else str
  labelled = []
  for piece in pattern:
    text = _format_piece(piece, date, language, zero)
    if piece.form in language.names:
      if not date_formats.is_unambiguous_name(piece.label, text):
        return None
      text = text.removesuffix('.') if draw() < NO_DOT_SHARE else text
    labelled += [(char, piece.label) for char in unicodedata.normalize('NFC', case(text))]
  compact = ''.join(piece.form for piece in pattern) == date_formats.COMPACT
  if draw() < SPACING_SHARE:
    labelled = _respaced(draw, labelled)
  source = ''.join(char for char, _ in labelled)
  fine = len(source) <= MAX_LENGTH and unicodedata.is_normalized('NFC', source) and source == source.strip()
  return (date, labelled) if fine and (compact or not _merged(labelled)) else None


def _date(draw, short_year: bool) -> datetime.date:
  first, last = (1950, 2049) if short_year else (1900, 2099)
  year, month = first + int(draw() * (last + 1 - first)), 1 + int(draw() * 12)
  return datetime.date(year, month, 1 + int(draw() * calendar.monthrange(year, month)[1]))


def _format_piece(piece: date_formats.Piece, date: datetime.date, language: date_formats.Language, zero: str) -> str:
  """Returns the text of one piece of a pattern."""
  label, form = piece
  if label == '':
    return form
  if form in language.names:
    return language.names[form][date.month if label == 'M' else date.weekday()]
  digits = {'y': f'{date.year:04d}', 'M': f'{date.month:0{len(form)}d}', 'd': f'{date.day:0{len(form)}d}'}[label]
  return ''.join(chr(ord(zero) + int(digit)) for digit in (digits[-2:] if form == 'yy' else digits))


def _respaced(draw, labelled: Labelled) -> Labelled:
  """Doubles or drops spaces between the fields, and puts spaces around separators; labels stay with characters."""
  result = []
  for i, (char, label) in enumerate(labelled):
    inner = label == '' and 0 < i < len(labelled) - 1
    if inner and char == ' ':
      mergeable = _kind(labelled[i - 1][0]) != _kind(labelled[i + 1][0])
      result += [(' ', '')] * _pick(draw, (0, 0, 1, 2) if mergeable else (1, 1, 2))
    elif inner and char in SEPARATORS:
      around = _pick(draw, (('', ''), ('', ' '), (' ', ' ')))
      result += [(c, '') for c in f'{around[0]}{char}{around[1]}']
    else:
      result.append((char, label))
  return result


def _kind(char: str) -> str:
  if date_formats.is_digit(char):
    return 'digit'
  return 'letter' if unicodedata.category(char)[0] in 'LM' else 'other'


def _merged(labelled: Labelled) -> bool:
  """Whether the digits of two fields meet."""
  neighbours = itertools.pairwise(labelled)
  return any(a != b and date_formats.is_digit(x) and date_formats.is_digit(y) for (x, a), (y, b) in neighbours)


def _links(labelled: Labelled) -> str:
  links = []
  for label, places in PLACES.items():
    span = [i for i, (_, of) in enumerate(labelled) if of == label]
    digits = [i for i in span if date_formats.is_digit(labelled[i][0])]
    for back, place in enumerate(reversed(places), start=1):
      own = digits[-back:][:1] if back <= len(digits) else digits
      links += [(i, place) for i in own or span]
  return ' '.join(f'{i}-{j}' for i, j in sorted(links, key=lambda link: (link[1], link[0])))
