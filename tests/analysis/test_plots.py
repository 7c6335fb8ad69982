"""Pictures: every script has glyphs, padding is not drawn, nothing global changes, mistakes are said in one line."""

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
SOURCE, TARGET = list('source!'), list('зцель')


def month_names() -> list[str]:
  """The names of the months of as many locales as have every letter, a string each."""
  names, seen = [], set()
  for locale in map(Locale.parse, localedata.locale_identifiers()):
    name = ' '.join(locale.months['format']['wide'].values())
    if not seen.issuperset(name):
      names.append(name)
      seen.update(name)
  return names


def test_no_glyph_of_any_month_name_is_missing(tmp_path, recwarn, monkeypatch):
  monkeypatch.setattr(plots, 'DPI', 20)  # enough to ask for the glyphs
  names = month_names()
  letters = set(''.join(names))
  marks = sorted(char for char in letters if unicodedata.category(char)[0] == 'M')  # alone, each needs something below
  heatmap(np.zeros((len(names), len(marks))), marks, names, tmp_path / 'names.png', title='日付 날짜 तिथि カナ')
  assert len(letters) > 1000 and len(marks) > 50
  assert not [str(warning.message) for warning in recwarn]


def test_every_character_of_the_basic_plane_has_a_glyph():
  codes = frozenset().union(*fonts.glyph_coverage().values())
  missing = [hex(c) for c in range(0x10000) if unicodedata.category(chr(c))[0] in 'LMNPS' and c not in codes]
  newer = tuple(map(int, unicodedata.unidata_version.split('.'))) > (15, 0, 0)  # Python knows more than the fonts do
  assert len(missing) <= (50 if newer else 0), missing


def test_a_mark_and_its_base_come_from_one_font():
  assert fonts.font_families('январь')[0] == 'DejaVu Sans'
  assert fonts.font_families('रविवार')[0] == 'NotoSansDevanagari'
  assert fonts.font_families('◌ि')[0] == 'NotoSansDevanagari'
  assert fonts.font_families('月曜日')[0] == 'DroidSansFallback'


@pytest.mark.parametrize(
  ('token', 'seen'),
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
def test_invisible_tokens_become_visible(token, seen):
  assert fonts.visible_form(token) == seen


def test_odd_tokens_do_not_warn(tmp_path, recwarn):
  odd = ['$x^2$', '$', '\\', '_', '\n', '\u200f', '\u0301', '\u064e', '\U0001e130', '😀', '']
  heatmap(np.eye(len(odd)), odd, odd, tmp_path / 'a.png', title='$a$ \\frac{', gold=[(0, 0)])
  assert not [str(warning.message) for warning in recwarn]


def test_padding_is_not_drawn(tmp_path):
  padded = np.full((9, 11), 0.8, np.float32)
  padded[:5, :7] = WEIGHTS
  heatmap(WEIGHTS, SOURCE, TARGET, tmp_path / 'a.png')
  heatmap(padded, SOURCE, TARGET, tmp_path / 'b.png')
  assert (tmp_path / 'a.png').read_bytes() == (tmp_path / 'b.png').read_bytes()


def test_weights_and_gold_are_drawn(tmp_path):
  heatmap(WEIGHTS, SOURCE, TARGET, tmp_path / 'a.png')
  heatmap(WEIGHTS * 0, SOURCE, TARGET, tmp_path / 'b.png')
  heatmap(WEIGHTS, SOURCE, TARGET, tmp_path / 'c.png', gold=[(0, 0), (6, 4), (7, 0)])  # the last one is outside
  plain, empty, gold = (imread(tmp_path / f'{name}.png')[..., :3] for name in 'abc')
  dark = lambda picture: int(((picture[..., 2] > 0.3) & (picture[..., 0] < 0.1)).sum())
  orange = lambda picture: int((np.abs(picture - [0.91, 0.35, 0.05]).max(-1) < 0.05).sum())
  assert dark(plain) > dark(empty) + 4 * 40**2
  assert orange(gold) > 200 > orange(plain) == 0


@pytest.mark.parametrize('tokens', [1, 5, 60])
def test_size_grows_with_the_tokens_only(tmp_path, tokens):
  heatmap(np.eye(tokens), ['a'] * tokens, ['b'] * tokens, tmp_path / 'a.png')
  height, width = imread(tmp_path / 'a.png').shape[:2]
  assert 28 * tokens < height < 48 * tokens + 160 and 28 * tokens < width < 48 * tokens + 260


def test_grid_holds_all_items(tmp_path):
  item = Heatmap(WEIGHTS, SOURCE, TARGET, [(1, 1)], 'заголовок')
  heatmap(*item[:3], tmp_path / 'one.png', gold=item.gold, title=item.title)
  grid([item] * 3, tmp_path / 'three.png')
  one, three = imread(tmp_path / 'one.png'), imread(tmp_path / 'three.png')
  assert three.shape[0] == 2 * one.shape[0] and three.shape[1] == 2 * one.shape[1]
  np.testing.assert_array_equal(three[: one.shape[0], one.shape[1] :], one)
  assert three[one.shape[0] :, one.shape[1] :].min() == 1
  with pytest.raises(UserError, match='at least one heatmap'):
    grid([], tmp_path / 'none.png')


@pytest.mark.parametrize(
  ('weights', 'path', 'message'),
  [
    (WEIGHTS[:4], 'a.png', r'5 target and 7 source tokens .*got shape \[4, 7\]'),
    (WEIGHTS[0], 'a.png', r'got shape \[7\]'),
    (WEIGHTS, 'a.jpg', 'ends with .png'),
    (WEIGHTS, 'missing/a.png', 'cannot write the picture: No such file'),
  ],
)
def test_mistakes(tmp_path, weights, path, message):
  with pytest.raises(UserError, match=message):
    heatmap(weights, SOURCE, TARGET, tmp_path / path)


def test_matplotlib_waits_for_the_first_picture_and_its_settings_stay(tmp_path):
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
