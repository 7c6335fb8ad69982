"""Statistics against independent computations."""

import itertools
import json
import math

import numpy as np
import pytest
import scipy.special
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from attention_jax.decoding.metrics import METRICS, RowCounts, compute_metric, count_rows
from attention_jax.sweeps.statistics import (
  TESTS,
  bootstrap_interquartile_mean,
  bootstrap_mean,
  bootstrap_rows,
  compare,
  compare_rates,
  compare_rows,
  correct_p_values,
)

VALUES = [3.0, 4.5, 5.0, 7.0, 11.0, 4.0]


def test_the_bootstrap_of_a_mean_agrees_with_resampling_by_hand():
  interval = bootstrap_mean(VALUES)
  means = np.random.default_rng(1).choice(VALUES, (200_000, len(VALUES))).mean(1)
  assert interval.value == np.mean(VALUES)
  # Means of these values are multiples of 1 / 12: percentiles of two samples differ by one step at most.
  np.testing.assert_allclose([interval.low, interval.high], np.percentile(means, [2.5, 97.5]), atol=1 / 12 + 1e-9)
  # The interquartile mean leaves out a quarter at each end.
  assert bootstrap_interquartile_mean(VALUES).value == np.mean(sorted(VALUES)[1:-1])
  assert bootstrap_interquartile_mean([1.0, 2.0, 9.0]).value == 4.0


def test_the_interval_is_nan_for_one_value_or_nan_and_spans_two_values():
  assert all(math.isnan(end) for end in bootstrap_mean([3.0])[1:])
  assert bootstrap_mean([2.0, 2.0]) == (2.0, 2.0, 2.0)
  assert math.isnan(bootstrap_mean([1.0, math.nan]).low)
  interval = bootstrap_mean([1.0, 3.0])
  assert (interval.low, interval.high) == (1.0, 3.0)


def test_the_paired_comparison_agrees_with_the_formulas_of_student():
  x = np.array([3.0, 5.0, 8.0, 4.0])
  y = np.array([2.0, 4.5, 5.0, 5.0])
  comparison = compare(x, y, higher_is_better=True)
  d = x - y
  error = d.std(ddof=1) / math.sqrt(len(d))
  t = d.mean() / error
  p = scipy.special.betainc(1.5, 0.5, 3 / (3 + t * t))  # the tail of the t distribution with 3 degrees of freedom
  assert comparison.p == pytest.approx(p) and comparison.difference.value == pytest.approx(d.mean())
  reach = scipy.special.stdtrit(3, 0.975) * error
  assert comparison.difference[1:] == pytest.approx((d.mean() - reach, d.mean() + reach))
  wins = np.mean([(a > b) + 0.5 * (a == b) for a, b in itertools.product(x, y)])
  assert comparison.improvement == pytest.approx(wins)
  assert compare(x, y, higher_is_better=False).improvement == pytest.approx(1 - wins)


def test_the_p_of_rates_is_that_of_all_exchanges_of_rows():
  random = np.random.default_rng(3)
  totals = random.integers(1, 9, (2, 10))
  counts = random.integers(0, totals + 1)

  def difference(exchanged):
    counted, total = (np.where(exchanged, x[::-1], x).sum(1) for x in (counts, totals))
    return counted[1] / total[1] - counted[0] / total[0]

  differences = [difference(exchanged) for exchanged in itertools.product([False, True], repeat=10)]
  expected = np.mean(np.abs(differences) >= abs(differences[0]) - 1e-12)
  assert 0.1 < expected < 0.9
  assert compare_rates(*map(RowCounts, counts, totals)).p == pytest.approx(expected, abs=0.05)


def test_the_permutation_test_counts_all_signs():
  d = np.array([1.0, 2.0, 3.0, -0.5])
  p = compare(d, np.zeros(4), True, 'permutation').p
  means = [abs(np.mean(d * signs)) for signs in itertools.product([1, -1], repeat=4)]
  assert p == pytest.approx(np.mean(np.array(means) >= abs(d.mean()) - 1e-12))
  assert compare(d, np.zeros(4), True, 'wilcoxon').p == pytest.approx(4 / 16)  # rank sums of at most 1


def test_p_is_1_without_differences_and_nan_if_differences_do_not_vary():
  assert compare([3.0, 4.0], [3.0, 4.0], True).p == 1.0
  assert math.isnan(compare([3.0, 4.0], [2.0, 3.0], True).p)
  assert math.isnan(compare([3.0], [2.0], True).p) and compare([3.0], [2.0], True).improvement == 1.0


def test_p_values_are_corrected_as_benjamini_and_hochberg_do():
  p = np.array([0.03, 0.001, math.nan, 0.04, 0.2])
  known = np.sort(p[np.isfinite(p)])
  expected = {value: min(known[j] * 4 / (j + 1) for j in range(i, 4)) for i, value in enumerate(known)}
  corrected = correct_p_values(p)
  assert math.isnan(corrected[2])
  assert [c for c in corrected if not math.isnan(c)] == pytest.approx([expected[v] for v in p if not math.isnan(v)])
  assert correct_p_values([]) == []


def test_rates_are_compared_by_rows():
  rng = np.random.default_rng(0)
  total = rng.integers(1, 9, 200)
  worse, better = (RowCounts(rng.binomial(total, rate), total) for rate in (0.4, 0.3))
  comparison = compare_rates(worse, better)
  difference = 100 * (better.counted.sum() - worse.counted.sum()) / total.sum()
  assert comparison.difference.value == pytest.approx(difference)
  samples = np.random.default_rng(3).integers(0, 200, (20_000, 200))
  resampled = 100 * (better.counted - worse.counted)[samples].sum(1) / total[samples].sum(1)
  np.testing.assert_allclose(comparison.difference[1:], np.percentile(resampled, [2.5, 97.5]), atol=1.0)
  signs = np.random.default_rng(4).choice([-1, 1], (20_000, 200))
  permuted = 100 * (signs * (better.counted - worse.counted)).sum(1) / total.sum()
  assert comparison.p == pytest.approx(np.mean(np.abs(permuted) >= abs(difference)), abs=0.02)
  assert compare_rates(worse, worse).p == 1.0


@pytest.mark.filterwarnings('error')
def test_rates_of_nothing_are_not_a_number():
  nothing = RowCounts(np.zeros(3, int), np.zeros(3, int))
  comparison = compare_rates(nothing, nothing)
  assert math.isnan(comparison.difference.value) and math.isnan(comparison.p)
  single = compare_rows('exact_match', ['a'], ['b'], [['b']])  # a single row has no interval
  assert single.difference.value == 100 and math.isnan(single.difference.low) and single.p == 1.0


def test_bleu_is_compared_by_paired_bootstrap_resampling():
  rng = np.random.default_rng(0)
  references = [' '.join(rng.choice([*'abcdefgh'], 9)) for _ in range(60)]
  good, bad = (
    [' '.join('x' if rng.random() < rate else word for word in line.split()) for line in references]
    for rate in (0.1, 0.3)
  )
  lists = [[reference] for reference in references]
  comparison = compare_rows('bleu(tokenize="none")', bad, good, lists)
  metric = BLEU(tokenize='none', force=True)

  def gain(rows):
    pick = [[lines[row] for row in rows] for lines in (good, bad, references)]
    return metric.corpus_score(pick[0], pick[2:]).score - metric.corpus_score(pick[1], pick[2:]).score

  assert comparison.difference.value == pytest.approx(gain(range(60))) and comparison.p < 0.01
  systems = [('bad', bad), ('good', good)]
  _, scores = PairedTest(systems, {'BLEU': metric}, [references], 'bs', n_samples=1000)()
  assert comparison.p == scores['BLEU'][1].p_value
  gains = [gain(rows) for rows in np.random.default_rng(1).integers(0, 60, (300, 60))]
  np.testing.assert_allclose(comparison.difference[1:], np.percentile(gains, [2.5, 97.5]), atol=3.0)
  assert compare_rows('bleu(tokenize="none")', good, good, lists).p > 0.5
  assert compare_rows('exact_match', good, bad, lists).difference.value < 0


@pytest.mark.long
@pytest.mark.parametrize('name', METRICS)
def test_intervals_of_few_rows_are_plain_numbers_around_the_metric(name):
  # The chrF of a sample of the last row alone is a float, that of other samples a float32.
  hypotheses = ['a b c d e', 'x y', 'a']
  references = [['a b c d e'], ['x z'], ['b']]
  interval = bootstrap_rows(name, hypotheses, references)
  assert interval.value == pytest.approx(compute_metric(name, hypotheses, references).value)
  assert interval.low < interval.value < interval.high and json.loads(json.dumps(interval)) == list(interval)


def test_the_interval_of_bleu_is_that_of_sacrebleu():
  hypotheses = ['a b c d e f', 'x y z', 'g h i j'] * 5
  references = ['a b c d e f', 'x y w', 'g h j i'] * 5
  score = BLEU().corpus_score(hypotheses, [references], n_bootstrap=1000)
  expected = score.score, score._mean - score._ci, score._mean + score._ci
  assert bootstrap_rows('bleu', hypotheses, [[line] for line in references]) == expected


@pytest.mark.parametrize('name', [name for name, metric in METRICS.items() if metric.count])
def test_counts_of_rows_sum_to_the_metric(name):
  hypotheses = ['a b', 'c', '']
  references = [['a b', 'x'], ['c d'], ['e f g']]
  counts = count_rows(name, hypotheses, references)
  value = compute_metric(name, hypotheses, references).value
  assert value == pytest.approx(100 * counts.counted.sum() / counts.total.sum())
  assert len(counts.counted) == len(counts.total) == 3 and counts.rate == value


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('test', TESTS)
@pytest.mark.parametrize(
  ('values', 'difference', 'improvement'),
  [
    ([math.nan, 1.0, 2.0], math.nan, math.nan),
    ([math.inf, 1.0, 2.0], math.inf, (3 + 0.5 + 1.5) / 9),
    ([math.inf, math.inf, -math.inf], math.nan, 6 / 9),
  ],
)
def test_values_that_are_not_finite_have_no_p(test, values, difference, improvement):
  comparison = compare(values, [1.0, 2.0, 3.0], True, test)
  assert comparison.difference == pytest.approx((difference, math.nan, math.nan), nan_ok=True)
  assert math.isnan(comparison.p) and comparison.improvement == pytest.approx(improvement, nan_ok=True)
  assert bootstrap_mean(values) == pytest.approx((sum(values), math.nan, math.nan), nan_ok=True)
