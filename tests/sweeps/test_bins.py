"""Metrics by bins of a property, against metrics of the rows alone."""

import numpy as np
import pytest

from attention_jax.data.text import Corpus, from_pairs
from attention_jax.data.vocab import word
from attention_jax.decoding.metrics import compute_metric
from attention_jax.decoding.scoring import ScoredPair
from attention_jax.errors import UserError
from attention_jax.sweeps.bins import PROPERTIES, add_teacher_forcing_metrics, divide_rows, evaluate_bins
from attention_jax.sweeps.plots import draw_bins
from attention_jax.systems.text_evaluation import TextEvaluationConfig

OPTIONS = TextEvaluationConfig(('exact_match', 'token_error_rate', 'bleu(tokenize="none")'))
EXACT_MATCH = TextEvaluationConfig(('exact_match',))
GROUPED = TextEvaluationConfig(('exact_match',), group_references=True)
TRAIN = Corpus(['a b', 'a c', 'a b'], ['x', 'y', 'z'])


def make_corpus(rows=60):
  rng = np.random.default_rng(0)
  source = [' '.join(rng.choice(list('abcd'), 1 + row % 6)) for row in range(rows)]
  target = [' '.join(rng.choice(list('wxyz'), 4 + row % 3)) for row in range(rows)]
  hypotheses = [line if row % 6 < 3 else f'{line} x' for row, line in enumerate(target)]
  return Corpus(source, target), hypotheses


def test_properties_are_lengths_and_the_training_count_of_the_rarest_word():
  corpus = Corpus(['a b', 'a', 'd a'], ['x', 'x y', 'x y z'])
  values = {name: row(corpus, TRAIN) for name, row in PROPERTIES.items()}
  assert values == {'source_length': [2, 1, 2], 'target_length': [1, 2, 3], 'rarest_word': [2, 3, 0]}
  letters = Corpus(['ab', 'c'], ['x', 'xy'], level='char')
  assert PROPERTIES['source_length'](letters, TRAIN) == [2, 1]


def test_bins_are_quantiles_without_overlap():
  values = np.array([1] * 10 + [2] * 10 + [7] * 10)
  bins = divide_rows(values, 3)
  assert [(bin.low, bin.high, len(bin.rows)) for bin in bins] == [(1, 1, 10), (2, 2, 10), (7, 7, 10)]
  assert sum(len(bin.rows) for bin in divide_rows(np.arange(100), 7)) == 100
  (single,) = divide_rows(np.array([3, 3, 3]), 4)
  assert single.name == '3' and len(single.rows) == 3
  # Many rows with the smallest value, such as words that do not occur in training, are a bin of their own.
  bins = divide_rows(np.array([0] * 5 + [1, 2, 3, 4, 5]), 4)
  assert [(bin.name, len(bin.rows)) for bin in bins] == [('0', 5), ('1 to 2', 2), ('3 to 5', 3)]


def test_every_bin_has_the_metric_of_its_rows():
  corpus, hypotheses = make_corpus()
  table = evaluate_bins(corpus, TRAIN, hypotheses, OPTIONS, 'source_length', 3)
  assert [bin.name for bin in table.bins] == ['1 to 2', '3 to 4', '5 to 6']
  assert [interval.value for interval in table.metrics['exact_match']] == [100, 50, 0]
  for spec in OPTIONS.metrics:
    for bin, interval in zip(table.bins, table.metrics[spec.partition('(')[0]], strict=True):
      rows = [hypotheses[row] for row in bin.rows], [[corpus.target[row]] for row in bin.rows]
      assert interval.value == pytest.approx(compute_metric(spec, *rows).value)
      assert interval.low <= interval.value <= interval.high
  middle = table.metrics['exact_match'][1]
  samples = np.random.default_rng(1).binomial(20, 0.5, 100_000) / 20 * 100
  np.testing.assert_allclose(middle[1:], np.percentile(samples, [2.5, 97.5]), atol=5.01)
  record = table.as_json()
  assert record['bins'][0] == {'low': 1, 'high': 2, 'rows': 20}
  assert record['metrics']['exact_match']['values'][0]['value'] == 100
  assert draw_bins(table).startswith(b'\x89PNG')


def test_rows_with_the_same_source_count_once_if_references_are_grouped():
  corpus = Corpus(['a', 'a', 'b b'], ['x', 'y', 'z'])
  table = evaluate_bins(corpus, TRAIN, ['y', 'y', 'w'], GROUPED, 'source_length', 2)
  assert [(bin.low, len(bin.rows)) for bin in table.bins] == [(1, 1), (2, 1)]
  assert [interval.value for interval in table.metrics['exact_match']] == [100, 0]


def test_loss_and_alignment_error_rate_of_a_bin_are_those_of_its_rows():
  links = ['0-0', '0-0 1-1', '0-1 1-0 2-2']
  corpus = from_pairs(['a', 'a b', 'a b c'], ['x', 'x y', 'x y z'], links, level='word', name='made up')
  corpus = corpus._replace(possible=[corpus.links[0], corpus.links[1], ((0, 1), (1, 0), (2, 2), (0, 0))])
  vocabularies = word(corpus.source), word(corpus.target)
  rng = np.random.default_rng(3)
  log_probs = [(-rng.random(n + 1)).tolist() for n in (1, 2, 3)]
  pairs = [ScoredPair(line.split(), row, np.eye(len(row))) for line, row in zip(corpus.target, log_probs, strict=True)]
  plain = evaluate_bins(corpus, corpus, corpus.target, EXACT_MATCH, 'source_length', 2)
  table = add_teacher_forcing_metrics(plain, corpus, corpus, pairs, vocabularies, attends=True)
  assert [bin.name for bin in table.bins] == ['1 to 2', '3'] and table.units['loss'] == 'nat/token'
  expected = [-np.mean(log_probs[0] + log_probs[1]), -np.mean(log_probs[2])]
  np.testing.assert_allclose([interval.value for interval in table.metrics['loss']], expected)
  # In the third row, the weights link 0-0 (possible), 1-1 (wrong) and 2-2 (sure): 1 - (1 + 2) / (3 + 3).
  assert [interval.value for interval in table.metrics['alignment_error_rate']] == pytest.approx([0, 50])
  corpus = corpus._replace(links=[((0, 0),)] * 3, possible=None)
  for unlinked_targets, percent in ((False, 0), (True, 50)):  # two of the three links of the third row count or do not
    table = add_teacher_forcing_metrics(plain, corpus, corpus, pairs, vocabularies, True, unlinked_targets)
    assert table.metrics['alignment_error_rate'][1].value == pytest.approx(percent)
  table = add_teacher_forcing_metrics(plain, corpus, corpus, pairs, (), attends=False)
  assert 'alignment_error_rate' not in table.metrics


def test_the_alignment_error_rate_of_a_bin_without_links_is_not_defined():
  corpus = from_pairs(['a', 'b', 'a b', 'b a'], ['x', 'y', 'x y', 'y x'], ['', '', '0-0', '1-1'], name='made up')
  pairs = [ScoredPair(line.split(), [-1.0], np.eye(len(line.split()) + 1)) for line in corpus.target]
  table = evaluate_bins(corpus, corpus, corpus.target, EXACT_MATCH, 'source_length', 2)
  vocabularies = word(corpus.source), word(corpus.target)
  table = add_teacher_forcing_metrics(table, corpus, corpus, pairs, vocabularies, attends=True)
  undefined, perfect = table.metrics['alignment_error_rate']
  assert np.isnan(undefined).all() and perfect == (0, 0, 0)
  assert draw_bins(table).startswith(b'\x89PNG')


@pytest.mark.parametrize(
  ('by', 'names', 'losses'),
  [('target_length', ['1', '3'], [1, 3]), ('rarest_word', ['2', '3'], [3, 1.5])],  # the second row has 2 tokens
)
def test_teacher_forcing_metrics_count_the_rows_whose_value_is_in_a_bin(by, names, losses):
  corpus = Corpus(['a', 'a', 'b'], ['x', 'x y', 'x y z'])
  pairs = [ScoredPair(line.split(), [-row], None) for row, line in enumerate(corpus.target, 1)]
  table = evaluate_bins(corpus, TRAIN, ['x', 'x', 'y'], GROUPED, by, 2)
  table = add_teacher_forcing_metrics(table, corpus, TRAIN, pairs, (), attends=False)
  assert [bin.name for bin in table.bins] == names
  assert [interval.value for interval in table.metrics['loss']] == losses


def test_unknown_properties_and_counts_below_1_raise():
  corpus, hypotheses = make_corpus(6)
  for by, count, message in [
    ('length', 3, "unknown value of --by 'length'"),
    ('source_length', 0, '--bins must be at least 1, got 0'),
  ]:
    with pytest.raises(UserError, match=message):
      evaluate_bins(corpus, TRAIN, hypotheses, OPTIONS, by, count)
