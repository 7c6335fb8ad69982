"""The report of a sweep or of any finished runs: what was measured, what differs, and what does not."""

import datetime
import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention_jax.decoding.metrics import mean_and_deviation
from attention_jax.errors import UserError, choose
from attention_jax.specs import parse
from attention_jax.sweeps.collect import SettingRuns, collect_folders, collect_sweep
from attention_jax.sweeps.contrasts import SIGNIFICANCE, Contrast, MetricColumn, contrast_all
from attention_jax.sweeps.estimate import measure_costs
from attention_jax.sweeps.ledger import FAILED, FINISHED, SweepState, UnitState, read_state
from attention_jax.sweeps.plan import observed_state
from attention_jax.sweeps.resolve import is_value
from attention_jax.sweeps.space import Setting, label
from attention_jax.sweeps.statistics import (
  TESTS,
  Interval,
  bootstrap_interquartile_mean,
  bootstrap_mean,
)
from attention_jax.systems.base import Log
from attention_jax.systems.config import flatten_config
from attention_jax.systems.experiment import selectable_metrics

FEW_SEEDS = 5  # below, bootstrap intervals over seeds are noticeably too narrow
ALIGNMENT_ERROR = 'alignment_error_rate'
MISSING = '–'
MARKDOWN_SPECIAL = re.compile(r'([\\`*|<>\[\]{}])')


class ReportOptions(NamedTuple):
  """Options of a report.

  Attributes:
    baseline: the setting that the others are compared with, by some of its fields; None for the first.
    metrics: the metrics to report, the most important first; () for the defaults that were measured: training.select
      and evaluation.metrics of the first config, and the alignment error rate; or all metrics if none of these was.
    title: the question that the report answers; '' for none.
    test: a key of statistics.TESTS, the paired test over seeds.
    compares_rows: whether outputs are also compared row by row, which reads the data.
  """

  baseline: Setting | None = None
  metrics: Sequence[str] = ()
  title: str = ''
  test: str = 't'
  compares_rows: bool = True


class ReportCell(NamedTuple):
  """A metric of a setting over its seeds.

  Attributes:
    mean, interquartile_mean: with their intervals.
    deviation: standard deviation (n - 1); NaN for one seed, and if a value is not finite.
    values: one for each run that has the metric, in the order of their seeds.
  """

  mean: Interval
  interquartile_mean: Interval
  deviation: float
  values: Sequence[float]


class ReportRow(NamedTuple):
  """A setting in the main table.

  Attributes:
    setting: its runs.
    cells: by column; a column that the setting lacks is missing.
    parameters: number of parameters; 0 if unknown.
    update_flop: FLOP of the matrix products of an update; NaN if unknown.
    seconds: mean over the runs of FinishedRun.training_seconds.
  """

  setting: SettingRuns
  cells: Mapping[MetricColumn, ReportCell]
  parameters: int
  update_flop: float
  seconds: float


class Report(NamedTuple):
  """Everything that a report shows.

  Attributes:
    title: its title.
    folder: the folder of the sweep; for a comparison of run folders, the working directory.
    created: date and time.
    columns: of the main table, the most important first.
    rows: of the main table.
    baseline: the setting that the others are compared with.
    contrasts: comparisons with the baseline.
    findings: sentences that state what differs and what does not.
    notes: how to read the numbers, and what is unusual.
    fields: fields of the config that differ, if the labels of the settings do not name them.
    failed: the units that failed.
    unfinished: number of units that have neither finished nor failed, without those of dropped settings.
    test: a key of statistics.TESTS, the paired test over seeds.
  """

  title: str
  folder: Path
  created: str
  columns: Sequence[MetricColumn]
  rows: Sequence[ReportRow]
  baseline: SettingRuns
  contrasts: Sequence[Contrast]
  findings: Sequence[str]
  notes: Sequence[str]
  fields: Sequence[str]
  failed: Sequence[UnitState]
  unfinished: int
  test: str

  @property
  def main_columns(self) -> list[MetricColumn]:
    """The columns of the first split."""
    return [column for column in self.columns if column.split == self.columns[0].split]


def sweep_report(folder: Path, options: ReportOptions, log: Log) -> Report:
  """Builds the report of a sweep from its ledger and the finished runs of settings that are not dropped.

  Args:
    folder: the folder of the sweep.
    options: options of the report.
    log: called with a line if outputs cannot be compared.

  Raises:
    UserError: if the folder has no ledger or no such runs, if files of a run have changed, and for an unknown metric or
      test, or a baseline that does not match exactly one setting.
  """
  folder = folder.absolute()
  state = observed_state(read_state(folder), folder)
  settings = collect_sweep(folder, state)
  if not settings:
    raise UserError(f'{folder}: no run of this sweep has finished; those of dropped settings do not count')
  costs = {setting_id: event['update_flop'] for setting_id, event in state.costs.items()}
  return _build(folder, settings, state, costs, options, log)


def folders_report(folders: Sequence[Path], options: ReportOptions, log: Log) -> Report:
  """Builds the report of finished runs, which are compared with the first unless `options` has a baseline.

  Args:
    folders: the run folders, at least two.
    options: options of the report.
    log: called with a line if outputs cannot be compared, or if FLOP cannot be counted because data cannot be read.

  Raises:
    UserError: for fewer than two folders, the same folder twice, a run that has not finished, runs of different
      systems, and as `sweep_report` for files, baseline, metric and test.
  """
  if len(folders) < 2:
    raise UserError(f'expected at least two run folders to compare, got {len(folders)}')
  settings = collect_folders(folders)
  systems = {setting.config.system for setting in settings}
  if len(systems) > 1:
    raise UserError(f'only runs of one system can be compared, got {", ".join(sorted(systems))}')
  costs = {}
  try:
    for setting_id, cost in measure_costs([(setting.id, setting.config) for setting in settings], {}):
      costs[setting_id] = cost.update_flop
  except (UserError, OSError) as error:
    log(f'the FLOP of an update are not counted: {error}')
  return _build(Path.cwd(), settings, SweepState(), costs, options, log)


def _build(
  folder: Path,
  settings: Sequence[SettingRuns],
  state: SweepState,
  flop: Mapping[str, float],
  options: ReportOptions,
  log: Log,
) -> Report:
  choose(options.test, TESTS, 'test')
  columns = _columns(settings, options.metrics)
  baseline = _find_baseline(settings, options.baseline)
  not_compared: list[str] = []

  def log_and_note(line):
    log(line)
    not_compared.append(f'{line[0].upper()}{line[1:]}.')

  contrasts = contrast_all(settings, baseline, columns, options.test, options.compares_rows, log_and_note)
  rows = [_row(setting, columns, flop.get(setting.id, math.nan)) for setting in settings]
  entries = list(state.units.values())
  failed = [entry for entry in entries if entry.state == FAILED]
  return Report(
    title=options.title or f'Comparison of {len(settings)} settings',
    folder=folder,
    created=datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z'),
    columns=columns,
    rows=rows,
    baseline=baseline,
    contrasts=contrasts,
    findings=_findings(contrasts, baseline, columns),
    notes=[
      *_notes(settings, contrasts, options),
      *not_compared,
      *_signature_notes(settings, columns),
      *_missing_notes(rows),
    ],
    fields=[] if state.units else list(settings[0].factors),
    failed=failed,
    unfinished=sum(entry.state not in (FAILED, FINISHED) for entry in entries),
    test=options.test,
  )


def _columns(settings: Sequence[SettingRuns], metrics: Sequence[str]) -> list[MetricColumn]:
  """The columns of the report: all evaluated splits, and the metrics of ReportOptions.

  If none of the default metrics was measured, all metrics that were measured.
  """
  config = settings[0].config
  results: dict[str, dict[str, str]] = {}  # split -> metric -> unit
  for run in (run for setting in settings for run in setting.runs):
    for split, values in run.results.items():
      results.setdefault(split, {}).update({name: entry['unit'] for name, entry in values.items()})
  measured = dict.fromkeys(name for values in results.values() for name in values)
  for metric in metrics:
    choose(metric, measured, 'metric of the report')
  text = [parse(spec, 'metric')[0] for spec in getattr(config.evaluation, 'metrics', ())]
  defaults = dict.fromkeys([config.training.select, *text, ALIGNMENT_ERROR])
  names = list(metrics) or [name for name in defaults if name in measured] or list(measured)
  directions = functools.reduce(operator.or_, (selectable_metrics(setting.config) for setting in settings))
  return [
    MetricColumn(split, metric, values[metric], directions.get(metric))
    for split, values in results.items()
    for metric in names
    if metric in values
  ]


def _find_baseline(settings: Sequence[SettingRuns], fields: Setting | None) -> SettingRuns:
  """The setting that has the values of `fields`; the first setting if `fields` is empty."""
  if not fields:
    return settings[0]
  values = [flatten_config(setting.config) | dict(setting.factors) for setting in settings]
  for field in fields:
    if not all(field in member for member in values):
      choose(field, settings[0].factors, 'field of --baseline')
  matches = [
    setting
    for setting, member in zip(settings, values, strict=True)
    if all(is_value(field, value, member[field]) for field, value in fields.items())
  ]
  if len(matches) != 1:
    names = '; '.join(setting.label for setting in settings)
    raise UserError(f'--baseline: {label(fields)} matches {len(matches)} settings, expected one of: {names}')
  return matches[0]


def _row(setting: SettingRuns, columns: Sequence[MetricColumn], update_flop: float) -> ReportRow:
  cells = {}
  for column in columns:
    if values := list(setting.values(column.split, column.metric).values()):
      _, deviation = mean_and_deviation(values)
      cells[column] = ReportCell(bootstrap_mean(values), bootstrap_interquartile_mean(values), deviation, values)
  seconds = float(np.mean([run.training_seconds for run in setting.runs]))
  return ReportRow(setting, cells, setting.runs[0].parameters, update_flop, seconds)


def _findings(contrasts: Sequence[Contrast], baseline: SettingRuns, columns: Sequence[MetricColumn]) -> list[str]:
  """One sentence per column with contrasts: which settings are better, worse, not found to differ, or not tested.

  Each setting has its difference from the baseline, with an interval: also a large one that is not significant.
  """
  findings = []
  for column in columns:
    groups: dict[str, list[Contrast]] = {}
    for contrast in contrasts:
      if contrast.column == column:
        groups.setdefault(contrast.verdict, []).append(contrast)
    if groups:
      parts = [
        f'{verdict}: {", ".join(map(_describe_contrast, groups[verdict]))}' for verdict in VERDICTS if verdict in groups
      ]
      findings.append(f'{column.name}, compared with {baseline.label}: {"; ".join(parts)}.')
  return findings


VERDICTS = ('better', 'worse', 'no difference found', 'not tested')  # in the order of a sentence


def _describe_contrast(contrast: Contrast) -> str:
  """'score=dot (-6.3 [-14.2, +1.6], corrected p = 0.1)'."""
  over = ' over rows' if contrast.tests_rows else ''
  p = '' if math.isnan(contrast.corrected_p) else f', corrected p = {contrast.corrected_p:.2g}'
  return f'{contrast.setting.label} ({format_difference(contrast.difference)}{over}{p})'


def format_difference(difference: Interval) -> str:
  """Returns '-6.3 [-14.2, +1.6]'; '-6.3 [no interval]', and MISSING for NaN."""
  if math.isnan(difference.value):
    return MISSING
  has_interval = not math.isnan(difference.low)
  ends = f'{difference.low:+.3g}, {difference.high:+.3g}' if has_interval else 'no interval'
  return f'{difference.value:+.3g} [{ends}]'


def format_number(value: float | None) -> str:
  """Returns two decimal places from 1 to 10,000, four significant digits otherwise, and MISSING for NaN and None."""
  if value is None or math.isnan(value):
    return MISSING
  return f'{value:.2f}' if 1 <= abs(value) < 1e4 else f'{value:.4g}'


def escape_markdown(text: object) -> str:
  """Returns a text as one line of Markdown, without markup."""
  return MARKDOWN_SPECIAL.sub(r'\\\1', ' '.join(str(text).split()))


def _notes(settings: Sequence[SettingRuns], contrasts: Sequence[Contrast], options: ReportOptions) -> list[str]:
  seed_counts = [len(setting.runs) for setting in settings]
  notes = [
    'Intervals of means are 95 % percentile bootstrap intervals over seeds. IQM is the interquartile mean: the mean '
    'itself for fewer than four seeds.',
  ]
  if min(seed_counts) == 1:
    notes.append(
      'A setting with one seed has no interval and no test over seeds. For a single pair of runs, the interval of the '
      'difference and p are those over rows, if outputs are compared: they show whether these two trained models '
      'differ. Other seeds may differ as much.'
    )
  if small_counts := [count for count in seed_counts if 1 < count < FEW_SEEDS]:
    notes.append(
      f'With {min(small_counts)} seeds, bootstrap intervals are too narrow, and only large differences are found.'
    )
  if tested := Counter(contrast.column for contrast in contrasts if not math.isnan(contrast.corrected_p)):
    counts = '; '.join(f'{column.name}: {count}' for column, count in tested.items())
    notes.append(
      f'p is that of a paired {TEST_NAMES[options.test]} over seeds or, for a single pair of runs, of the test over '
      'rows. Corrected p is p corrected for the number of comparisons in the same metric and split '
      f'(Benjamini-Hochberg), whichever other metrics are shown; comparisons: {counts}. A setting is better or worse '
      f'if its corrected p is below {SIGNIFICANCE}. That no difference was found does not mean that there is none: '
      'see its interval. P(better) is the probability that a run of the setting is better than one of the baseline.'
    )
  if any(contrast.row_comparisons for contrast in contrasts):
    notes.append(
      'Rows: the number of pairs of runs whose outputs differ at p < 0.05, not corrected, when rows are resampled, or '
      'the p of a single pair, not corrected (metrics of sacrebleu: paired bootstrap; rates: paired permutation test). '
      'This tests whether two trained models differ, not two settings.'
    )
  commits = sorted({run.commit or 'unknown' for setting in settings for run in setting.runs})
  if len(commits) > 1:
    notes.append(f'The runs are of different versions of the code: {", ".join(commits)}.')
  return notes


def _signature_notes(settings: Sequence[SettingRuns], columns: Sequence[MetricColumn]) -> list[str]:
  """A note for each column whose values have different signatures, such as BLEU of different tokenizers."""
  notes = []
  for column in columns:
    entries = [run.results.get(column.split, {}).get(column.metric) for setting in settings for run in setting.runs]
    signatures = sorted({entry['signature'] for entry in entries if entry})
    if len(signatures) > 1:
      notes.append(f'{column.name} was not measured in the same way in all runs: {"; ".join(signatures)}.')
  return notes


def _missing_notes(rows: Sequence[ReportRow]) -> list[str]:
  """A note for each cell that some runs of its setting lack, such as those of an older version of the code."""
  return [
    f'{row.setting.label}: {len(cell.values)} of {len(row.setting.runs)} runs have {column.name}.'
    for row in rows
    for column, cell in row.cells.items()
    if len(cell.values) < len(row.setting.runs)
  ]


TEST_NAMES = {'t': 't-test', 'wilcoxon': 'Wilcoxon test', 'permutation': 'permutation test'}
