"""Pictures of result tables are small, and every line, panel and axis is as the plot describes it."""

import io

import pytest
from PIL import Image

from lab import record_plots
from lab.record_plots import Plot, draw_rows
from lab.records import Table

MAX_BYTES = 60_000


def rows(x_values, whens=('before', 'after')):
  entry = {'value': 1.5, 'deviation': 0.5, 'values': [1.0, 2.0]}
  return [
    {'factors': {'x': x, 'kind': kind, 'when': when}, 'metrics': {'a': entry} | ({} if kind == 'k' else {'b': entry})}
    for x in x_values
    for kind in 'kl'
    for when in whens
  ]


@pytest.fixture
def figures(monkeypatch):
  """Every figure that becomes a PNG."""
  stored = []
  to_png = record_plots.to_png
  monkeypatch.setattr(record_plots, 'to_png', lambda figure: stored.append(figure) or to_png(figure))
  return stored


@pytest.mark.long
@pytest.mark.parametrize(
  ('x_values', 'options'),
  [
    (['one', 'two'], {}),
    (['one', 'a long name'], {'joined': False}),
    ([4, 32, 256], {'log_x': True}),
    (range(1, 20), {'log_y': True}),
  ],
  ids=['joined names', 'names that are not joined', 'log x', 'log y'],
)
def test_pictures_are_small_and_have_the_panels_and_names_of_the_plot(x_values, options, figures):
  plot = Plot('x', {'a': 'metric a', 'b': 'metric b'}, colour='kind', style='when', **options)
  png = draw_rows(Table([], rows(x_values)), plot)
  assert Image.open(io.BytesIO(png)).format == 'PNG' and len(png) < MAX_BYTES
  panels = figures[0].axes
  assert [axes.get_ylabel() for axes in panels] == ['metric a', 'metric b']
  assert all(axes.get_xlabel() == 'x' for axes in panels)
  line_styles = {line.get_linestyle() for line in panels[0].lines}
  assert bool(line_styles & {'-', '--'}) == plot.joined
  names = [text.get_text() for text in panels[1].get_legend().get_texts()]
  assert names == ['k, before', 'k, after', 'l, before', 'l, after']
  assert [axes.get_yscale() for axes in panels] == ['log' if options.get('log_y') else 'linear'] * 2
  if options.get('log_y'):
    assert panels[0].yaxis.get_major_formatter()(0.01, 0) == '0.01'  # no formula, which would not be drawn
  else:
    assert [label.get_text() for label in panels[0].get_xticklabels()] == [str(x) for x in x_values]


def test_rows_are_drawn_in_the_order_of_the_axis(figures):
  table = Table([], [{'factors': {'x': x}, 'metrics': {'a': {'value': float(x)}}} for x in (4, 1, 2)])
  draw_rows(table, Plot('x', {'a': 'metric a'}))
  line = figures[0].axes[0].lines[0]
  assert line.get_xdata().tolist() == line.get_ydata().tolist() == [1, 2, 4]
