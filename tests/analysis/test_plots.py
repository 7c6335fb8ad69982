"""Heatmaps: every script has glyphs, padding is not drawn, no global setting changes, and invalid input raises."""

import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from babel import Locale, localedata
from matplotlib.image import imread

from attention_jax.analysis import Heatmap, fonts, grid, heatmap, plots
from attention_jax.errors import UserError

WEIGHTS = np.eye(5, 7, dtype=np.float32)
SOURCE = list('source!')
TARGET = list('зцель')


def month_names() -> list[str]:
  """The month names of each locale that adds letters to those of the locales before it, one string per locale."""
  names = []
  letters = set()
  for locale in map(Locale.parse, localedata.locale_identifiers()):
    name = ' '.join(locale.months['format']['wide'].values())
    if not letters.issuperset(name):
      names.append(name)
      letters.update(name)
  return names


def is_mark(char: str) -> bool:
  return unicodedata.category(char).startswith('M')


@pytest.mark.long
def test_no_glyph_of_any_month_name_is_missing(tmp_path, recwarn, monkeypatch):
  monkeypatch.setattr(plots, 'DPI', 20)  # a small picture requests the same glyphs
  names = month_names()
  letters = set(''.join(names))
  marks = sorted(filter(is_mark, letters))  # a mark alone needs a base to be drawn on
  heatmap(np.zeros((len(names), len(marks))), marks, names, tmp_path / 'names.png', title='日付 날짜 तिथि カナ')
  assert len(letters) > 1000
  assert len(marks) > 50
  assert not [str(warning.message) for warning in recwarn]


def test_every_character_of_the_basic_plane_has_a_glyph():
  codes = frozenset().union(*fonts.glyph_coverage().values())
  missing = [hex(c) for c in range(0x10000) if unicodedata.category(chr(c))[0] in 'LMNPS' and c not in codes]
  # The fonts cover Unicode 14, that of Python 3.11; later versions have more characters.
  is_newer = tuple(map(int, unicodedata.unidata_version.split('.'))) > (14, 0, 0)
  assert len(missing) <= (50 if is_newer else 0), missing


def test_the_first_font_of_a_word_is_one_for_its_script_and_marks():
  fonts_of = {'январь': 'DejaVu Sans', 'रविवार': 'NotoSansDevanagari', '◌ि': 'NotoSansDevanagari'}
  for word, font in (fonts_of | {'月曜日': 'DroidSansFallback'}).items():
    assert fonts.font_families(word)[0] == font


@pytest.mark.parametrize(
  ('token', 'expected'),
  [
    ('word', 'word'),
    (' ', '␣'),
    ('a b', 'a␣b'),
    ('', '∅'),
    ('\t', '⇥'),
    ('\n', '␊'),
    ('\x7f', 'U+007F'),
    ('\u202f', '⍽'),
    ('\u3000', '␣'),
    ('\u200f', 'RLM'),
    ('\u2060', 'U+2060'),
    ('می\u200cشود', 'می\u200cشود'),
    ('a \u0301', 'a␣◌\u0301'),
    ('\u0301', '◌\u0301'),
    ('\u093f', '◌\u093f'),
    ('e\u0301', 'e\u0301'),
  ],
)
def test_invisible_tokens_become_visible(token, expected):
  assert fonts.visible_form(token) == expected


def test_right_to_left_text_is_isolated_from_what_follows(tmp_path, recwarn):
  assert fonts.isolate('5 mars') == '5 mars'
  title = f'{fonts.isolate("الأحد، 7 مارس 2021")} → 2021-03-07'
  assert title.startswith('\u2068') and '2021\u2069 → ' in title
  heatmap(WEIGHTS, SOURCE, TARGET, tmp_path / 'isolated.png', title=title)
  heatmap(WEIGHTS, SOURCE, TARGET, tmp_path / 'joined.png', title=title.strip('\u2068').replace('\u2069', ''))
  assert (tmp_path / 'isolated.png').read_bytes() != (tmp_path / 'joined.png').read_bytes()
  assert not [str(warning.message) for warning in recwarn]


@pytest.mark.long
def test_unusual_tokens_do_not_warn(tmp_path, recwarn):
  tokens = ['$x^2$', '$', '\\', '_', '\n', '\u200f', '\u0301', '\u064e', '\U0001e130', '😀', '']
  heatmap(np.eye(len(tokens)), tokens, tokens, tmp_path / 'a.png', title='$a$ \\frac{', gold=[(0, 0)])
  assert not [str(warning.message) for warning in recwarn]


def count_dark(picture: np.ndarray) -> int:
  return int(((picture[..., 2] > 0.3) & (picture[..., 0] < 0.1)).sum())


def count_orange(picture: np.ndarray) -> int:
  return int((np.abs(picture - [0.91, 0.35, 0.05]).max(-1) < 0.05).sum())


@pytest.mark.long
def test_weights_and_gold_are_drawn_and_padding_is_not(tmp_path):
  def draw(weights, **links):
    heatmap(weights, SOURCE, TARGET, tmp_path / 'a.png', **links)
    return imread(tmp_path / 'a.png')[..., :3]

  plain, empty = draw(WEIGHTS), draw(WEIGHTS * 0)
  gold = draw(WEIGHTS, gold=[(0, 0), (6, 4), (7, 0)])  # the last one is outside
  assert count_dark(plain) > count_dark(empty) + 4 * 40**2  # most of five cells of 48 x 48 pixels
  assert count_orange(gold) > 200 > count_orange(plain) == 0
  links = [(0, 0), (6, 4)]
  solid, dashed = (count_orange(draw(WEIGHTS, gold=links, sure=sure)) for sure in (links, links[1:]))
  assert 200 < dashed < 0.95 * solid  # the outline of a possible link has gaps
  padded = np.full((9, 11), 0.8, np.float32)
  padded[:5, :7] = WEIGHTS
  np.testing.assert_array_equal(draw(padded), plain)


@pytest.mark.long
@pytest.mark.parametrize('tokens', [1, 5, 60])
def test_size_grows_with_the_number_of_tokens(tmp_path, tokens):
  heatmap(np.eye(tokens), ['a'] * tokens, ['b'] * tokens, tmp_path / 'a.png')
  height, width = imread(tmp_path / 'a.png').shape[:2]
  # A cell has 28.8 to 48 pixels, and labels take the remainder.
  assert 28 * tokens < height < 48 * tokens + 160
  assert 28 * tokens < width < 48 * tokens + 260


def test_grid_contains_all_heatmaps(tmp_path):
  item = Heatmap(WEIGHTS, SOURCE, TARGET, [(1, 1)], 'заголовок')
  heatmap(item.weights, SOURCE, TARGET, tmp_path / 'one.png', gold=item.gold, title=item.title)
  grid([item] * 3, tmp_path / 'three.png')
  one = imread(tmp_path / 'one.png')
  three = imread(tmp_path / 'three.png')
  height, width = one.shape[:2]
  assert three.shape[:2] == (2 * height, 2 * width)
  np.testing.assert_array_equal(three[:height, width:], one)
  assert three[height:, width:].min() == 1
  with pytest.raises(UserError, match='at least one heatmap'):
    grid([], tmp_path / 'none.png')
  with pytest.raises(UserError, match='at least one column, got columns=0'):
    grid([], tmp_path / 'none.png', columns=0)


@pytest.mark.parametrize(
  ('weights', 'path', 'message'),
  [
    (WEIGHTS[:4], 'a.png', r'5 target and 7 source tokens .*got shape \[4, 7\]'),
    (WEIGHTS[0], 'a.png', r'got shape \[7\]'),
    (WEIGHTS, 'a.jpg', 'ends with .png'),
    (WEIGHTS, 'missing/a.png', r'cannot be written \(No such file'),
  ],
)
def test_invalid_weights_and_paths_raise(tmp_path, weights, path, message):
  with pytest.raises(UserError, match=message):
    heatmap(weights, SOURCE, TARGET, tmp_path / path)


@pytest.mark.long
def test_matplotlib_is_loaded_on_first_use_and_its_settings_stay(tmp_path):
  code = f"""
import sys
from attention_jax import analysis
assert 'matplotlib' not in sys.modules
import matplotlib
before = dict(matplotlib.rcParams)
analysis.heatmap([[1.0]], ['a'], ['b'], {str(tmp_path / 'a.png')!r})
assert dict(matplotlib.rcParams) == before
"""
  subprocess.run([sys.executable, '-W', 'error', '-c', code], check=True)


@pytest.mark.long
def test_weights_are_written_into_their_cells_in_percent(tmp_path, monkeypatch):
  texts = []
  monkeypatch.setattr('matplotlib.axes.Axes.text', lambda self, x, y, text, **style: texts.append((x, y, text)))
  for in_percent in (False, True):
    heatmap([[0.0, 0.25], [1.0, 0.5]], ['H0', 'H1'], ['L0', 'L1'], tmp_path / 'heads.png', in_percent=in_percent)
  assert texts == [(0, 0, '0'), (1, 0, '25'), (0, 1, '100'), (1, 1, '50')]
