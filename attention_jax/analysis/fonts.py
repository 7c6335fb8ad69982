"""Fonts for every script: matplotlib's DejaVu Sans, and fallback fonts for what it lacks.

The fallback fonts are those of the folder font_files, which a clone has and a wheel does not, or without it the fonts
of the system. They are registered when a text first needs one, and no setting of matplotlib is changed: the font
families are passed with each text.
"""

import functools
import unicodedata
from collections.abc import Mapping
from pathlib import Path

FONT_FILES = Path(__file__).parent / 'font_files'
DEFAULT_FAMILY = 'DejaVu Sans'
VISIBLE_SIGNS = {
  ' ': '␣',
  '\t': '⇥',
  '\u00a0': '⍽',
  '\u202f': '⍽',
  '\u200c': 'ZWNJ',
  '\u200d': 'ZWJ',
  '\u200e': 'LRM',
  '\u200f': 'RLM',
}
DOTTED_CIRCLE = '◌'
FIRST_STRONG_ISOLATE = '\u2068'
POP_ISOLATE = '\u2069'

Coverage = Mapping[str, frozenset[int]]


@functools.cache
def glyph_coverage() -> Coverage:
  """Returns the code points that each font family has glyphs for, DejaVu Sans first; registers the fallback fonts."""
  return _default_coverage() | (_file_coverage() if FONT_FILES.is_dir() else _system_coverage())


def font_families(text: str) -> list[str]:
  """Returns the families that `text` needs.

  The family with most of its distinct characters comes first, so that a combining mark is drawn from the font of its
  base. Ties go to the first family of `glyph_coverage`.
  """
  missing = {ord(char) for char in text}
  coverage = _default_coverage() if missing <= _default_coverage()[DEFAULT_FAMILY] else glyph_coverage()
  families = []
  while missing:
    family = max(coverage, key=lambda name: len(missing & coverage[name]))
    if not missing & coverage[family]:
      break
    families.append(family)
    missing -= coverage[family]
  return families or [DEFAULT_FAMILY]


def font_file(text: str) -> str:
  """Returns the file of the family that has most of `text`, for programs that draw with one font."""
  from matplotlib import font_manager

  return font_manager.findfont(font_families(text)[0])


def visible_form(token: str) -> str:
  """Returns `token` with visible signs for white space and controls, and a dotted circle under a lone combining mark.

  An empty token becomes '∅'. The circle is drawn only if one font has both characters. Format characters (joiners,
  direction marks) are named only in a token without other characters: elsewhere they shape the text.
  """
  if not token:
    return '∅'
  if all(unicodedata.category(char) == 'Cf' for char in token):
    return ' '.join(VISIBLE_SIGNS.get(char, f'U+{ord(char):04X}') for char in token)
  return ''.join(_base_for_mark(before, char) + _sign(char) for before, char in zip(' ' + token, token, strict=False))


def isolate(text: str) -> str:
  """Wraps `text` in a directional isolate if a part of it is written from right to left.

  It can then be joined with other text. Without the isolate, the Unicode bidirectional algorithm draws the digits of a
  date after Arabic in another order.
  """
  is_right_to_left = any(unicodedata.bidirectional(char) in ('R', 'AL') for char in text)
  return f'{FIRST_STRONG_ISOLATE}{text}{POP_ISOLATE}' if is_right_to_left else text


@functools.cache
def _default_coverage() -> dict[str, frozenset[int]]:
  return {DEFAULT_FAMILY: _code_points(DEFAULT_FAMILY)}


def _file_coverage() -> dict[str, frozenset[int]]:
  """Coverage of the fonts of FONT_FILES; the family of each is the stem of its file name."""
  from matplotlib import font_manager

  paths = sorted(path for path in FONT_FILES.iterdir() if path.suffix in ('.otf', '.ttf'))
  for path in paths:
    font_manager.fontManager.addfont(path)
  return {path.stem: _code_points(path.stem) for path in paths}


def _system_coverage() -> dict[str, frozenset[int]]:
  """Coverage of the regular fonts that matplotlib finds on this system, by name."""
  from matplotlib import font_manager

  fonts = [font for font in font_manager.fontManager.ttflist if font.style == 'normal' and font.weight == 400]
  return {name: _code_points(name) for name in sorted({font.name for font in fonts} - {DEFAULT_FAMILY})}


def _code_points(family: str) -> frozenset[int]:
  from matplotlib import font_manager

  return frozenset(font_manager.get_font(font_manager.findfont(family)).get_charmap())


def _base_for_mark(before: str, char: str) -> str:
  """Returns a dotted circle for a combining mark without a base, if one font has both; else ''."""
  is_lone = unicodedata.category(char).startswith('M') and before.isspace()
  if not is_lone:
    return ''
  needed = {ord(char), ord(DOTTED_CIRCLE)}
  return DOTTED_CIRCLE if any(needed <= codes for codes in glyph_coverage().values()) else ''


def _sign(char: str) -> str:
  """Returns a character, or a visible sign for white space and controls."""
  category = unicodedata.category(char)
  if category == 'Cc':
    picture = chr(0x2400 + ord(char)) if ord(char) < 0x20 else f'U+{ord(char):04X}'
    return VISIBLE_SIGNS.get(char, picture)
  return VISIBLE_SIGNS.get(char, '␣') if category.startswith('Z') else char
