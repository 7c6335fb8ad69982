"""Pictures of a report: values with intervals, learning curves, interactions, alignment error beside quality."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.analysis.fonts import font_families
from attention_jax.analysis.plots import INK, LINE
from attention_jax.decoding.metrics import METRICS
from attention_jax.sweeps.bins import BinnedMetrics
from attention_jax.sweeps.contrasts import MetricColumn
from attention_jax.sweeps.report import ALIGNMENT_ERROR, Report, ReportCell, ReportRow

DPI = 150
# The first seven: Okabe & Ito (2008), distinguishable with every form of colour blindness, without yellow.
COLOURS = (
  *('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000'),
  *('#332288', '#882255', '#999933', '#8c564b', '#7f7f7f'),
)
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')
STYLES = ('-', '--', ':', '-.', (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4)), (0, (9, 3)))
NUM_MARKS = 8  # about as many marks are drawn on a curve
MAX_CURVES = 12  # with more settings, the best ones and the baseline are drawn
MAX_LABEL = 48  # characters of a setting


class Picture(NamedTuple):
  """A picture of a report.

  Attributes:
    name: file name without a suffix.
    title: what it shows.
    png: its bytes.
  """

  name: str
  title: str
  png: bytes


def draw_pictures(report: Report) -> list[Picture]:
  """Draws every picture that the data allow; none if no metric was measured, as with only a training split."""
  if not report.columns:
    return []
  drawn = [_draw_values(report), _draw_curves(report)]
  drawn += [_draw_interaction(report, column) for column in report.main_columns]
  drawn += [_draw_alignment(report)]
  return [picture for picture in drawn if picture]


def draw_figure(report: Report) -> bytes:
  """Draws the means of every setting for a paper; returns a PDF. At least one metric must have been measured."""
  return to_pdf(_values_figure(report))


def draw_bins(table: BinnedMetrics) -> bytes:
  """Draws each metric by bins, with its intervals; returns a PNG."""
  figure = new_figure(1.2 + 3.6 * len(table.metrics), 3.2)
  panels = figure.subplots(1, len(table.metrics), squeeze=False)[0]
  x = np.arange(len(table.bins))
  for axes, (name, intervals) in zip(panels, table.metrics.items(), strict=True):
    axes.plot(x, [interval.value for interval in intervals], color=COLOURS[0], marker='o', linewidth=1.4)
    ends = [[getattr(interval, end) for interval in intervals] for end in ('low', 'high')]
    axes.vlines(x, *ends, color=COLOURS[0], linewidth=1.6)
    axes.set_xticks(x, [bin.name for bin in table.bins])
    axes.set_xlabel(table.by, color=INK, fontsize=9)
    axes.set_ylabel(f'{name} ({table.units[name]})', color=INK, fontsize=9)
    axes.grid(axis='y', color=LINE, linewidth=0.6)
  return to_png(figure)


def _setting_style(report: Report, row: ReportRow) -> dict[str, Any]:
  """The colour and the mark of a setting, the same in every picture.

  With more settings than colours, two settings of one colour have different marks, up to 84 settings.
  """
  i = next(i for i, member in enumerate(report.rows) if member is row)
  return {'color': COLOURS[i % len(COLOURS)], 'marker': MARKERS[i % len(MARKERS)]}


def _draw_values(report: Report) -> Picture:
  title = 'Means with 95 % intervals; a point is a run; the dotted line is the baseline'
  return Picture('values', title, to_png(_values_figure(report)))


def _values_figure(report: Report) -> Any:
  """Means with intervals, and a point per seed; a panel per metric, settings from top to bottom."""
  rows = report.rows
  columns = report.main_columns
  figure = new_figure(2.6 + 2.6 * len(columns), 0.9 + 0.3 * len(rows))
  panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
  for axes, column in zip(panels, columns, strict=True):
    for y, row in enumerate(rows):
      if column in row.cells:
        _draw_cell(axes, row.cells[column], y, _setting_style(report, row))
        if row.setting is report.baseline:
          axes.axvline(row.cells[column].mean.value, color=INK, linewidth=0.8, linestyle=':')
    axes.set_xlabel(_axis_label(column), color=INK, fontsize=9)
    axes.grid(axis='x', color=LINE, linewidth=0.6)
  panels[0].set_yticks(range(len(rows)), [_shorten(row.setting.label) for row in rows])
  panels[0].set_ylim(len(rows) - 0.5, -0.5)
  return figure


def _draw_cell(axes: Any, cell: ReportCell, y: float, style: Mapping[str, Any]) -> None:
  colour = style['color']
  axes.plot(cell.values, [y] * len(cell.values), 'o', color=colour, alpha=0.35, markersize=3.5, markeredgewidth=0)
  mean = cell.mean
  if not math.isnan(mean.low):
    axes.plot([mean.low, mean.high], [y, y], color=colour, linewidth=2.2, solid_capstyle='butt')
  axes.plot([mean.value], [y], linestyle='', markersize=6, **style)


def _draw_curves(report: Report) -> Picture | None:
  """The validation metric that training.select of the baseline names, by updates: mean and range over seeds."""
  select = report.baseline.config.training.select
  name = f'validation/{select}'
  curves = [(row, *_mean_curve(row, name)) for row in _curve_rows(report)]
  curves = [curve for curve in curves if len(curve[1]) > 1]
  if not curves:
    return None
  figure = new_figure(8.2, 4.0)
  axes = figure.subplots()
  for row, steps, mean, low, high in curves:
    style = _setting_style(report, row)
    marks = {'markersize': 5, 'markevery': max(1, len(steps) // NUM_MARKS)}
    axes.plot(steps, mean, label=_shorten(row.setting.label), linewidth=1.6, **marks, **style)
    axes.fill_between(steps, low, high, color=style['color'], alpha=0.12, linewidth=0)
  axes.set_xlabel('updates', color=INK, fontsize=9)
  search = ' (greedy)' if select in METRICS else ''  # other metrics need no search
  axes.set_ylabel(f'{select}, validation{search}', color=INK, fontsize=9)
  axes.grid(color=LINE, linewidth=0.6)
  add_legend(axes)
  return Picture('curves', 'Learning curves: mean over seeds, shaded from the lowest to the highest', to_png(figure))


def _curve_rows(report: Report) -> Sequence[ReportRow]:
  """All rows; if there are too many to distinguish, the best ones in the first column and the baseline."""
  if len(report.rows) <= MAX_CURVES:
    return report.rows
  column = report.columns[0]
  # A sort that compares with NaN returns any order.
  rows = [row for row in report.rows if column in row.cells and not math.isnan(row.cells[column].mean.value)]
  best = sorted(rows, key=lambda row: row.cells[column].mean.value, reverse=bool(column.higher_is_better))
  chosen = best[: MAX_CURVES - 1]
  return [row for row in report.rows if row in chosen or row.setting is report.baseline]


def _mean_curve(row: ReportRow, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Steps, mean, lowest and highest of a metric, at the steps that all runs have."""
  runs = [{r['step']: r[name] for r in run.records if name in r} for run in row.setting.runs]
  steps = sorted(set.intersection(*map(set, runs))) if runs else []
  values = np.array([[run[step] for step in steps] for run in runs]).reshape(len(runs), len(steps))
  return np.array(steps), values.mean(0), values.min(0), values.max(0)


def _draw_interaction(report: Report, column: MetricColumn) -> Picture | None:
  """For a grid of two fields: the levels of one on the axis, a line for each level of the other, a mark per setting."""
  factors = list(report.rows[0].setting.factors)
  rows = {
    tuple(str(value) for value in row.setting.factors.values()): row for row in report.rows if column in row.cells
  }
  num_rows = sum(column in row.cells for row in report.rows)
  if len(factors) != 2 or len(rows) < 4 or len(rows) < num_rows:  # several rows may have the same levels
    return None
  levels = [list(dict.fromkeys(key[i] for key in rows)) for i in range(2)]
  if min(map(len, levels)) < 2 or len(rows) < len(levels[0]) * len(levels[1]):
    return None
  figure = new_figure(max(5.0, 1.4 * len(levels[0]) + 3.4), 3.8)
  axes = figure.subplots()
  for i, level in enumerate(levels[1]):
    members = [rows[first, level] for first in levels[0]]
    x = np.arange(len(members)) + 0.06 * (i - (len(levels[1]) - 1) / 2)
    means = [row.cells[column].mean.value for row in members]
    axes.plot(x, means, label=_shorten(level), linewidth=1.2, color=INK, linestyle=STYLES[i % len(STYLES)])
    for place, row in zip(x, members, strict=True):
      mean = row.cells[column].mean
      marks = {'linestyle': '', 'markersize': 6, 'elinewidth': 1.4}
      axes.errorbar([place], [mean.value], yerr=_reach(mean), **marks, **_setting_style(report, row))
  axes.set_xticks(range(len(levels[0])), [_shorten(level) for level in levels[0]])
  axes.set_xlim(-0.4, len(levels[0]) - 0.6)
  axes.set_xlabel(factors[0], color=INK, fontsize=9)
  axes.set_ylabel(_axis_label(column), color=INK, fontsize=9)
  axes.grid(axis='y', color=LINE, linewidth=0.6)
  add_legend(axes, title=factors[1])
  title = f'Interaction of {factors[0]} and {factors[1]} in {column.name}: they interact where lines are not parallel'
  return Picture(f'interaction.{column.metric}', title, to_png(figure))


def _draw_alignment(report: Report) -> Picture | None:
  """The first metric of each setting against its alignment error rate."""
  columns = {column.metric: column for column in reversed(report.main_columns)}
  quality = report.main_columns[0]
  errors = columns.get(ALIGNMENT_ERROR)
  if errors is None or errors == quality:
    return None
  figure = new_figure(7.4, max(4.0, 0.8 + 0.2 * len(report.rows)))  # as high as the legend
  axes = figure.subplots()
  for row in report.rows:
    if quality in row.cells and errors in row.cells:
      x = row.cells[errors].mean
      y = row.cells[quality].mean
      options = {'xerr': _reach(x), 'yerr': _reach(y), 'label': _shorten(row.setting.label)}
      axes.errorbar([x.value], [y.value], linestyle='', markersize=6, **options, **_setting_style(report, row))
  axes.set_xlabel(_axis_label(errors), color=INK, fontsize=9)
  axes.set_ylabel(_axis_label(quality), color=INK, fontsize=9)
  axes.grid(color=LINE, linewidth=0.6)
  add_legend(axes)
  return Picture('alignment', f'Alignment error rate beside {quality.name}', to_png(figure))


def _reach(interval: Any) -> list[list[float]]:
  """The distances of the ends of an interval from its value, as matplotlib takes them."""
  if math.isnan(interval.low):
    return [[0.0], [0.0]]
  return [[max(0.0, interval.value - interval.low)], [max(0.0, interval.high - interval.value)]]


def _axis_label(column: MetricColumn) -> str:
  arrow = {True: ', higher is better', False: ', lower is better', None: ''}[column.higher_is_better]
  return f'{column.name}\n({column.unit}{arrow})'


def _shorten(text: str) -> str:
  return text if len(text) <= MAX_LABEL else f'{text[: MAX_LABEL // 2 - 1]}…{text[-MAX_LABEL // 2 :]}'


def new_figure(width: float, height: float) -> Any:
  """Returns a figure of a size in inches, which needs no display."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), dpi=DPI, layout='constrained')
  FigureCanvasAgg(figure)
  return figure


def add_legend(axes: Any, title: str | None = None) -> None:
  """Adds a legend at the right of the axes, where it hides nothing."""
  legend = axes.legend(
    title=title,
    loc='upper left',
    bbox_to_anchor=(1.01, 1.0),
    fontsize=8,
    title_fontsize=8,
    frameon=False,
    handlelength=3,
  )
  legend.set_in_layout(True)


def to_png(figure: Any) -> bytes:
  """Returns a PNG. Ticks, axis labels and legends get fonts that have their characters; none is parsed as math."""
  return _save(figure, format='png')


def to_pdf(figure: Any) -> bytes:
  """Returns a PDF with embedded TrueType fonts, as conferences ask for; texts are those of `to_png`."""
  import matplotlib

  with matplotlib.rc_context({'pdf.fonttype': 42}):
    return _save(figure, format='pdf', metadata={'CreationDate': None})


def _save(figure: Any, **options: Any) -> bytes:
  for axes in figure.axes:
    legend = axes.get_legend()
    texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
    texts += [*legend.get_texts(), legend.get_title()] if legend else []
    for text in texts:
      text.set(parse_math=False, color=INK, fontfamily=font_families(text.get_text()))
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
      text.set_fontsize(8)
    axes.tick_params(length=0)
    axes.spines[:].set(color=LINE, linewidth=0.8)
  file = io.BytesIO()
  figure.savefig(file, **options, bbox_inches='tight', pad_inches=0.1)
  return file.getvalue()
