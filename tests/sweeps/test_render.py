"""Tables, files, links and the page of a report, and the escaping of texts."""

import csv
import io
import math
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from attention_jax.sweeps.ledger import FAILED, PLANNED, Unit, open_ledger, planned_event
from attention_jax.sweeps.plots import draw_pictures
from attention_jax.sweeps.render import render, runs_table, summary_table, write_files
from attention_jax.sweeps.report import ReportOptions, folders_report, sweep_report
from tests.sweeps.helpers import NO_ROWS, SETTINGS, base_config, make_sweep, tiny_data, write_run

EVIL = '<script>alert(1)</script> & "quotes" | pipe'


def test_tables_have_a_row_for_each_metric_of_a_setting_or_run(report):
  table = summary_table(report)
  assert len(table) == 8 and set(table['model.attention.score']) == {'dot', 'general'}
  row = table[(table.setting == report.rows[3].setting.label) & (table.metric == 'exact_match')].iloc[0]
  assert row['mean'] == pytest.approx(report.rows[3].cells[report.columns[0]].mean.value)
  assert row['verdict'] == 'better' and row['corrected_p'] == report.contrasts[2].corrected_p
  runs = runs_table(report)
  assert len(runs) == 4 * 3 * 4 and set(runs.metric) == {'loss', 'exact_match', 'alignment_error_rate', 'entropy'}


@pytest.mark.long
def test_runs_that_differ_only_in_the_seed_have_their_own_differences(tmp_path, data_folder):
  folders = []
  for seed in range(3):
    config = base_config(training__seed=seed, **tiny_data(data_folder))
    folders.append(write_run(tmp_path / str(seed), config, {'test': {'exact_match': 10.0 * seed}}))
  report = folders_report(folders, NO_ROWS, print)
  assert all(row.update_flop > 0 for row in report.rows)
  assert summary_table(report)['difference'].tolist() == pytest.approx([math.nan, 10, 20], nan_ok=True)
  other = folders_report(folders, NO_ROWS._replace(baseline={'training.seed': '2'}), print)
  assert other.baseline.label == '2'


@pytest.mark.long
def test_files_are_written_and_links_lead_to_runs(folder, report):
  written = write_files(report, folder)
  assert {'paper.tex', 'paper.md', 'paper.bib', 'figure.pdf'} < {path.name for path in written}
  assert all(path.exists() for path in written)
  text = (folder / 'report.md').read_text('utf-8')
  links = re.findall(r'\]\(([^)]+)\)', text)
  # Two links for each run, five pictures, and four files for a paper.
  assert len(links) == 2 * 12 + 5 + 4 and all((folder / unquote(link)).exists() for link in links)
  assert len(list(csv.DictReader(io.StringIO((folder / 'report.csv').read_text())))) == 8
  names = {path.stem for path in (folder / 'report_pictures').iterdir()}
  assert names == {'alignment', 'curves', 'interaction.alignment_error_rate', 'interaction.exact_match', 'values'}


class Tags(HTMLParser):
  """The tags, links and text of a page."""

  def __init__(self, page):
    super().__init__()
    self.tags = []
    self.links = []
    self.text = ''
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [value for name, value in attrs if name in ('href', 'src')]

  def handle_data(self, data):
    self.text += data


def test_the_page_is_self_contained_and_escapes_everything(tmp_path):
  resolved = make_sweep(tmp_path, SETTINGS, seeds=2)
  with open_ledger(tmp_path) as ledger:
    unit = Unit(EVIL, 'x', {'model.attention.score': EVIL}, 'f.py', {}, (0,), EVIL)
    ledger.append(PLANNED, **planned_event(unit))
    ledger.append(FAILED, unit=unit.id, error=EVIL, log=f'{EVIL}.log')
  run = tmp_path / resolved[0].id / 'seed_0' / 'results.json'
  run.write_text(run.read_text().replace('"abc"', '"<b>commit</b>"'))
  report = sweep_report(tmp_path, ReportOptions(title=EVIL, compares_rows=False), print)
  page = Tags(render(report, draw_pictures(report), tmp_path, 'html'))
  assert not {'script', 'b'} & set(page.tags)
  assert all(text in page.text for text in (EVIL, 'For the paper', '<b>commit</b>'))
  assert not [link for link in page.links if link.startswith(('http', '//', 'javascript'))]
  assert sum(link.startswith('data:image/png;base64,') for link in page.links) == 5
  markdown = render(report, [], tmp_path, 'md')
  assert '## For the paper' in markdown and 'paper.tex' not in markdown  # printed: no files are written
  assert r'\<script\>' in markdown and '<script>' not in markdown and r'\| pipe' in markdown
