"""Date formats of many locales: patterns and names of CLDR (from Babel), parsed into labelled pieces.

A pattern is a tuple of pieces, each of which belongs to the year, the month, the day, the weekday or none of them, so
that every rendered character has a label. Only patterns that can be read without the locale are kept (`is_decidable`).
"""

import functools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from babel import Locale
from babel import dates as cldr

# Locales of train, validation and test.
SEEN_LOCALES = (
  'af',
  'am',
  'ar_EG',
  'az',
  'be',
  'bg',
  'bn',
  'ca',
  'cs',
  'da',
  'de',
  'el',
  'en',
  'eo',
  'es',
  'et',
  'fa',
  'fi',
  'fil',
  'fr',
  'ga',
  'gu',
  'ha',
  'he',
  'hi',
  'hu',
  'hy',
  'id',
  'ig',
  'is',
  'it',
  'ja',
  'ka',
  'kk',
  'km',
  'kn',
  'ko',
  'ky',
  'lb',
  'lo',
  'lt',
  'lv',
  'ml',
  'mn',
  'mr',
  'mt',
  'my',
  'nb',
  'ne',
  'nl',
  'pa',
  'pl',
  'pt',
  'ro',
  'ru',
  'si',
  'sl',
  'so',
  'sq',
  'sr',
  'sv',
  'sw',
  'ta',
  'te',
  'th',
  'tr',
  'uk',
  'ur',
  'uz',
  'vi',
  'zh',
  'zu',
)
# Locales of the split 'unseen'. Related to seen ones: Galician (Spanish, Portuguese), Slovak (Czech), Nynorsk (Bokmål),
# Macedonian (Bulgarian, Serbian), Malay (Indonesian), Turkmen (Turkish, Azerbaijani), Assamese (Bengali, with its
# digits), Pashto (Persian, with its digits). Without a close relative among seen ones, but in a seen script: Basque,
# Welsh.
UNSEEN_LOCALES = ('gl', 'sk', 'nn', 'mk', 'ms', 'tk', 'as', 'ps', 'eu', 'cy')

# Patterns that are used with the names of any locale, in the notation of CLDR.
FREE_PATTERNS = (
  'd MMMM y',
  'd MMM y',
  'd. MMMM y',
  'd MMMM, y',
  'MMMM d, y',
  'MMM d, y',
  'MMMM d y',
  'y MMMM d',
  'y, d MMMM',
  'EEEE, d MMMM y',
  'EEEE d. MMMM y',
  'EEEE, MMMM d, y',
  'd MMMM y, EEEE',
  'd MMMM y (EEEE)',
  'y MMMM d, EEEE',
  'EEE, d MMM y',
  'EEE d MMMM y',
  'd-MMM-y',
  'd/MMM/y',
  'y-MMM-dd',
  'd MMM yy',
  'dd-MMM-yy',
  'MMM d, yy',
  'd.M.y',
  'dd.MM.y',
  'd/M/y',
  'dd-MM-y',
  'd-M-yy',
  'dd/MM/yy',
  'd.M.yy',
  'y-MM-dd',
  'y/M/d',
  'y.MM.dd',
  'y M d',
  'yMMdd',
)
COMPACT = 'yMMdd'  # the only pattern of digits without separators: eight digits, year first
# Sets of fields for which CLDR has a pattern in many locales.
SKELETONS = ('yMEd', 'yMMMd', 'yMMMEd', 'yMMMMd', 'yMMMMEd')

ZEROS = {'latn': '0', 'arab': '٠', 'arabext': '۰', 'beng': '০', 'deva': '०', 'mymr': '၀'}  # by numbering system of CLDR
UNICASE = frozenset({'ka'})  # str.upper returns letters (Mtavruli) that few fonts contain


class Piece(NamedTuple):
  """Part of a pattern.

  Attributes:
    label: y, M, d or E; '' for a literal.
    form: the literal, or the field of CLDR ('MMM').
  """

  label: str
  form: str


Pattern = tuple[Piece, ...]


class LocaleFormats(NamedTuple):
  """Date formats of one locale.

  Attributes:
    code: identifier of the locale.
    patterns: patterns of CLDR for this locale, those that are decidable.
    free_patterns: FREE_PATTERNS with the names of this locale, those that are decidable.
    names: field (such as 'MMM' or 'EEEE') -> names; months count from 1, weekdays from Monday = 0.
    zero: the digit zero of the default numbering system of the locale.
    cased: whether examples vary in case; False for the locales of UNICASE.
  """

  code: str
  patterns: tuple[Pattern, ...]
  free_patterns: tuple[Pattern, ...]
  names: Mapping[str, Mapping[int, str]]
  zero: str
  cased: bool


def normalize_text(text: str) -> str:
  """Returns `text` in NFC, with every space as U+0020 and without invisible characters (direction marks, joiners)."""
  visible = (' ' if unicodedata.category(c) == 'Zs' else c for c in text if unicodedata.category(c) != 'Cf')
  return unicodedata.normalize('NFC', ''.join(visible))


def is_digit(char: str) -> bool:
  """Returns whether `char` is a decimal digit of any script."""
  return unicodedata.category(char) == 'Nd'


def fold(name: str) -> str:
  """Returns a name without case, dots of abbreviations and spaces."""
  return unicodedata.normalize('NFC', ''.join(name.casefold().replace('.', '').split()))


@functools.cache
def locale_formats(code: str) -> LocaleFormats:
  """Returns the date formats of the locale `code`, read from the CLDR data of Babel."""
  locale = Locale.parse(code)
  names = dict(_names(locale))
  skeletons = locale.datetime_skeletons
  patterns = [cldr.get_date_format(style, locale).pattern for style in ('full', 'long', 'medium', 'short')]
  patterns += [skeletons[name].pattern for name in SKELETONS if name in skeletons]
  return LocaleFormats(
    code=code,
    patterns=_parse_patterns(patterns, locale, names),
    free_patterns=_parse_patterns(FREE_PATTERNS, locale, names),
    names=names,
    zero=ZEROS[locale.default_numbering_system],
    cased=code not in UNICASE,
  )


def is_unambiguous_name(label: str, name: str) -> bool:
  """Returns whether the name of a month or weekday is unambiguous.

  A month is ambiguous if its name is that of another month in any of SEEN_LOCALES and UNSEEN_LOCALES, and a weekday if
  its name is that of a month (mar: Tuesday in Spanish, March in English). No example contains an ambiguous name.

  Args:
    label: 'M' for a month, 'E' for a weekday.
    name: the name.
  """
  months = _months_by_name().get(fold(name), ())
  return len(months) == 1 if label == 'M' else not months


@functools.cache
def _months_by_name() -> Mapping[str, frozenset[int]]:
  """Folded name -> the months that it means in SEEN_LOCALES and UNSEEN_LOCALES."""
  months = {}
  for code in SEEN_LOCALES + UNSEEN_LOCALES:
    for field, names in locale_formats(code).names.items():
      if field[0] not in 'ML':
        continue
      for number, name in names.items():
        months.setdefault(fold(name), set()).add(number)
  return {name: frozenset(numbers) for name, numbers in months.items()}


def is_decidable(pattern: Pattern) -> bool:
  """Returns whether a pattern can be read without its locale.

  - A month in digits: day-month-year, or year-month-day with a year of four digits. Never month-day-year.
  - A month by name: any order, but a year of two digits comes after the day.
  """
  order = ''.join(piece.label for piece in pattern if piece.label in 'yMd')
  forms = {piece.label: piece.form for piece in pattern}
  is_short_year = forms['y'] == 'yy'
  if len(forms['M']) <= 2:
    return order == 'dMy' or (order == 'yMd' and not is_short_year)
  return not is_short_year or order.index('d') < order.index('y')


def _names(locale: Locale) -> Iterator[tuple[str, Mapping[int, str]]]:
  """Yields (field, names) of months and weekdays.

  Leaves out fields with placeholders of CLDR ('M05'), English names in another locale, or a name that occurs twice.
  """
  english = Locale.parse('en')
  for get, fields in ((cldr.get_month_names, 'ML'), (cldr.get_day_names, 'Ec')):
    for field, context in zip(fields, ('format', 'stand-alone'), strict=True):
      for width, count in (('abbreviated', 3), ('wide', 4)):
        names = {number: normalize_text(name) for number, name in get(width, context, locale).items()}
        is_inherited = names[1].startswith('M0') or (locale != english and names == dict(get(width, context, english)))
        if not is_inherited and len(set(names.values())) == len(names):
          yield field * count, names


def _parse_patterns(patterns: Sequence[str], locale: Locale, names: Mapping) -> tuple[Pattern, ...]:
  """The distinct decidable patterns, parsed."""
  parsed = (_parse_pattern(pattern, locale, names) for pattern in patterns)
  return tuple(dict.fromkeys(pattern for pattern in parsed if pattern and is_decidable(pattern)))


def _parse_pattern(pattern: str, locale: Locale, names: Mapping) -> Pattern | None:
  """A CLDR pattern as pieces; None for a field without names, a missing year, month or day, or a repeated part."""
  pieces = []
  for kind, value in cldr.tokenize_pattern(pattern):
    if kind == 'chars':
      pieces.append(Piece('', normalize_text(value)))
      continue
    char, count = value
    if char == 'G':
      width = 'wide' if count == 4 else 'abbreviated'
      pieces.append(Piece('', normalize_text(cldr.get_era_names(width, locale)[1])))
    elif char == 'y':
      pieces.append(Piece('y', 'yy' if count == 2 else 'y'))
    elif char == 'd':
      pieces.append(Piece('d', 'd' * count))
    elif char in 'ML' and count <= 2:
      pieces.append(Piece('M', 'M' * count))
    elif char * max(count, 3) in names:
      pieces.append(Piece('M' if char in 'ML' else 'E', char * max(count, 3)))
    else:
      return None
  labels = ''.join(piece.label for piece in pieces)
  is_date = sorted(labels.replace('E', '')) == ['M', 'd', 'y'] and labels.count('E') <= 1
  return tuple(pieces) if is_date else None
