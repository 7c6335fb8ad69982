"""Fonts for every script: matplotlib's DejaVu Sans, and fallback fonts for what it lacks.

The fallback fonts are those of the distribution attention_jax_fonts (folder fonts/ of the repository) or, without it,
the fonts of the system. No font is registered before the first picture, and no setting of matplotlib is changed: the
font families are passed with each text.
"""

import functools
import importlib
import importlib.util
import unicodedata
from collections.abc import Mapping

DISTRIBUTION = 'attention_jax_fonts'
FIRST = 'DejaVu Sans'
VISIBLE = {
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

Coverage = Mapping[str, frozenset[int]]


@functools.cache
def glyph_coverage() -> Coverage:
  """Returns the code points that each font family has glyphs for, DejaVu Sans first; registers the fallback fonts."""
  return _first_coverage() | (_distributed_coverage() if _has_distribution() else _system_coverage())


def font_families(text: str) -> list[str]:
  """Returns the families that `text` needs.

  The family with most of its characters comes first, so that a combining mark is drawn from the font of its base. Of
  families with equally many, the first of `glyph_coverage` is taken.
  """
  missing = {ord(char) for char in text}
  coverage = _first_coverage() if missing <= _first_coverage()[FIRST] else glyph_coverage()
  families = []
  while missing:
    family = max(coverage, key=lambda name: len(missing & coverage[name]))
    if not missing & coverage[family]:
      break
    families.append(family)
    missing -= coverage[family]
  return families or [FIRST]


def font_file(text: str) -> str:
  """Returns the file of the family that has most of `text`, for programs that draw with one font."""
  from matplotlib import font_manager

  return font_manager.findfont(font_families(text)[0])


def visible_form(token: str) -> str:
  """Returns `token` with visible signs for white space and controls, and a dotted circle under a lone combining mark.

  Format characters (joiners, direction marks) are named only in a token of nothing else: elsewhere they shape the text.
  """
  if not token:
    return '∅'
  if all(unicodedata.category(char) == 'Cf' for char in token):
    return ' '.join(VISIBLE.get(char, f'U+{ord(char):04X}') for char in token)
  return ''.join(_carrier(before, char) + _sign(char) for before, char in zip(' ' + token, token, strict=False))


@functools.cache
def _first_coverage() -> dict[str, frozenset[int]]:
  return {FIRST: _code_points(FIRST)}


def _has_distribution() -> bool:
  return importlib.util.find_spec(DISTRIBUTION) is not None


def _distributed_coverage() -> dict[str, frozenset[int]]:
  from matplotlib import font_manager

  paths = importlib.import_module(DISTRIBUTION).font_paths()
  for path in paths:
    font_manager.fontManager.addfont(path)
  return {path.stem: _code_points(path.stem) for path in paths}


def _system_coverage() -> dict[str, frozenset[int]]:
  """Coverage of the regular fonts that matplotlib finds on this system, by name."""
  from matplotlib import font_manager

  fonts = [font for font in font_manager.fontManager.ttflist if font.style == 'normal' and font.weight == 400]
  return {name: _code_points(name) for name in sorted({font.name for font in fonts} - {FIRST})}


def _code_points(family: str) -> frozenset[int]:
  from matplotlib import font_manager

  return frozenset(font_manager.get_font(font_manager.findfont(family)).get_charmap())


def _carrier(before: str, char: str) -> str:
  """A dotted circle for a combining mark without a base, if one font has both."""
  is_lone = unicodedata.category(char).startswith('M') and before.isspace()
  if not is_lone:
    return ''
  needed = {ord(char), ord(DOTTED_CIRCLE)}
  return DOTTED_CIRCLE if any(needed <= codes for codes in glyph_coverage().values()) else ''


def _sign(char: str) -> str:
  category = unicodedata.category(char)
  if category == 'Cc':
    picture = chr(0x2400 + ord(char)) if ord(char) < 0x20 else f'U+{ord(char):04X}'
    return VISIBLE.get(char, picture)
  return VISIBLE.get(char, '␣') if category.startswith('Z') else char
