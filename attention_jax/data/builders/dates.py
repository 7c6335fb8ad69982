"""Generated dates in many languages -> ISO 8601, with gold links.

Sources use names of CLDR, and patterns of CLDR or FREE_PATTERNS (`date_formats`), in the Gregorian calendar, years 1900
to 2099, with noise in case, spacing and abbreviations; the target is always `YYYY-MM-DD`. Every source has exactly one
reading, without information on its locale:

- a month in digits: day-month-year, or year-month-day with a year of four digits; never month-day-year;
- eight digits in a row: year, month, day;
- a year of two digits: 1950 to 2049, and it comes after the day (and after a month in digits);
- a name that is another month in another locale, or a weekday that is also a month somewhere, is not used;
- spaces are dropped only between two kinds of characters (digit, letter, other), so that no two numbers or words merge.

Spaces are U+0020, text is NFC, and invisible characters (direction marks, joiners) are left out. In locales whose
default numbering system is not Latin, a share of NATIVE_SHARE of the dates uses their own digits.

Gold links join each target character with the source characters that it comes from:

- a digit that is in the source has one link, also if it is part of the name of a month ('tháng 5');
- both digits of a century that is not in the source have links to both digits of the year;
- a leading zero that is not in the source has a link to the digit after it;
- if the source has the month as a name without digits, both digits of the month have links to the whole name;
- the two '-' have no links.

Metrics that distinguish sure from possible links count the only link of a character as sure, and several as possible.
"""

import calendar
import contextlib
import datetime
import io
import itertools
import os
import random
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import tensorflow_datasets as tfds

from attention_jax.data.builders import date_formats
from attention_jax.data.tfds_sets import report_damage
from attention_jax.errors import UserError, choose

Item = TypeVar('Item')
Draw = Callable[[], float]
Labelled = list[tuple[str, str]]  # (character, label of its piece)

SIZES = {'train': 20000, 'validation': 1000, 'test': 1000, 'unseen': 1000}
FIELDS = ('source', 'target', 'links', 'locale')
MAX_LENGTH = 40  # source characters
PLACES = {'y': (0, 1, 2, 3), 'M': (5, 6), 'd': (8, 9)}  # positions of the fields in YYYY-MM-DD

FREE_SHARE = 0.4  # of the examples use FREE_PATTERNS, the others patterns of the locale
NATIVE_SHARE = 0.5  # of the dates use native digits
CASES = (str, str, str, str, str.lower, str.lower, str.upper, str.title)  # str: unchanged; drawn uniformly
SPACING_SHARE = 0.3  # of the examples have spacing noise
NO_DOT_SHARE = 0.2  # of the names lose the dot of their abbreviation
SEPARATORS = frozenset('./-,')
# Every space except a single one between two digits; ignored when sources are compared.
INSIGNIFICANT_SPACE = re.compile(r'(?<!\d) | (?!\d)')


class SplitSlots(NamedTuple):
  """Locales of a split and its share of all sources: those whose hash lies in the slots [start, stop) of 23.

  The hash keeps the splits disjoint without comparing them.
  """

  start: int
  stop: int
  locales: tuple[str, ...]


SPLIT_PARTS = {
  'train': SplitSlots(0, 20, date_formats.SEEN_LOCALES),
  'validation': SplitSlots(20, 21, date_formats.SEEN_LOCALES),
  'test': SplitSlots(21, 22, date_formats.SEEN_LOCALES),
  'unseen': SplitSlots(22, 23, date_formats.UNSEEN_LOCALES),
}


def generate(split: str, seed: int = 0) -> Iterator[dict[str, str]]:
  """Yields the examples of a split, a pure function of (split, seed).

  The sources of a split are distinct, and no source is in two splits, whatever their seeds. Sources that differ only in
  case and spacing count as one; only a single space between two numbers ('1930 12 11') is a difference.

  Args:
    split: 'train', 'validation' and 'test' share their locales; 'unseen' has ten that no other split has.
    seed: any integer.

  Yields:
    source, target ('YYYY-MM-DD'), links (Pharaoh format, 'source-target' character indices, 0-based), locale.

  Raises:
    UserError: for an unknown split.
  """
  start, stop, locales = SPLIT_PARTS[choose(split, SPLIT_PARTS, 'split of dates')]
  # Every draw is made with random(), the only method whose values are guaranteed across Python versions.
  draw = random.Random(f'dates {split} {seed}').random
  drawn_sources = set()
  while len(drawn_sources) < SIZES[split]:
    locale = _pick(draw, locales)
    example = _draw_example(draw, date_formats.locale_formats(locale))
    if example is None:
      continue
    date, labelled = example
    source = ''.join(char for char, _ in labelled)
    key = INSIGNIFICANT_SPACE.sub('', source.casefold())
    slot = zlib.crc32(key.encode()) * 23 >> 32
    if key not in drawn_sources and start <= slot < stop:
      drawn_sources.add(key)
      yield {'source': source, 'target': date.isoformat(), 'links': _format_links(labelled), 'locale': locale}


class SeedConfig(tfds.core.BuilderConfig):
  """The data of one seed."""

  def __init__(self, seed: int):
    super().__init__(name=f'seed{seed}', description=f'Generated from seed {seed}.')
    self.seed = seed


class Dates(tfds.core.GeneratorBasedBuilder):
  """`generate` as a tfds data set (array_record, read by as_data_source). The order of the examples is kept."""

  url_infos = None  # nothing is downloaded, and a search for checksums needs a package that tfds does not declare
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
    return {split: self._generate_examples(split) for split in SPLIT_PARTS}

  def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
    return enumerate(generate(split, self.builder_config.seed))


def load(split: str, data_dir: str, seed: int = 0) -> dict[str, list[str]]:
  """Reads a split from `data_dir`, where the data set is prepared on first use.

  Preparation is atomic: tfds writes into a separate folder and renames it. A killed preparation leaves nothing that
  could be mistaken for the data, and of two concurrent processes the slower one uses what the faster one wrote.

  Args:
    split: a key of SPLIT_PARTS.
    data_dir: the folder of tfds data sets.
    seed: seed of `generate`.

  Returns:
    A list for each field of `generate`.

  Raises:
    UserError: for an unknown split, or a `data_dir` that cannot be written to, or whose files are damaged.
  """
  choose(split, SPLIT_PARTS, 'split of dates')
  folder = os.path.join(data_dir, Dates.name, _config(seed).name)
  with report_damage(f'the dates data in {folder}', '; delete the folder to generate them again'):
    rows = _open_or_prepare(data_dir, seed).as_data_source(split)
    examples = rows.__getitems__(range(len(rows)))  # a batch; one row at a time takes 1.6 times as long
  return {field: [example[field].decode() for example in examples] for field in FIELDS}


def _open_or_prepare(data_dir: str, seed: int) -> Dates:
  config = _config(seed)
  builder = Dates(data_dir=data_dir, config=config, file_format='array_record')
  if builder.data_path.exists():
    return builder
  tfds.disable_progress_bar()
  try:
    with contextlib.redirect_stdout(io.StringIO()):  # tfds reports downloads on stdout, where programs write results
      builder.download_and_prepare()
  except OSError as error:
    if not builder.data_path.exists():
      raise UserError(f'{data_dir}: cannot write the dates data: {error.strerror or error}') from None
    builder = Dates(data_dir=data_dir, config=config, file_format='array_record')  # another process was faster
  finally:
    tfds.enable_progress_bar()
  return builder


def _config(seed: int) -> SeedConfig:
  return next((config for config in Dates.BUILDER_CONFIGS if config.seed == seed), None) or SeedConfig(seed)


def _pick(draw: Draw, options: Sequence[Item]) -> Item:
  return options[int(draw() * len(options))]


def _draw_example(draw: Draw, formats: date_formats.LocaleFormats) -> tuple[datetime.date, Labelled] | None:
  """Draws a date and formats it; None if the text is too long, not NFC, padded with spaces, or has two readings."""
  pattern = _pick(draw, formats.free_patterns if draw() < FREE_SHARE else formats.patterns)
  date = _draw_date(draw, is_short_year=any(piece.form == 'yy' for piece in pattern))
  zero = formats.zero if draw() < NATIVE_SHARE else '0'
  case = _pick(draw, CASES) if formats.cased else str
  labelled = []
  for piece in pattern:
    text = _format_piece(piece, date, formats, zero)
    if piece.form in formats.names:
      if not date_formats.is_unambiguous_name(piece.label, text):
        return None
      text = text.removesuffix('.') if draw() < NO_DOT_SHARE else text
    labelled += [(char, piece.label) for char in unicodedata.normalize('NFC', case(text))]
  if draw() < SPACING_SHARE:
    labelled = _add_spacing_noise(draw, labelled)
  source = ''.join(char for char, _ in labelled)
  is_valid = len(source) <= MAX_LENGTH and unicodedata.is_normalized('NFC', source) and source == source.strip()
  is_compact = ''.join(piece.form for piece in pattern) == date_formats.COMPACT
  if not is_valid or (not is_compact and _has_adjacent_numbers(labelled)):
    return None
  return date, labelled


def _draw_date(draw: Draw, is_short_year: bool) -> datetime.date:
  first, last = (1950, 2049) if is_short_year else (1900, 2099)
  year = first + int(draw() * (last + 1 - first))
  month = 1 + int(draw() * 12)
  return datetime.date(year, month, 1 + int(draw() * calendar.monthrange(year, month)[1]))


def _format_piece(
  piece: date_formats.Piece, date: datetime.date, formats: date_formats.LocaleFormats, zero: str
) -> str:
  """The text of one piece of a pattern."""
  label, form = piece
  if label == '':
    return form
  if form in formats.names:
    return formats.names[form][date.month if label == 'M' else date.weekday()]
  digits = {'y': f'{date.year:04d}', 'M': f'{date.month:0{len(form)}d}', 'd': f'{date.day:0{len(form)}d}'}[label]
  if form == 'yy':
    digits = digits[-2:]
  return ''.join(chr(ord(zero) + int(digit)) for digit in digits)


def _add_spacing_noise(draw: Draw, labelled: Labelled) -> Labelled:
  """Doubles or drops spaces between the fields, and adds spaces around separators; characters keep their labels."""
  result = []
  for i, (char, label) in enumerate(labelled):
    is_inner_literal = label == '' and 0 < i < len(labelled) - 1
    if is_inner_literal and char == ' ':
      can_drop = _character_kind(labelled[i - 1][0]) != _character_kind(labelled[i + 1][0])
      num_spaces = _pick(draw, (0, 0, 1, 2) if can_drop else (1, 1, 2))
      result += [(' ', '')] * num_spaces
    elif is_inner_literal and char in SEPARATORS:
      before, after = _pick(draw, (('', ''), ('', ' '), (' ', ' ')))
      result += [(c, '') for c in f'{before}{char}{after}']
    else:
      result.append((char, label))
  return result


def _character_kind(char: str) -> str:
  if date_formats.is_digit(char):
    return 'digit'
  return 'letter' if unicodedata.category(char)[0] in 'LM' else 'other'


def _has_adjacent_numbers(labelled: Labelled) -> bool:
  """Whether the digits of two fields are adjacent."""
  neighbours = itertools.pairwise(labelled)
  return any(a != b and date_formats.is_digit(x) and date_formats.is_digit(y) for (x, a), (y, b) in neighbours)


def _format_links(labelled: Labelled) -> str:
  """The gold links in Pharaoh format, sorted by target position."""
  links = []
  for label, target_positions in PLACES.items():
    span = [i for i, (_, char_label) in enumerate(labelled) if char_label == label]
    digits = [i for i in span if date_formats.is_digit(labelled[i][0])]
    for back, target in enumerate(reversed(target_positions), start=1):
      if not digits:  # a name without digits
        sources = span
      elif back <= len(digits):
        sources = [digits[-back]]
      else:  # a century or a leading zero that is not in the source
        sources = digits
      links += [(source, target) for source in sources]
  return ' '.join(f'{source}-{target}' for source, target in sorted(links, key=lambda link: (link[1], link[0])))
