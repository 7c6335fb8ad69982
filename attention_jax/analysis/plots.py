"""Heatmaps of weights, with tokens of any script on the axes; one or several in a picture."""

import io
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.analysis.fonts import font_families, visible_form
from attention_jax.analysis.picture_files import check_png_path
from attention_jax.atomic import write_atomic
from attention_jax.errors import UserError, report_write_errors

DPI = 160
COLOURS = 'Blues'
GOLD = '#e8590c'
LINE = '#dfe3e8'
INK = '#24292f'


class Heatmap(NamedTuple):
  """One heatmap, see `heatmap`.

  Attributes:
    weights: [T, S], not negative; only the part with tokens is drawn.
    source_tokens: at most S.
    target_tokens: at most T.
    gold: (source, target) pairs.
    title: a line above the picture.
    relative: whether the darkest colour is the largest weight instead of 1, for weights that are all small.
    sure: the pairs of `gold` that are sure; the outlines of the others, which are possible, are dashed. None: all.
    in_percent: whether each weight is also written into its cell, in percent.
  """

  weights: np.ndarray
  source_tokens: Sequence[str]
  target_tokens: Sequence[str]
  gold: Iterable[tuple[int, int]] | None = None
  title: str | None = None
  relative: bool = False
  sure: Iterable[tuple[int, int]] | None = None
  in_percent: bool = False


def heatmap(
  weights: np.ndarray,
  source_tokens: Sequence[str],
  target_tokens: Sequence[str],
  path: str | Path,
  *,
  gold: Iterable[tuple[int, int]] | None = None,
  sure: Iterable[tuple[int, int]] | None = None,
  title: str | None = None,
  in_percent: bool = False,
) -> None:
  """Writes a PNG: source tokens at the top, target tokens at the left, dark where the weight is near 1.

  Args:
    weights: [T, S] from 0 to 1. Rows and columns beyond the tokens are padding and are not drawn; NaN stays white.
    source_tokens: at most S.
    target_tokens: at most T.
    path: ends with .png, in a folder that exists.
    gold: (source, target) pairs to outline; pairs outside the tokens are not drawn.
    sure: the pairs of `gold` that are sure; the outlines of the others are dashed. None: all.
    title: a line above the picture.
    in_percent: whether each weight is also written into its cell, in percent.

  Raises:
    UserError: for weights that do not match the tokens, without tokens, and for a path that does not end with .png or
      cannot be written.
  """
  _write(_render(Heatmap(weights, source_tokens, target_tokens, gold, title, sure=sure, in_percent=in_percent)), path)


def grid(items: Iterable[Heatmap], path: str | Path, columns: int = 2) -> None:
  """Writes one PNG with all heatmaps.

  Args:
    items: the heatmaps, row by row.
    path: ends with .png, in a folder that exists.
    columns: heatmaps in a row.

  Raises:
    UserError: as `heatmap`, if there is no heatmap, and for fewer than one column.
  """
  if columns < 1:
    raise UserError(f'a grid must have at least one column, got columns={columns}')
  pictures = [_render(item) for item in items]
  if not pictures:
    raise UserError('a grid must have at least one heatmap, got none')
  rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
  num_columns = max(map(len, rows))
  widths = [max(row[c].shape[1] for row in rows if c < len(row)) for c in range(num_columns)]
  _write(np.concatenate([_join_row(row, widths) for row in rows]), path)


def _join_row(pictures: list[np.ndarray], widths: list[int]) -> np.ndarray:
  """Places pictures side by side on white, in columns of the given widths."""
  height = max(picture.shape[0] for picture in pictures)
  row = np.ones((height, sum(widths), 3), np.float32)
  for picture, left in zip(pictures, np.cumsum([0, *widths]), strict=False):
    row[: picture.shape[0], left : left + picture.shape[1]] = picture
  return row


def _write(picture: np.ndarray, path: str | Path) -> None:
  from matplotlib.image import imsave

  check_png_path(path)
  with report_write_errors(path), write_atomic(path) as temporary:
    imsave(temporary, picture, format='png', dpi=DPI)


def _render(item: Heatmap) -> np.ndarray:
  """[height, width, 3] from 0 to 1, cropped to the drawn area."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.image import imread

  weights, source, target = _prepare(item)
  cell = float(np.clip(11 / max(len(source), len(target)), 0.18, 0.3))  # inches; large enough to read at 60 tokens
  width = cell * len(source)
  height = cell * len(target)
  figure = Figure(figsize=(width, height), dpi=DPI)
  FigureCanvasAgg(figure)
  axes = figure.add_axes((0, 0, 1, 1))
  max_value = (np.nanmax(weights, initial=0.0) or 1.0) if item.relative else 1.0
  image = axes.imshow(weights, COLOURS, vmin=0, vmax=max_value, aspect='auto', interpolation='nearest')
  _label_axes(axes, source, target, size=cell * 72 * 0.56)
  if item.in_percent:
    _write_percent(axes, weights, max_value, size=cell * 72 * 0.4)
  bar = _add_colour_bar(figure, image, width, height, max_value)
  if item.gold is not None:
    _outline_cells(axes, item.gold, item.sure, len(source), len(target))
    legend = '□ gold' if item.sure is None else '□ gold\n(dashed: possible)'
    bar.text(0, -0.06, legend, transform=bar.transAxes, va='top', fontsize=8, color=GOLD, family=font_families('□'))
  if item.title:
    family = font_families(item.title)
    axes.set_title(item.title, fontsize=11, color=INK, pad=8, loc='left', parse_math=False, family=family)
  file = io.BytesIO()
  figure.savefig(file, format='png', bbox_inches='tight', pad_inches=0.15)  # 'tight' includes labels beyond the axes
  return imread(io.BytesIO(file.getvalue()))[..., :3]


def _prepare(item: Heatmap) -> tuple[np.ndarray, list[str], list[str]]:
  """The weights without padding, and the tokens in visible form. Raises UserError for weights that do not match."""
  weights = np.asarray(item.weights, np.float32)
  source = [visible_form(str(token)) for token in item.source_tokens]
  target = [visible_form(str(token)) for token in item.target_tokens]
  rows = len(target)
  columns = len(source)
  if weights.ndim != 2 or not rows or not columns or weights.shape[0] < rows or weights.shape[1] < columns:
    raise UserError(
      f'weights must be [T, S] with at least the {rows} target and {columns} source tokens (at least one each), '
      f'got shape {list(weights.shape)}'
    )
  return weights[:rows, :columns], source, target


def _label_axes(axes, source: list[str], target: list[str], size: float) -> None:
  """Labels the axes with tokens. If most tokens at the top have one or two characters, only longer ones are rotated."""
  axes.xaxis.tick_top()
  axes.set_xticks(range(len(source)), source)
  has_words = np.median([_text_width(token) for token in source]) > 2
  for token, label in zip(source, axes.get_xticklabels(), strict=True):
    if has_words or _text_width(token) > 2:
      label.set(rotation=90 if len(source) > 30 else 50, rotation_mode='anchor', ha='left', va='center_baseline')
  axes.set_yticks(range(len(target)), target)
  for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
    label.set(fontsize=size, color=INK, parse_math=False, fontfamily=font_families(label.get_text()))
  axes.tick_params(length=0, pad=4)
  axes.set_xticks(np.arange(0.5, len(source) - 1), minor=True)
  axes.set_yticks(np.arange(0.5, len(target) - 1), minor=True)
  axes.grid(which='minor', color=LINE, linewidth=0.5)
  axes.tick_params(which='minor', length=0)
  axes.spines[:].set(color=LINE, linewidth=0.8)


def _write_percent(axes, weights: np.ndarray, max_value: float, size: float) -> None:
  """Writes each weight into its cell, in white where the cell is dark."""
  style = {'ha': 'center', 'va': 'center', 'fontsize': size, 'family': font_families('0')}
  for (t, s), weight in np.ndenumerate(weights):
    axes.text(s, t, f'{100 * weight:.0f}', color='white' if weight > max_value / 2 else INK, **style)


def _text_width(text: str) -> int:
  """The number of characters without combining marks, which add no width."""
  return sum(not unicodedata.category(char).startswith('M') for char in text)


def _add_colour_bar(figure, image, width: float, height: float, max_value: float):
  """Adds axes with a bar from 0 to the maximum at the right, 0.12 inches wide and at most 2 inches high."""
  bar_height = min(height, 2.0)
  axes = figure.add_axes(((width + 0.2) / width, 1 - bar_height / height, 0.12 / width, bar_height / height))
  bar = figure.colorbar(image, cax=axes, ticks=[0, max_value / 2, max_value], format='%.3g')
  bar.outline.set(edgecolor=LINE, linewidth=0.8)
  axes.tick_params(length=0, labelsize=8, labelcolor=INK)
  for label in axes.get_yticklabels():
    label.set_fontfamily(font_families('0'))
  return axes


def _outline_cells(
  axes,
  gold: Iterable[tuple[int, int]],
  sure: Iterable[tuple[int, int]] | None,
  source_length: int,
  target_length: int,
) -> None:
  from matplotlib.patches import Rectangle

  links = [(int(s), int(t)) for s, t in gold]
  solid = set(links) if sure is None else {(int(s), int(t)) for s, t in sure}
  for s, t in links:
    if 0 <= s < source_length and 0 <= t < target_length:
      style = 'solid' if (s, t) in solid else (0, (2, 1.5))
      outline = {'edgecolor': GOLD, 'linewidth': 1.1, 'linestyle': style}
      axes.add_patch(Rectangle((s - 0.36, t - 0.36), 0.72, 0.72, fill=False, **outline))
