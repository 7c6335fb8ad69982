"""Pictures of result tables: metrics by one factor of the rows, a line for each combination of up to two others."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from attention_jax.analysis.plots import INK, LINE
from attention_jax.sweeps.plots import COLOURS, MARKERS, STYLES, add_legend, new_figure, to_png
from lab.records import Row, Table

PANEL = (3.3, 2.9)  # inches
PALETTE = 64  # colours
MAX_LABEL = 9  # characters; if a name of the horizontal axis is longer, all names are rotated
# With more values on the horizontal axis, a joined line has a band of one deviation instead of marks, error bars and
# points of the seeds.
MAX_POINTS = 10


class Plot(NamedTuple):
  """The axes and lines of a picture.

  Attributes:
    x: the factor on the horizontal axis: numbers, or names at equal distances.
    panels: metric -> label of the vertical axis; each metric has a panel.
    colour: the factor that determines colours and marks; '' for none.
    style: the factor that determines line styles, which are visible only if `joined`; '' for none.
    log_x, log_y: whether the axis is logarithmic.
    joined: whether the points of a line are joined; False for factors without an order.
  """

  x: str
  panels: Mapping[str, str]
  colour: str = ''
  style: str = ''
  log_x: bool = False
  log_y: bool = False
  joined: bool = True


def draw_rows(table: Table, plot: Plot) -> bytes:
  """Returns a PNG with means and standard deviations over seeds, and a point for each seed, see MAX_POINTS."""
  figure = new_figure(PANEL[0] * len(plot.panels) + 1.6, PANEL[1])
  panels = figure.subplots(1, len(plot.panels), squeeze=False)[0]
  for axes, (metric, label) in zip(panels, plot.panels.items(), strict=True):
    positions = _positions(table.rows, plot.x)
    for name, rows, style in _lines(table.rows, plot):
      style = style if plot.joined else style | {'linestyle': 'none'}
      _draw_line(axes, [row for row in rows if metric in row['metrics']], metric, plot.x, positions, name, style)
    if any(isinstance(x, str) for x in positions):
      names = [str(x) for x in positions]
      is_long = max(map(len, names)) > MAX_LABEL
      axes.set_xticks(range(len(names)), names, rotation=30 if is_long else 0, ha='right' if is_long else 'center')
    if plot.log_x:
      axes.set_xscale('log', base=2)
      axes.set_xticks(list(positions), [str(x) for x in positions])
      axes.minorticks_off()
    if plot.log_y:
      axes.set_yscale('log')
      axes.yaxis.set_major_formatter('{x:g}')
    axes.set_xlabel(plot.x, color=INK, fontsize=9)
    axes.set_ylabel(label, color=INK, fontsize=9)
    axes.grid(color=LINE, linewidth=0.6)
  if plot.colour or plot.style:
    add_legend(panels[-1])
  return _with_few_colours(to_png(figure))


def _with_few_colours(png: bytes) -> bytes:
  """The picture with a palette, about a third of the size."""
  file = io.BytesIO()
  with Image.open(io.BytesIO(png)) as image:
    image.convert('RGB').quantize(PALETTE).save(file, format='png', optimize=True)
  return file.getvalue()


def _positions(rows: Sequence[Row], x: str) -> dict[Any, float]:
  """Value of the factor -> its place on the axis."""
  values = list(dict.fromkeys(row['factors'][x] for row in rows))
  if any(isinstance(value, str) for value in values):
    return {value: i for i, value in enumerate(values)}
  return {value: value for value in sorted(values)}


def _lines(rows: Sequence[Row], plot: Plot) -> list[tuple[str, list[Row], dict[str, Any]]]:
  """The name, the rows and the style of each line."""
  levels = [_levels(rows, plot.colour), _levels(rows, plot.style)]
  lines = []
  for i, colour in enumerate(levels[0]):
    for j, style in enumerate(levels[1]):
      members = [row for row in rows if _has(row, plot.colour, colour) and _has(row, plot.style, style)]
      name = ', '.join(str(level) for level in (colour, style) if level != '')
      line_style = {
        'color': COLOURS[i % len(COLOURS)],
        'marker': MARKERS[i % len(MARKERS)],
        'linestyle': STYLES[j % len(STYLES)],
      }
      if members:
        lines.append((name, members, line_style))
  return lines


def _levels(rows: Sequence[Row], factor: str) -> list[Any]:
  return list(dict.fromkeys(row['factors'][factor] for row in rows)) if factor else ['']


def _has(row: Row, factor: str, level: Any) -> bool:
  return not factor or row['factors'][factor] == level


def _draw_line(
  axes: Any,
  rows: Sequence[Row],
  metric: str,
  factor: str,
  positions: Mapping[Any, float],
  name: str,
  style: Mapping[str, Any],
) -> None:
  rows = sorted(rows, key=lambda row: positions[row['factors'][factor]])  # a line joins neighbours on the axis
  x = np.array([positions[row['factors'][factor]] for row in rows])
  entries = [row['metrics'][metric] for row in rows]
  means = np.array([entry['value'] for entry in entries])
  deviations = np.array([entry.get('deviation', 0.0) for entry in entries])
  if len(positions) > MAX_POINTS and style['linestyle'] != 'none':
    axes.plot(x, means, label=name, linewidth=1.4, color=style['color'], linestyle=style['linestyle'])
    axes.fill_between(x, means - deviations, means + deviations, color=style['color'], alpha=0.15, linewidth=0)
    return
  axes.errorbar(x, means, yerr=deviations, label=name, linewidth=1.4, markersize=4.5, capsize=2, **style)
  for place, entry in zip(x, entries, strict=True):
    values = entry.get('values', ())
    axes.plot([place] * len(values), values, '.', color=style['color'], alpha=0.4, markersize=4)
