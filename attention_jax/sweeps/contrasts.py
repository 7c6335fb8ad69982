"""Compares every setting of a report with the baseline: over seeds, and over the rows of the outputs."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from attention_jax.data.files import read_lines
from attention_jax.decoding.metrics import METRICS
from attention_jax.errors import UserError
from attention_jax.specs import parse
from attention_jax.sweeps.collect import FinishedRun, SettingRuns
from attention_jax.sweeps.statistics import Comparison, Interval, RowComparison, compare, compare_rows, correct_p_values
from attention_jax.systems.base import Log, SupportsCorpus
from attention_jax.systems.registry import SYSTEMS
from attention_jax.systems.text_evaluation import ComparedTexts, select_texts

SIGNIFICANCE = 0.05


class MetricColumn(NamedTuple):
  """A metric on a split.

  Attributes:
    split: the split.
    metric: the metric.
    unit: its unit.
    higher_is_better: its direction; None if neither direction is better.
  """

  split: str
  metric: str
  unit: str
  higher_is_better: bool | None

  @property
  def name(self) -> str:
    """Its name in tables."""
    return f'{self.metric}, {self.split}'

  def value(self, run: FinishedRun) -> float | None:
    """Returns the value of a run, or None if it lacks the metric."""
    return run.value(self.split, self.metric)


class Contrast(NamedTuple):
  """Comparison of a setting with the baseline in one column.

  Attributes:
    setting: the setting.
    column: the column.
    comparison: over seeds.
    corrected_p: `p` after the correction for the number of comparisons in this column, so that it does not depend on
      which other columns a report has.
    row_comparisons: comparisons of the outputs of each pair of runs; empty if outputs were not compared.
  """

  setting: SettingRuns
  column: MetricColumn
  comparison: Comparison
  corrected_p: float
  row_comparisons: Sequence[RowComparison]

  @property
  def tests_rows(self) -> bool:
    """Whether `difference` and `p` are those over rows: for a single pair of runs whose outputs were compared."""
    return self.comparison.seeds == 1 and bool(self.row_comparisons)

  @property
  def difference(self) -> Interval:
    """The difference, setting minus baseline, with its interval over seeds or, see `tests_rows`, over rows."""
    return (self.row_comparisons[0] if self.tests_rows else self.comparison).difference

  @property
  def p(self) -> float:
    """The p of the test over seeds or, see `tests_rows`, over rows, without a correction."""
    return (self.row_comparisons[0] if self.tests_rows else self.comparison).p

  @property
  def verdict(self) -> str:
    """'better', 'worse', 'no difference found' or 'not tested'."""
    if math.isnan(self.corrected_p):
      return 'not tested'
    if self.corrected_p >= SIGNIFICANCE:
      return 'no difference found'
    return 'better' if (self.difference.value > 0) == self.column.higher_is_better else 'worse'


def contrast_all(
  settings: Sequence[SettingRuns],
  baseline: SettingRuns,
  columns: Sequence[MetricColumn],
  test: str,
  compares_rows: bool,
  log: Log,
) -> list[Contrast]:
  """Compares every setting with the baseline, in every column whose metric has a direction and that has pairs of runs.

  The p values of each column are corrected for the comparisons in this column.

  Args:
    settings: the settings.
    baseline: one of them.
    columns: the columns of the report.
    test: a key of statistics.TESTS.
    compares_rows: whether outputs are also compared row by row, which reads the data.
    log: called with a line if values or outputs cannot be compared.
  """
  contrasts: list[Contrast] = []
  comparer = _OutputComparer(log) if compares_rows else None
  for column in columns:
    if column.higher_is_better is None:
      continue
    column_contrasts = []
    without_pairs = []
    for setting in settings:
      if setting is baseline:
        continue
      pairs = _pairs(setting, baseline, column)
      if pairs:
        values = [column.value(run) for run, _ in pairs]
        base_values = [column.value(base_run) for _, base_run in pairs]
        comparison = compare(values, base_values, column.higher_is_better, test)
        row_comparisons = comparer.compare(pairs, column) if comparer else []
        column_contrasts.append(Contrast(setting, column, comparison, math.nan, row_comparisons))
      else:
        without_pairs.append(setting.label)
    if without_pairs:
      log(
        f'not compared in {column.name}: {"; ".join(without_pairs)} (no seed has a value of the setting and one of the '
        f'baseline, {baseline.label})'
      )
    contrasts += correct_contrasts(column_contrasts)
  return contrasts


def correct_contrasts(contrasts: Sequence[Contrast]) -> list[Contrast]:
  """Returns contrasts, all of one column, with their p corrected for their number."""
  corrected = correct_p_values([contrast.p for contrast in contrasts])
  return [contrast._replace(corrected_p=p) for contrast, p in zip(contrasts, corrected, strict=True)]


def _pairs(setting: SettingRuns, baseline: SettingRuns, column: MetricColumn) -> list[tuple[FinishedRun, FinishedRun]]:
  """Pairs of runs with the same seed that have the metric; two single runs are a pair whatever their seeds."""
  runs = {run.seed: run for run in setting.runs if column.value(run) is not None}
  base_runs = {run.seed: run for run in baseline.runs if column.value(run) is not None}
  common = sorted(runs.keys() & base_runs.keys())
  if not common and len(runs) == len(base_runs) == 1:
    return [(*runs.values(), *base_runs.values())]
  return [(runs[seed], base_runs[seed]) for seed in common]


class _OutputComparer:
  """Compares the outputs of runs row by row; the references are read once for each data set.

  Args:
    log: called with a line if outputs cannot be compared, once for all metrics.
  """

  def __init__(self, log: Log):
    self._log = functools.cache(log)
    self._systems: dict[tuple, SupportsCorpus] = {}  # by the config of their data

  def compare(self, pairs: Sequence[tuple[FinishedRun, FinishedRun]], column: MetricColumn) -> list[RowComparison]:
    """Returns a comparison for each pair; none if the config has no such text metric, or outputs cannot be compared."""
    specs = [_metric_spec(run, column.metric) for run in pairs[0]]
    if column.metric not in METRICS or None in specs:
      return []
    try:
      if specs[0] != specs[1]:
        raise UserError(f'{column.metric} is {specs[1]!r} in the baseline and {specs[0]!r} in another setting')
      return [self._compare_pair(specs[0], *pair, column.split) for pair in pairs]
    except (UserError, OSError) as error:
      self._log(f'outputs on {column.split} are not compared row by row: {error}')
      return []

  def _compare_pair(self, spec: str, run: FinishedRun, base_run: FinishedRun, split: str) -> RowComparison:
    texts, base_texts = (self._texts(member, split) for member in (run, base_run))
    if (texts.sources, texts.references) != (base_texts.sources, base_texts.references):
      raise UserError(f'{run.folder} and {base_run.folder} differ in their sources or references; expected the same')
    return compare_rows(spec, base_texts.hypotheses, texts.hypotheses, texts.references)

  def _texts(self, run: FinishedRun, split: str) -> ComparedTexts:
    corpus = self._corpus(run, split)
    path = run.folder / f'hypotheses.{split}.txt'
    lines = read_lines(str(path))
    if len(lines) != len(corpus.source):
      raise UserError(f'{path} has {len(lines)} lines, the data now have {len(corpus.source)} rows; expected as many')
    return select_texts(corpus, lines, run.config.evaluation)

  def _corpus(self, run: FinishedRun, split: str) -> Any:
    key = (run.config.system, run.config.data)
    if key not in self._systems:
      system = SYSTEMS[run.config.system].open(run.config, str(run.folder))
      if not isinstance(system, SupportsCorpus):
        raise UserError(f'system {run.config.system!r} has no reference texts')
      self._systems[key] = system
    return self._systems[key].corpus(split)


def _metric_spec(run: FinishedRun, metric: str) -> str | None:
  """The spec of a text metric in the config of a run, or None."""
  specs = {parse(spec, 'metric')[0]: spec for spec in getattr(run.config.evaluation, 'metrics', ())}
  return specs.get(metric)
