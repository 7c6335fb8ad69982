"""Fonts for every script: matplotlib's DejaVu Sans, and the fallback fonts in fonts/ for what it lacks.

Nothing is registered before the first picture, and no setting of matplotlib is changed: the families are passed along.
"""

import functools
import unicodedata
from pathlib import Path

FOLDER = Path(__file__).parent / 'fonts'
FIRST = 'DejaVu Sans'
SIGNS = {
  ' ': '␣',
  '\t': '⇥',
  '\u00a0': '⍽',
  '\u202f': '⍽',
  '\u200c': 'ZWNJ',
  '\u200d': 'ZWJ',
  '\u200e': 'LRM',
  '\u200f': 'RLM',
}
CIRCLE = '◌'


@functools.cache
def glyph_coverage() -> dict[str, frozenset[int]]:
  """Family -> the code points that it has glyphs for, DejaVu first. The first call registers the fallback fonts."""
  from matplotlib import font_manager

  paths = sorted(path for path in FOLDER.iterdir() if path.suffix in ('.otf', '.ttf'))
  for path in paths:
    font_manager.fontManager.addfont(path)
  names = [FIRST, *(path.stem for path in paths)]  # a fallback font's family is its file name
  return {name: frozenset(font_manager.get_font(font_manager.findfont(name)).get_charmap()) for name in names}


def font_families(text: str) -> list[str]:
  """The families that `text` needs, the one that has most of it first, so that a mark is drawn from its base's font."""
  needed, chosen = {ord(char) for char in text}, []
  most = lambda: max(
    glyph_coverage(), key=lambda name: len(needed & glyph_coverage()[name])
  )  # of equal ones the first: DejaVu
  while found := needed & glyph_coverage()[most()]:
    chosen.append(most())
    needed -= found
  return chosen or [FIRST]


def font_file(text: str) -> str:
  """The file of the family that has most of `text`, for programs that draw with one font."""
  from matplotlib import font_manager

  return font_manager.findfont(font_families(text)[0])


def visible_form(token: str) -> str:
  """`token` as it can be seen: signs for white space and controls, a dotted circle under a combining mark.

  Format characters (joiners, direction marks) are named only where they stand alone: elsewhere they shape the text.
  """
  if not token:
    return '∅'
  if all(unicodedata.category(char) == 'Cf' for char in token):
    return ' '.join(SIGNS.get(char, f'U+{ord(char):04X}') for char in token)
  return ''.join(_carrier(before, char) + _sign(char) for before, char in zip(' ' + token, token, strict=False))


def _carrier(before: str, char: str) -> str:
  """A dotted circle for a combining mark with nothing else to sit on, where one font has both."""
  lone = unicodedata.category(char).startswith('M') and before.isspace()
  return CIRCLE if lone and any({ord(char), ord(CIRCLE)} <= codes for codes in glyph_coverage().values()) else ''


def _sign(char: str) -> str:
  category = unicodedata.category(char)
  if category == 'Cc':
    return SIGNS.get(char) or (chr(0x2400 + ord(char)) if ord(char) < 0x20 else f'U+{ord(char):04X}')
  return SIGNS.get(char, '␣') if category.startswith('Z') else char
