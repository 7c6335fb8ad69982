"""The report: tables, findings, notes and pictures."""

import re
import shutil

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from attention_jax.data import vocab
from attention_jax.errors import UserError
from attention_jax.sweeps.ledger import open_ledger
from attention_jax.sweeps.plots import draw_pictures
from attention_jax.sweeps.render import render
from attention_jax.sweeps.report import ReportOptions, _findings, sweep_report
from attention_jax.sweeps.resolve import resolve
from attention_jax.sweeps.statistics import Interval, RowComparison
from tests.sweeps.helpers import NO_ROWS, SETTINGS, add_run, make_base, make_sweep


def test_the_main_table_has_the_statistics_of_each_setting(report):
  assert [column.name for column in report.columns] == ['exact_match, test', 'alignment_error_rate, test']
  assert [column.higher_is_better for column in report.columns] == [True, False]
  labels = [f'score={x}, alignment={y}' for x in ('dot', 'general') for y in ('softmax', 'local_p(width=10)')]
  assert [row.setting.label for row in report.rows] == labels
  for row in report.rows:
    values = [run.results['test']['exact_match']['value'] for run in row.setting.runs]
    cell = row.cells[report.columns[0]]
    assert cell.values == values and cell.mean.value == pytest.approx(np.mean(values))
    assert cell.deviation == pytest.approx(np.std(values, ddof=1)) and cell.mean.low < cell.mean.value < cell.mean.high
    assert row.parameters == 1234 and row.seconds == pytest.approx(50 / 5.0)  # 50 updates at 5 a second


def test_findings_state_the_verdict_of_each_comparison_with_the_baseline(report):
  assert report.baseline.label == 'score=dot, alignment=softmax' and len(report.contrasts) == 2 * 3
  last = report.contrasts[2]
  values = [[run.value('test', 'exact_match') for run in setting.runs] for setting in (last.setting, report.baseline)]
  assert last.comparison.difference.value == pytest.approx(np.mean(values[0]) - np.mean(values[1]))
  corrected = false_discovery_control([contrast.p for contrast in report.contrasts[:3]])[2]
  assert last.verdict == 'better' and last.comparison.p <= last.corrected_p == pytest.approx(corrected)
  first, second = report.findings
  assert first.startswith('exact_match, test, compared with score=dot, alignment=softmax: better: ')
  low, high = last.difference.low, last.difference.high
  described = f'({last.difference.value:+.3g} [{low:+.3g}, {high:+.3g}], corrected p = {last.corrected_p:.2g})'
  assert f'score=general, alignment=local_p(width=10) {described}' in first
  assert second.startswith('alignment_error_rate, test, ')
  for finding, column in zip(report.findings, report.columns, strict=True):
    for contrast in report.contrasts:
      if contrast.column == column:
        assert re.search(rf'{contrast.verdict}:[^;]*{re.escape(contrast.setting.label)}', finding)


def test_a_large_difference_that_is_not_significant_is_stated_with_its_interval(tmp_path):
  with open_ledger(tmp_path) as ledger:
    for index, values in enumerate([(80.0, 81.0, 82.0), (79.0, 70.0, 75.1)]):
      for seed, value in enumerate(values):
        add_run(ledger, resolve(make_base(), SETTINGS[index]), seed, value, 20.0)
  (finding,) = sweep_report(tmp_path, NO_ROWS._replace(metrics=['exact_match']), print).findings
  expected = 'no difference found: score=dot, alignment=local_p(width=10) (-6.3 [-18.8, +6.19], corrected p = 0.16).'
  assert finding.endswith(expected)


@pytest.mark.long
def test_p_does_not_depend_on_the_metrics_that_are_shown(folder):
  def corrected(*metrics):
    contrasts = sweep_report(folder, NO_ROWS._replace(metrics=metrics), print).contrasts
    return [contrast.corrected_p for contrast in contrasts if contrast.column.metric == 'exact_match']

  p_values = corrected('exact_match')
  assert len(p_values) == 3 and max(p_values) < 1
  assert corrected('alignment_error_rate', 'exact_match', 'loss') == corrected() == p_values


def test_a_single_pair_has_the_interval_and_the_p_over_rows(report):
  rows = RowComparison(Interval(-2.0, -3.0, -1.0), 0.01)
  seeds = report.contrasts[0].comparison._replace(seeds=1, difference=Interval(-2.0, np.nan, np.nan), p=np.nan)
  contrast = report.contrasts[0]._replace(comparison=seeds, row_comparisons=[rows], corrected_p=0.02)
  assert (contrast.difference, contrast.p, contrast.verdict) == (*rows, 'worse')
  (finding,) = _findings([contrast], report.baseline, report.columns)
  assert finding.endswith(' (-2 [-3, -1] over rows, corrected p = 0.02).')
  (finding,) = _findings([contrast._replace(row_comparisons=[], corrected_p=np.nan)], report.baseline, report.columns)
  assert finding.endswith(': not tested: score=dot, alignment=local_p(width=10) (-2 [no interval]).')


def test_notes_count_the_seeds_and_the_tests(tmp_path):
  resolved = make_sweep(tmp_path, SETTINGS[:3], seeds=1)
  with open_ledger(tmp_path) as ledger:
    for setting in resolved[:2]:
      for seed in (1, 2):
        add_run(ledger, setting, seed, 80.0 + seed**2, 20.0)
  notes = sweep_report(tmp_path, NO_ROWS, print).notes
  assert any('A setting with one seed' in note for note in notes)
  assert any('With 3 seeds, bootstrap intervals are too narrow' in note for note in notes)
  assert any('comparisons: exact_match, test: 1; alignment_error_rate, test: 1.' in note for note in notes)


@pytest.mark.parametrize(
  ('old', 'new', 'expected'),
  [
    (
      '"signature": "exact_match"',
      '"signature": "exact_match|case:lc"',
      r'exact_match, test was not measured in the same way in all runs: exact_match; exact_match\|case:lc\.',
    ),
    ('"exact_match": {', '"other": {', r'score=dot, alignment=.*: 2 of 3 runs have exact_match, test\.'),
  ],
  ids=['signature', 'missing'],
)
def test_notes_name_metrics_that_differ_between_runs(tmp_path, old, new, expected):
  make_sweep(tmp_path, SETTINGS[:2])
  path = next(tmp_path.glob('*/seed_1/results.json'))
  path.write_text(path.read_text().replace(old, new))
  notes = sweep_report(tmp_path, NO_ROWS, print).notes
  assert [note for note in notes if re.fullmatch(expected, note)] == notes[-1:]


def test_outputs_that_cannot_be_compared_are_reported_once(tmp_path):
  metrics = ('exact_match', 'token_error_rate')
  base = make_base(evaluation__metrics=metrics)
  with open_ledger(tmp_path) as ledger:
    for setting in SETTINGS[:2]:
      add_run(ledger, resolve(base, setting), 0, 80.0, 20.0, token_error_rate=15.0)
  lines = []
  sweep_report(tmp_path, ReportOptions(metrics=metrics), lines.append)
  assert sum('are not compared row by row' in line for line in lines) == 1


@pytest.mark.parametrize(
  ('changed', 'lines', 'message'),
  [
    ({'data.task': "tsv(train='train.tsv', test='other.tsv')"}, 2, 'differ in their sources or references'),
    ({'data.task': "tsv(train='train.tsv', test='train.tsv')"}, 3, 'differ in their sources or references'),
    ({'evaluation.metrics': ('bleu(lowercase=True)',)}, 2, "bleu is 'bleu' in the baseline and 'bleu(lowercase=True)'"),
    ({}, 3, 'has 3 lines, the data now have 2 rows'),
  ],
)
def test_outputs_are_compared_by_one_metric_on_the_same_rows(tmp_path, changed, lines, message):
  rows = ['a b\tb a', 'c d\td c', 'e f\tf e']
  for name, table in {'train': rows, 'test': rows[:2], 'other': rows[1:]}.items():
    (tmp_path / f'{name}.tsv').write_text('\n'.join(table))
  task = "tsv(train='train.tsv', test='test.tsv')"
  base = make_base(data__task=task, data__folder=str(tmp_path), data__vocabulary='word', evaluation__metrics=('bleu',))
  with open_ledger(tmp_path / 'sweep') as ledger:
    for setting, count in ((resolve(base, {}), 2), (resolve(base, {'model.embedding': 8, **changed}), lines)):
      add_run(ledger, setting, 0, 80.0, 20.0, bleu=15.0)
      folder = ledger.folder / setting.id / 'seed_0'
      for side in ('source', 'target'):
        vocab.train('word', rows).save(folder, side)
      (folder / 'hypotheses.test.txt').write_text('b a\n' * count)
  logged = []
  report = sweep_report(tmp_path / 'sweep', ReportOptions(metrics=('bleu',)), logged.append)
  assert [contrast.row_comparisons for contrast in report.contrasts] == [[]]
  assert len(logged) == 1 and message in logged[0]
  assert [note for note in report.notes if message in note] == [f'O{logged[0][1:]}.']


def test_options_select_the_baseline_and_the_metrics(folder):
  baseline = {'model.attention.score': 'general', 'model.attention.alignment': 'softmax'}
  options = ReportOptions(baseline, ['loss', 'entropy'])
  report = sweep_report(folder, options, print)
  assert report.baseline.label == 'score=general, alignment=softmax'
  also_fixed = options._replace(baseline={**baseline, 'training.steps': '100', 'model.dropout': '0'})
  assert sweep_report(folder, also_fixed, print).baseline.label == report.baseline.label
  assert [column.metric for column in report.columns] == ['loss', 'entropy']
  assert {contrast.column.metric for contrast in report.contrasts} == {'loss'}  # neither high nor low entropy is better
  assert {contrast.verdict for contrast in report.contrasts} == {'no difference found'}  # all losses are equal
  (finding,) = report.findings
  assert finding.count(' (+0 [no interval], corrected p = 1)') == 3


def test_invalid_options_raise(folder, tmp_path):
  for options, message in [
    ({'baseline': {'score': 'dot'}}, "unknown field of --baseline 'score'"),
    ({'baseline': {'model.attention.score': 'dot'}}, 'score=dot matches 2 settings, expected one of: score=dot, '),
    ({'metrics': ['blue']}, "unknown metric of the report 'blue'"),
    ({'test': 'z'}, "unknown test 'z'"),
  ]:
    with pytest.raises(UserError, match=message):
      sweep_report(folder, ReportOptions(**options), print)
  with open_ledger(tmp_path), pytest.raises(UserError, match='no run of this sweep has finished'):
    sweep_report(tmp_path, NO_ROWS, print)


def test_a_metric_that_the_first_setting_lacks_is_compared(tmp_path):
  base = make_base(training__select='loss')
  specs = ("('exact_match',)", "('exact_match', 'ter')", '["ter"]')
  resolved = [resolve(base, {'evaluation.metrics': text}) for text in specs]
  with open_ledger(tmp_path) as ledger:
    for index, setting in enumerate(resolved):
      for seed in range(3):
        add_run(ledger, setting, seed, 80.0, 20.0, **({'ter': 50.0 - 10 * index + seed * index} if index else {}))
  options = NO_ROWS._replace(metrics=['ter'], baseline={'evaluation.metrics': specs[1]})  # tuples are lists in JSON
  (contrast,) = sweep_report(tmp_path, options, print).contrasts
  assert contrast.column.higher_is_better is False and contrast.setting.id == resolved[2].id
  assert contrast.comparison.difference.value == pytest.approx(-9.0) and contrast.comparison.improvement == 1.0


def test_a_note_names_the_settings_that_have_no_seed_in_common_with_the_baseline(tmp_path):
  resolved = [resolve(make_base(), setting) for setting in SETTINGS[:3]]
  with open_ledger(tmp_path) as ledger:
    for setting, seeds in zip(resolved, [(0, 1), (2, 3), (0, 1)], strict=True):
      for seed in seeds:
        add_run(ledger, setting, seed, 80.0 + seed, 20.0)
  lines = []
  report = sweep_report(tmp_path, NO_ROWS._replace(metrics=['exact_match']), lines.append)
  assert [contrast.setting.id for contrast in report.contrasts] == [resolved[2].id]
  (line,) = lines
  assert line.startswith(f'not compared in exact_match, test: {report.rows[1].setting.label} (no seed has a value')
  assert f'N{line[1:]}.' in report.notes


def test_a_run_whose_folder_was_removed_is_unfinished(tmp_path):
  make_sweep(tmp_path, SETTINGS[:2])
  shutil.rmtree(next(tmp_path.glob('*/seed_1')))
  report = sweep_report(tmp_path, NO_ROWS, print)
  assert report.unfinished == 1 and sum(len(row.setting.runs) for row in report.rows) == 5


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_seed_whose_metric_is_not_finite_is_shown(tmp_path, value):
  with open_ledger(tmp_path) as ledger:
    for setting in SETTINGS[:2]:
      for seed in range(3):
        add_run(ledger, resolve(make_base(), setting), seed, 80 + seed, 20, loss=[value, 1.0, 2.0][seed])
  report = sweep_report(tmp_path, ReportOptions(metrics=('loss',), test='permutation', compares_rows=False), print)
  (cell,) = report.rows[0].cells.values()
  assert np.isnan(cell.deviation) and cell.mean.value == pytest.approx(value, nan_ok=True)
  text = render(report, draw_pictures(report), tmp_path, 'md')
  assert '| loss, test | – | 3 | – | – |' in text and 'not tested' in text and 'nan' not in text
