"""Statistics over seeds and over rows, with scipy and sacrebleu.

Runs of two settings with the same seed are paired. They are trained on the same batches in the same order, unless the
settings differ in the data or the batch size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from sacrebleu.significance import _bootstrap_resample, _compute_p_value

from attention_jax.decoding.metrics import RowCounts, count_rows, reference_streams, sacrebleu_metric

CONFIDENCE = 0.95
SEED = 0  # of the random generator, so that a report can be repeated
SEED_RESAMPLES = 9999  # resamples, or permutations, of the training seeds
ROW_RESAMPLES = 1000  # resamples, or permutations, of the rows of a data set
ROW_BATCH = 100  # resamples or permutations at a time, which bounds the memory
TRIMMED = 0.25  # share of the values at each end that the interquartile mean leaves out


class Interval(NamedTuple):
  """An estimate with a 95 % interval; the ends are NaN where no interval is computed."""

  value: float
  low: float
  high: float


def bootstrap_mean(values: Sequence[float]) -> Interval:
  """Returns the mean of values, one per seed or example, with its percentile bootstrap interval.

  Agarwal et al. (2021).
  """
  return _bootstrap(values, np.mean)


def bootstrap_interquartile_mean(values: Sequence[float]) -> Interval:
  """Returns the mean over seeds without the lowest and the highest quarter of the values, with its bootstrap interval.

  Agarwal et al. (2021). A quarter is rounded down, so that for fewer than four seeds it is the mean of all.
  """
  return _bootstrap(values, lambda x, axis: scipy.stats.trim_mean(x, TRIMMED, axis=axis))


def _bootstrap(values: Sequence[float], statistic: Callable) -> Interval:
  values = np.asarray(values, float)
  with np.errstate(invalid='ignore'):  # ∞ - ∞ is NaN
    value = float(statistic(values, axis=0))
  if len(values) < 2 or not np.isfinite(values).all():
    return Interval(value, math.nan, math.nan)
  if np.ptp(values) == 0:
    return Interval(value, value, value)
  interval = scipy.stats.bootstrap(
    (values,),
    statistic,
    confidence_level=CONFIDENCE,
    n_resamples=SEED_RESAMPLES,
    method='percentile',
    rng=np.random.default_rng(SEED),
  ).confidence_interval
  return Interval(value, float(interval.low), float(interval.high))


class Comparison(NamedTuple):
  """A setting against the baseline, over pairs of runs.

  Attributes:
    seeds: number of pairs.
    difference: mean difference, setting minus baseline, with the 95 % interval of the t distribution.
    improvement: probability that a run of the setting is better than one of the baseline: the share of the n²
      combinations of one run of each in which it is better; ties count half.
    p: the p value of the paired test; NaN if it cannot be computed, as with a value that is NaN or infinite.
  """

  seeds: int
  difference: Interval
  improvement: float
  p: float


def _permutation(x: np.ndarray, y: np.ndarray) -> float:
  def mean_difference(x, y, axis):
    return np.mean(x - y, axis=axis)

  options = {'permutation_type': 'samples', 'n_resamples': SEED_RESAMPLES, 'vectorized': True}
  return scipy.stats.permutation_test((x, y), mean_difference, rng=np.random.default_rng(SEED), **options).pvalue


# With n pairs, the exact tests cannot give a p below 2 / 2^n: 0.25 for three seeds. The t-test can, but assumes that
# the differences between setting and baseline, one for each seed, are normally distributed.
TESTS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
  't': lambda x, y: scipy.stats.ttest_rel(x, y).pvalue,
  'wilcoxon': lambda x, y: scipy.stats.wilcoxon(x, y).pvalue,
  'permutation': _permutation,
}


def compare(values: Sequence[float], baseline: Sequence[float], higher_is_better: bool, test: str = 't') -> Comparison:
  """Compares the runs of a setting with those of the baseline, in pairs.

  Args:
    values: the values of a metric, one per pair.
    baseline: the values of the baseline, in the same order.
    higher_is_better: whether higher values of the metric are better.
    test: a key of TESTS.
  """
  x = np.asarray(values, float)
  y = np.asarray(baseline, float)
  u = scipy.stats.mannwhitneyu(x, y).statistic / (len(x) * len(y))
  improvement = float(u if higher_is_better else 1 - u)
  with np.errstate(invalid='ignore'):  # ∞ - ∞ is NaN
    differences = x - y
    difference = float(np.mean(differences))
  if not np.isfinite(differences).all():
    # scipy would return a p of 0 for a permutation test of NaN.
    return Comparison(len(x), Interval(difference, math.nan, math.nan), improvement, math.nan)
  if len(x) < 2 or np.ptp(differences) < 1e-12 * max(1.0, np.abs(differences).max()):
    # A t-test is undefined without variance, as for one pair or equal differences; the other tests are treated alike.
    p = 1.0 if len(x) > 1 and difference == 0 else math.nan
    return Comparison(len(x), Interval(difference, math.nan, math.nan), improvement, p)
  interval = scipy.stats.ttest_rel(x, y).confidence_interval(CONFIDENCE)
  ends = float(interval.low), float(interval.high)
  return Comparison(len(x), Interval(difference, *ends), improvement, float(TESTS[test](x, y)))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
  """Corrects p values for multiple comparisons, so that the expected share of false discoveries is bounded.

  Benjamini & Hochberg (1995). Valid also for positively dependent p values, such as those of a common baseline.

  Args:
    p_values: the p values; NaN stays NaN and is not counted as a comparison.
  """
  p = np.asarray(p_values, float)
  corrected = np.full_like(p, math.nan)
  is_finite = np.isfinite(p)
  if is_finite.any():
    corrected[is_finite] = scipy.stats.false_discovery_control(p[is_finite], method='bh')
  return corrected.tolist()


class RowComparison(NamedTuple):
  """Comparison of the outputs of two runs on the same rows, by one metric.

  Attributes:
    difference: of the metric, other run minus baseline, with its paired bootstrap interval.
    p: the p value of the paired test over rows; NaN if there is nothing to count, see `compare_rates`.
  """

  difference: Interval
  p: float


def compare_rows(
  spec: str, baseline: Sequence[str], hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> RowComparison:
  """Tests whether two lists of hypotheses differ in a metric, by resampling rows.

  Args:
    spec: a spec of decoding.metrics.METRICS.
    baseline: the hypotheses of the baseline, one per row.
    hypotheses: the hypotheses of the other run, one per row.
    references: one or more per row.
  """
  metric = sacrebleu_metric(spec)
  if metric is not None:
    return _compare_by_sacrebleu(metric, baseline, hypotheses, references)
  first, second = (count_rows(spec, lines, references) for lines in (baseline, hypotheses))
  return compare_rates(first, second)


def _compare_by_sacrebleu(metric: Any, baseline, hypotheses, references) -> RowComparison:
  """Paired bootstrap resampling (Koehn 2004): the p of sacrebleu's PairedTest, and the interval of the same samples."""
  first, second = (_resample_by_sacrebleu(metric, lines, references) for lines in (baseline, hypotheses))
  value = second[0].score - first[0].score
  differences = np.array([y.score - x.score for x, y in zip(first[1], second[1], strict=True)])  # of the same rows
  interval = Interval(value, *map(float, np.quantile(differences, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])))
  deviations = np.abs(differences) - np.abs(differences).mean()
  # sacrebleu gives the smallest possible p to systems whose scores are equal in every sample.
  return RowComparison(interval, _compute_p_value(deviations, abs(value)) if value else 1.0)


def _resample_by_sacrebleu(metric: Any, hypotheses, references) -> tuple[Any, list[Any]]:
  """The score, and those of resampled rows, which are the same rows in every call."""
  statistics = metric._extract_corpus_statistics(hypotheses, reference_streams(references))
  return metric._aggregate_and_compute(statistics), _bootstrap_resample(statistics, metric, ROW_RESAMPLES)[1]


def compare_rates(first: RowCounts, second: RowCounts) -> RowComparison:
  """Compares two rates or means over the same rows: a paired bootstrap interval, and a paired permutation test.

  Args:
    first: counts of the baseline.
    second: counts of the other run.

  Returns:
    The comparison; its values are NaN if a total is zero, such as that of links if no row has any.
  """
  counted = np.concatenate([first.counted, second.counted])
  total = np.concatenate([first.total, second.total])
  rows = np.arange(len(first.counted))

  def difference(x, y, axis=-1):  # x: indices of rows of the first run; y: of the second, after all rows of the first
    return 100 * (counted[y].sum(axis) / total[y].sum(axis) - counted[x].sum(axis) / total[x].sum(axis))

  if not first.total.sum() or not second.total.sum():
    return RowComparison(Interval(math.nan, math.nan, math.nan), math.nan)
  value = float(difference(rows, rows + len(rows)))
  if len(rows) < 2:
    return RowComparison(Interval(value, math.nan, math.nan), 1.0)
  if np.array_equal(first.counted, second.counted) and np.array_equal(first.total, second.total):
    return RowComparison(Interval(0.0, 0.0, 0.0), 1.0)
  options = {'vectorized': True, 'batch': ROW_BATCH, 'n_resamples': ROW_RESAMPLES}
  pair = (rows, rows + len(rows))
  interval = scipy.stats.bootstrap(
    pair, difference, paired=True, method='percentile', rng=np.random.default_rng(SEED), **options
  ).confidence_interval
  return RowComparison(Interval(value, float(interval.low), float(interval.high)), _permutation_p(first, second))


def _permutation_p(first: RowCounts, second: RowCounts) -> float:
  """The p of a paired permutation test: rows of both runs are exchanged at random."""
  counts = np.stack([first.counted, first.total, second.counted, second.total], axis=-1).astype(np.float64)
  changes = np.roll(counts, 2, axis=-1) - counts  # of the sums, for each row that is exchanged

  def difference(exchanged, axis):  # [..., rows], 1 for an exchanged row
    counted, total, second_counted, second_total = np.moveaxis(counts.sum(0) + exchanged @ changes, -1, 0)
    return 100 * (second_counted / second_total - counted / total)

  # scipy.stats.permutation_test has a loop in Python over permutations; this is the same test.
  rng = np.random.default_rng(SEED)
  return float(
    scipy.stats.monte_carlo_test(
      np.zeros(len(counts)),
      lambda size: rng.integers(0, 2, size).astype(np.float64),
      difference,
      vectorized=True,
      n_resamples=ROW_RESAMPLES,
      batch=ROW_BATCH,
    ).pvalue
  )


def bootstrap_rows(spec: str, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Interval:
  """Returns a metric with its bootstrap interval over rows: sacrebleu's for its metrics, scipy's for rates.

  Args:
    spec: a spec of decoding.metrics.METRICS.
    hypotheses: one per row.
    references: one or more per row.
  """
  metric = sacrebleu_metric(spec)
  if metric is not None:
    return _bootstrap_by_sacrebleu(metric, hypotheses, references)
  return bootstrap_ratio(count_rows(spec, hypotheses, references), scale=100)


def _bootstrap_by_sacrebleu(metric: Any, hypotheses, references) -> Interval:
  """The score and the interval that `corpus_score(n_bootstrap=...)` computes."""
  score, samples = _resample_by_sacrebleu(metric, hypotheses, references)
  for sample in samples:  # corpus_score fails if some scores are float and others float32
    sample.score = float(sample.score)
  score.estimate_ci(samples)
  return Interval(score.score, score._mean - score._ci, score._mean + score._ci)  # not public in sacrebleu


def bootstrap_ratio(counts: RowCounts, scale: float = 1) -> Interval:
  """Returns `scale` times the ratio of two sums over rows, with its bootstrap interval over rows.

  Args:
    counts: numerator and denominator of each row; a sum of denominators of 0 in a resample is replaced by 1.
    scale: 100 for %.

  Returns:
    The ratio; its values are NaN if all denominators are 0, such as the numbers of links of rows without any.
  """
  if not counts.total.any():
    return Interval(math.nan, math.nan, math.nan)
  rows = np.arange(len(counts.total))

  def rate(rows, axis=-1):
    return scale * counts.counted[rows].sum(axis) / np.maximum(counts.total[rows].sum(axis), 1)

  value = float(rate(rows))
  if len(rows) < 2:
    return Interval(value, math.nan, math.nan)
  interval = scipy.stats.bootstrap(
    (rows,),
    rate,
    method='percentile',
    vectorized=True,
    batch=ROW_BATCH,
    n_resamples=ROW_RESAMPLES,
    rng=np.random.default_rng(SEED),
  ).confidence_interval
  return Interval(value, float(interval.low), float(interval.high))
