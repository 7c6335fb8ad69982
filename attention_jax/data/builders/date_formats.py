"""How people write dates: CLDR's patterns and names (by way of Babel), cut into labelled pieces.

A pattern is a tuple of pieces, so that whoever renders it knows what each character belongs to: the year, the
month, the day or none of them. Only patterns that can be read without knowing the locale are kept: see `decidable`.
"""

import functools
import unicodedata
from collections.abc import Iterator, Mapping
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
# digits), Pashto (Persian, with its digits). Far from every seen one, though in a known script: Basque, Welsh.
UNSEEN_LOCALES = ('gl', 'sk', 'nn', 'mk', 'ms', 'tk', 'as', 'ps', 'eu', 'cy')

# Ways of writing that people use in any language, in CLDR's notation.
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
COMPACT = 'yMMdd'  # the only digits written without anything between them: eight, year first
SKELETONS = ('yMEd', 'yMMMd', 'yMMMEd', 'yMMMMd', 'yMMMMEd')

ZEROS = {'latn': '0', 'arab': '٠', 'arabext': '۰', 'beng': '০', 'deva': '०', 'mymr': '၀'}  # CLDR's numbering systems
UNICASE = frozenset({'ka'})  # str.upper gives letters (Mtavruli) that hardly any font has


class Piece(NamedTuple):
  """Part of a pattern. `label` is '' for a literal, else y, M, d or E; `form` the literal or CLDR's field ('MMM')."""

  label: str
  form: str


Pattern = tuple[Piece, ...]


class Language(NamedTuple):
  """What one locale writes.

  Attributes:
    code: the locale's identifier.
    patterns: CLDR's own patterns, those that are decidable.
    free: FREE_PATTERNS in this language, those that are decidable.
    names: field (such as 'MMM' or 'EEEE') -> names; months count from 1, weekdays from Monday = 0.
    zero: the digit zero of the locale's default numbering system.
    cased: whether upper and lower case are noise here.
  """

  code: str
  patterns: tuple[Pattern, ...]
  free: tuple[Pattern, ...]
  names: Mapping[str, Mapping[int, str]]
  zero: str
  cased: bool


def normalize_text(text: str) -> str:
  """Returns `text` in NFC with every kind of space as U+0020 without what nobody sees (direction marks, joiners)."""
  shown = (' ' if unicodedata.category(c) == 'Zs' else c for c in text if unicodedata.category(c) != 'Cf')
  return unicodedata.normalize('NFC', ''.join(shown))


def is_digit(char: str) -> bool:
  """Whether `char` is a decimal digit of any script."""
  return unicodedata.category(char) == 'Nd'


def fold(name: str) -> str:
  """Returns what is left of a name when case, abbreviating dots and spacing do not count."""
  return unicodedata.normalize('NFC', ''.join(name.casefold().replace('.', '').split()))


@functools.cache
def language(code: str) -> Language:
  """Returns what the locale `code` writes, read from Babel's CLDR data."""
  locale = Locale.parse(code)
  names = dict(_names(locale))
  skeletons = locale.datetime_skeletons
  own = [cldr.get_date_format(style, locale).pattern for style in ('full', 'long', 'medium', 'short')]
  own += [skeletons[name].pattern for name in SKELETONS if name in skeletons]
  return Language(
    code=code,
    patterns=_parsed(own, locale, names),
    free=_parsed(FREE_PATTERNS, locale, names),
    names=names,
    zero=ZEROS[locale.default_numbering_system],
    cased=code not in UNICASE,
  )


def is_unambiguous_name(label: str, name: str) -> bool:
  """Whether a name means the same whatever the locale, by all the names of SEEN_LOCALES and UNSEEN_LOCALES.

  Not so for a month that is another month elsewhere (listopad: November in Polish, October in Croatian) and for a
  weekday that is a month somewhere (mar.: Tuesday in Spanish, March in English). No example contains one of these.
  """
  readings = _months().get(fold(name), ())
  return len(readings) == 1 if label == 'M' else not readings


@functools.cache
def _months() -> Mapping[str, frozenset[int]]:
  """Returns folded name -> the months it means in one locale or another."""
  found = {}
  for code in SEEN_LOCALES + UNSEEN_LOCALES:
    for field, names in language(code).names.items():
      for number, name in names.items() if field[0] in 'ML' else ():
        found.setdefault(fold(name), set()).add(number)
  return {name: frozenset(numbers) for name, numbers in found.items()}


def decidable(pattern: Pattern) -> bool:
  """Whether a pattern can be read without knowing its locale.

  - A month in digits: day-month-year, or year-month-day with a year of four digits. Never month-day-year.
  - A month by name: any order, but a year of two digits comes after the day.
  """
  order = ''.join(piece.label for piece in pattern if piece.label in 'yMd')
  forms = {piece.label: piece.form for piece in pattern}
  short = forms['y'] == 'yy'
  if len(forms['M']) <= 2:
    return order == 'dMy' or (order == 'yMd' and not short)
  return not short or order.index('d') < order.index('y')


def _names(locale: Locale) -> Iterator[tuple[str, Mapping[int, str]]]:
  """Yields (field, names) for months and weekdays, leaving out what CLDR only fills in from its root ('M05', 'Tue')."""
  root = Locale.parse('en')
  for get, fields in ((cldr.get_month_names, 'ML'), (cldr.get_day_names, 'Ec')):
    for field, context in zip(fields, ('format', 'stand-alone'), strict=True):
      for width, count in (('abbreviated', 3), ('wide', 4)):
        names = {number: normalize_text(name) for number, name in get(width, context, locale).items()}
        missing = names[1].startswith('M0') or (locale != root and names == dict(get(width, context, root)))
        if not missing and len(set(names.values())) == len(names):
          yield field * count, names


def _parsed(patterns: list[str] | tuple[str, ...], locale: Locale, names: Mapping) -> tuple[Pattern, ...]:
  pieces = (_pieces(pattern, locale, names) for pattern in patterns)
  return tuple(dict.fromkeys(pattern for pattern in pieces if pattern and decidable(pattern)))


def _pieces(pattern: str, locale: Locale, names: Mapping) -> Pattern | None:
  """Returns a CLDR pattern as pieces; None if it is not one year, month and day, or uses a field without names."""
  pieces = []
  for kind, value in cldr.tokenize_pattern(pattern):
    if kind == 'chars':
      pieces.append(Piece('', normalize_text(value)))
      continue
    char, count = value
    if char == 'G':
      pieces.append(Piece('', normalize_text(cldr.get_era_names('wide' if count == 4 else 'abbreviated', locale)[1])))
    elif char == 'y':
      pieces.append(Piece('y', 'yy' if count == 2 else 'y'))
    elif char == 'd' or (char in 'ML' and count <= 2):
      pieces.append(Piece(char if char == 'd' else 'M', ('d' if char == 'd' else 'M') * count))
    elif char * max(count, 3) in names:
      pieces.append(Piece('M' if char in 'ML' else 'E', char * max(count, 3)))
    else:
      return None
  labels = ''.join(piece.label for piece in pieces)
  whole = sorted(labels.replace('E', '')) == ['M', 'd', 'y'] and labels.count('E') <= 1
  return tuple(pieces) if whole else None
