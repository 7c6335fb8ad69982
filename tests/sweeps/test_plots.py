"""Pictures of a report: which runs a picture of an interaction shows, and the names of axes."""

import dataclasses
import math

import pytest

from attention_jax.sweeps import plots
from attention_jax.sweeps.plots import draw_pictures


@pytest.fixture
def figures(monkeypatch):
  """The figures that are drawn, in this order."""
  figures = []
  to_png = plots.to_png
  monkeypatch.setattr(plots, 'to_png', lambda figure: figures.append(figure) or to_png(figure))
  return figures


@pytest.mark.long
def test_an_interaction_is_drawn_if_every_row_has_levels_of_its_own(report):
  """Single runs that differ in their seeds only are rows with the same levels, of which a picture would show one."""
  assert {picture.name for picture in draw_pictures(report)} >= {'interaction.exact_match'}
  repeated = report._replace(rows=[*report.rows, report.rows[0]])
  assert not any(picture.name.startswith('interaction') for picture in draw_pictures(repeated))
  without_metrics = [row._replace(cells={}) for row in report.rows]
  assert draw_pictures(report._replace(columns=[], contrasts=[], rows=without_metrics)) == []


@pytest.mark.long
def test_a_setting_has_one_colour_and_mark_in_all_pictures(report, figures):
  pictures = draw_pictures(report)
  drawn = dict(zip([picture.name for picture in pictures], figures, strict=True))
  expected = [plots._setting_style(report, row) for row in report.rows]
  assert len({style['color'] for style in expected}) == len(report.rows) == 4

  def styles(name):
    """The style of each line with a mark, in the order of drawing, without the points of seeds."""
    lines = [
      line for line in drawn[name].axes[0].lines if line.get_marker() not in ('None', '') and not line.get_alpha()
    ]
    return [{'color': line.get_color(), 'marker': line.get_marker()} for line in lines]

  assert styles('values') == styles('curves') == styles('alignment') == expected
  by_level = [expected[i] for i in (0, 2, 1, 3)]  # each level of the second field, with those of the first
  assert styles('interaction.exact_match') == by_level


def test_settings_of_one_colour_have_different_marks(report):
  rows = [row._replace() for row in report.rows * 21]
  drawn = [tuple(plots._setting_style(report._replace(rows=rows), row).values()) for row in rows]
  assert len(set(drawn)) == len(drawn) == 84


@pytest.mark.long
@pytest.mark.parametrize(
  ('select', 'label'), [('exact_match', 'exact_match, validation (greedy)'), ('loss', 'loss, validation')]
)
def test_curves_of_metrics_of_texts_are_labelled_as_greedy(report, figures, select, label):
  config = report.baseline.config
  config = dataclasses.replace(config, training=dataclasses.replace(config.training, select=select))
  records = [{'step': record['step'], f'validation/{select}': 1.0} for record in report.baseline.runs[0].records]
  baseline = report.baseline._replace(config=config, runs=[report.baseline.runs[0]._replace(records=records)])
  draw_pictures(report._replace(baseline=baseline, rows=[report.rows[0]._replace(setting=baseline)]))
  assert label in [axes.get_ylabel() for figure in figures for axes in figure.axes]


def test_only_the_best_settings_and_the_baseline_have_curves(report):
  """A metric that is NaN is never one of the best."""
  column = report.columns[0]
  row = report.rows[0]
  values = [5.0, math.nan, 90.0, 1.0, math.nan, 2.0, 3.0, 99.0] + [math.nan, 10.0] * 5 + [1.5, 1.4]
  rows = []
  for i, value in enumerate(values):
    cell = row.cells[column]
    cell = cell._replace(mean=cell.mean._replace(value=value))
    rows.append(row._replace(setting=row.setting._replace(label=str(i), runs=[]), cells={column: cell}))
  drawn = plots._curve_rows(report._replace(rows=rows, baseline=rows[3].setting))
  assert ' '.join(drawn_row.setting.label for drawn_row in drawn) == '0 2 3 5 6 7 9 11 13 15 17 18'


def test_no_text_of_a_picture_is_math():
  axes = plots.new_figure(3, 3).subplots()
  axes.plot([0], label='$a$')
  axes.set(xlabel='$x$', ylabel='$y$')
  plots.add_legend(axes, title='$t$')
  plots.to_png(axes.figure)
  legend = axes.get_legend()
  texts = [*legend.get_texts(), legend.get_title(), axes.xaxis.label, axes.yaxis.label]
  assert [text.get_text() for text in texts] == ['$a$', '$t$', '$x$', '$y$']
  assert not any(text.get_parse_math() for text in texts)
