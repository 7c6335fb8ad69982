"""The report: tables, findings, pictures, and that everything is escaped."""

import csv
import io
import math
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.collect import collect_folders, collect_sweep
from attention_jax.sweeps.ledger import FAILED, PLANNED, RUNG, Unit, open_ledger, planned_event, read_state
from attention_jax.sweeps.plots import draw_pictures
from attention_jax.sweeps.render import render, runs_table, summary_table, write_files
from attention_jax.sweeps.report import ReportOptions, folders_report, sweep_report
from attention_jax.sweeps.space import grid
from tests.sweeps.helpers import base_config, make_sweep, write_run

SETTINGS = grid(
  {'model.attention.score': ['dot', 'general'], 'model.attention.alignment': ['softmax', 'local_p(width=10)']}
)
EVIL = '<script>alert(1)</script> & "quotes" | pipe'
NO_ROWS = ReportOptions(rows=False)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('sweep')
  make_sweep(path, SETTINGS)
  return path


@pytest.fixture(scope='module')
def report(folder):
  return sweep_report(folder, NO_ROWS, print)


def test_the_main_table(report):
  assert [column.name for column in report.columns] == ['exact_match, test', 'alignment_error_rate, test']
  assert [column.higher_is_better for column in report.columns] == [True, False]
  assert [row.setting.label for row in report.rows] == [
    'score=dot, alignment=softmax',
    'score=dot, alignment=local_p(width=10)',
    'score=general, alignment=softmax',
    'score=general, alignment=local_p(width=10)',
  ]
  for row in report.rows:
    values = [run.results['test']['exact_match']['value'] for run in row.setting.runs]
    cell = row.cells[report.columns[0]]
    assert cell.values == values and cell.mean.value == pytest.approx(np.mean(values))
    assert cell.deviation == pytest.approx(np.std(values, ddof=1)) and cell.mean.low < cell.mean.value < cell.mean.high
    assert row.parameters == 1234 and row.seconds == pytest.approx(5 * 10 / 5.0)


def test_comparisons_and_findings(report):
  assert report.baseline.label == 'score=dot, alignment=softmax' and len(report.contrasts) == 2 * 3
  last = report.contrasts[2]
  values = [[run.value('test', 'exact_match') for run in setting.runs] for setting in (last.setting, report.baseline)]
  assert last.comparison.difference.value == pytest.approx(np.mean(values[0]) - np.mean(values[1]))
  assert last.verdict == 'better' and last.corrected_p >= last.comparison.p
  first, second = report.findings
  assert first.startswith('exact_match, test, compared with score=dot, alignment=softmax: better: ')
  assert 'score=general, alignment=local_p(width=10) (+' in first
  assert second.startswith('alignment_error_rate, test, ')
  for finding, column in zip(report.findings, report.columns, strict=True):
    for contrast in report.contrasts:
      if contrast.column == column:
        assert re.search(rf'{contrast.verdict}:[^;]*{re.escape(contrast.setting.label)}', finding)
  assert any('With 3 seeds, bootstrap intervals are too narrow' in note for note in report.notes)


def test_another_baseline_and_other_metrics(folder):
  options = ReportOptions(
    {'model.attention.score': 'general', 'model.attention.alignment': 'softmax'}, ['loss', 'entropy']
  )
  report = sweep_report(folder, options, print)
  assert report.baseline.label == 'score=general, alignment=softmax'
  assert [column.metric for column in report.columns] == ['loss', 'entropy']
  assert {contrast.column.metric for contrast in report.contrasts} == {'loss'}  # neither high nor low entropy is better
  assert {contrast.verdict for contrast in report.contrasts} == {'no difference found'}  # all losses are equal
  expected = 'loss, test, compared with score=general, alignment=softmax: no difference found: all 3 other settings.'
  assert report.findings == [expected]


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'baseline': {'score': 'dot'}}, "unknown field of --baseline 'score'"),
    ({'baseline': {'model.attention.score': 'dot'}}, 'score=dot matches 2 settings, expected one of: score=dot, '),
    ({'metrics': ['blue']}, "unknown metric of the report 'blue'"),
    ({'test': 'z'}, "unknown test 'z'"),
  ],
)
def test_mistakes(folder, options, message):
  with pytest.raises(UserError) as error:
    sweep_report(folder, ReportOptions(**options), print)
  assert message in str(error.value)


def test_tables_hold_every_number(report):
  table = summary_table(report)
  assert len(table) == 8 and set(table['model.attention.score']) == {'dot', 'general'}
  row = table[(table.setting == report.rows[3].setting.label) & (table.metric == 'exact_match')].iloc[0]
  assert row['mean'] == pytest.approx(report.rows[3].cells[report.columns[0]].mean.value)
  assert row['verdict'] == 'better' and row['corrected_p'] == report.contrasts[2].corrected_p
  runs = runs_table(report)
  assert len(runs) == 4 * 3 * 4 and set(runs.metric) == {'loss', 'exact_match', 'alignment_error_rate', 'entropy'}


def test_files_are_written_and_links_lead_to_runs(folder, report):
  write_files(report, folder)
  text = (folder / 'report.md').read_text('utf-8')
  links = re.findall(r'\]\(([^)]+)\)', text)
  assert len(links) == 2 * 12 + 5 and all((folder / unquote(link)).exists() for link in links)
  assert len(list(csv.DictReader(io.StringIO((folder / 'report.csv').read_text())))) == 8
  names = {path.stem for path in (folder / 'report_pictures').iterdir()}
  assert names == {
    'alignment',
    'curves',
    'interaction.alignment_error_rate',
    'interaction.exact_match',
    'values',
  }


def test_pictures_are_drawn(report):
  for picture in draw_pictures(report):
    assert picture.png.startswith(b'\x89PNG') and len(picture.png) > 10_000


class Tags(HTMLParser):
  """The tags and the links of a page."""

  def __init__(self):
    super().__init__()
    self.tags = []
    self.links = []
    self.text = []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [value for name, value in attrs if name in ('href', 'src')]

  def handle_data(self, data):
    self.text.append(data)


def test_the_page_is_self_contained_and_escapes_everything(tmp_path):
  resolved = make_sweep(tmp_path, SETTINGS, seeds=2)
  with open_ledger(tmp_path) as ledger:
    unit = Unit(EVIL, 'x', {'model.attention.score': EVIL}, 'f.py', {}, (0,), EVIL)
    ledger.append(PLANNED, **planned_event(unit))
    ledger.append(FAILED, unit=unit.id, error=EVIL, log=f'{EVIL}.log')
  run = tmp_path / resolved[0].id / 'seed_0' / 'results.json'
  run.write_text(run.read_text().replace('"abc"', '"<b>commit</b>"'))
  report = sweep_report(tmp_path, ReportOptions(title=EVIL, rows=False), print)
  page = render(report, draw_pictures(report), tmp_path, 'html')
  parser = Tags()
  parser.feed(page)
  assert 'script' not in parser.tags and 'b' not in parser.tags
  assert EVIL in ''.join(parser.text) and '<b>commit</b>' in ''.join(parser.text)
  assert not [link for link in parser.links if link.startswith(('http', '//', 'javascript'))]
  assert sum(link.startswith('data:image/png;base64,') for link in parser.links) == 5
  markdown = render(report, [], tmp_path, 'md')
  assert r'\<script\>' in markdown and '<script>' not in markdown and r'\| pipe' in markdown


def test_settings_that_were_dropped_or_have_no_runs_are_left_out(tmp_path):
  resolved = make_sweep(tmp_path, SETTINGS, seeds=1)
  with open_ledger(tmp_path) as ledger:
    ledger.append(RUNG, steps=10, dropped=[resolved[1].id])
  settings = collect_sweep(tmp_path, read_state(tmp_path))
  assert len(settings) == 3
  report = sweep_report(tmp_path, NO_ROWS, print)
  assert any('1 settings were dropped early' in note for note in report.notes)
  assert all(contrast.verdict == 'not tested' for contrast in report.contrasts)
  assert all(math.isnan(row.cells[report.columns[0]].mean.low) for row in report.rows)


def test_an_empty_sweep_has_no_report(tmp_path):
  with open_ledger(tmp_path):
    pass
  with pytest.raises(UserError, match='no run of this sweep has finished'):
    sweep_report(tmp_path, NO_ROWS, print)


def test_any_finished_runs_are_compared(tmp_path):
  first = write_run(tmp_path / 'x' / 'a', base_config(), {'test': {'exact_match': 3.0}})
  second = write_run(tmp_path / 'x' / 'b', base_config(model__embedding=16), {'test': {'exact_match': 5.0}})
  settings = collect_folders([first, second])
  assert [setting.label for setting in settings] == ['a', 'b']
  assert settings[1].factors == {'model.embedding': 16}
  with pytest.raises(UserError, match=f'got {re.escape(str(first))} twice'):
    collect_folders([first, first])
  with pytest.raises(UserError, match='expected at least two run folders'):
    folders_report([first], NO_ROWS, print)
  (second / 'results.json').unlink()
  with pytest.raises(UserError, match=r'b has no results\.json; expected a finished run'):
    collect_folders([first, second])
