"""Metrics against values computed by hand and by jiwer, also with a different number of references per row."""

import math

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.decoding import metrics
from attention_jax.decoding.metrics import METRICS, compute_metric
from attention_jax.errors import UserError

LINES = st.lists(st.sampled_from(['a', 'bb', 'c', 'dd']), min_size=1, max_size=6).map(' '.join)
HYPOTHESES = ['a b c d', 'e f g h i']
REFERENCES = [['a b c d', 'x y'], ['e f g h i']]


@pytest.mark.parametrize('name', METRICS)
def test_a_perfect_output_has_the_best_value_and_a_worse_one_a_worse_value(name):
  best = 100 if metrics.higher_is_better(name) else 0
  value, unit, signature = compute_metric(name, HYPOTHESES, REFERENCES)
  assert value == pytest.approx(best) and unit in ('%', 'points') and signature
  worse = compute_metric(name, ['a b c x', 'e f g h'], REFERENCES).value
  assert worse < 100 if best else worse > 0


def test_options_are_passed_to_sacrebleu():
  lines = (['A b c d.'], [['a b c d .']])
  assert compute_metric('bleu(tokenize="13a", lowercase=True)', *lines).value == pytest.approx(100)
  untokenized = compute_metric("bleu(tokenize='none')", *lines)
  assert untokenized.value < 50
  assert all(part in untokenized.signature for part in ('tok:none', 'case:mixed', 'nrefs:1'))
  assert compute_metric('chrf(lowercase=True)', *lines).value == pytest.approx(100)
  assert 'nw:2' in compute_metric('chrf(word_order=2)', *lines).signature
  assert 'case:mixed' in compute_metric('ter(lowercase=False)', *lines).signature


@pytest.mark.parametrize(('order', 'precisions'), [(1, [1]), (2, [1, 2 / 3]), (3, [1, 2 / 3, 1 / 2])])
def test_bleu_of_shorter_n_grams_equals_values_by_hand(order, precisions):
  # 4 of 4 words, 2 of 3 bigrams, 1 of 2 trigrams match; the length is that of a reference.
  lines = (['a b c x'], [['a b c d', 'a x']])
  result = compute_metric(f'bleu_{order}(tokenize="none")', *lines)
  assert result.value == pytest.approx(100 * math.prod(precisions) ** (1 / order))
  assert result.signature.endswith(f'|order:{order}')
  assert result == compute_metric(f'bleu(tokenize="none", order={order})', *lines)


def test_rows_with_fewer_references_are_not_padded_with_empty_ones():
  hypotheses = ['a b c d e', 'f g']
  references = [['a b c d e', 'a b c'], ['f g h i j k']]
  single_references = [['a b c d e'], ['f g h i j k']]
  for name in ('bleu', 'chrf', 'ter'):
    result = compute_metric(name, hypotheses, references)
    assert 'nrefs:var' in result.signature
    # tercom divides by the mean length of a row's references: 0 and 4 edits of (5 + 3) / 2 and 6 words.
    expected = 100 * 4 / (4 + 6) if name == 'ter' else compute_metric(name, hypotheses, single_references).value
    assert result.value == pytest.approx(expected)


def test_error_rates_equal_values_by_hand():
  hypotheses = ['K AE T', 'D AO G Z']
  # 0 edits of 3 tokens; 1 edit of 3 tokens, as the first of two equally near references counts.
  references = [['K AA T S', 'K AE T'], ['D AO G', 'D AA G Z', 'X']]
  assert compute_metric('phoneme_error_rate', hypotheses, references).value == pytest.approx(100 * 1 / 6)
  assert compute_metric('sequence_error_rate', hypotheses, references).value == 50
  assert compute_metric('exact_match', hypotheses, references).value == 50
  assert compute_metric('character_error_rate', ['abc'], [['abcd', 'xyz']]).value == 25
  assert compute_metric('token_error_rate', ['a b c d'], [['x']]).value == 400


def longest_common_subsequence(x, y):
  if not x or not y:
    return 0
  if x[0] == y[0]:
    return 1 + longest_common_subsequence(x[1:], y[1:])
  return max(longest_common_subsequence(x[1:], y), longest_common_subsequence(x, y[1:]))


def test_rouge_equals_values_by_hand():
  hypotheses = ['the cat on the mat', 'Катя идёт']
  references = [['The cat sat on the mat.', 'a mat'], ['Катя не идёт']]
  first = hypotheses[0].split(), references[0][0].lower().strip('.').split()
  common = longest_common_subsequence(*first)
  rows = [2 * common / sum(map(len, first)), 2 * 2 / (2 + 3)]
  assert compute_metric('rouge_l', hypotheses[:1], references[:1]).value == pytest.approx(100 * rows[0])
  assert compute_metric('rouge_2', hypotheses[:1], references[:1]).value == pytest.approx(100 * 2 * 3 / (4 + 5))
  assert compute_metric('rouge_1(tokenize="space")', hypotheses[1:], references[1:]).value == pytest.approx(
    100 * rows[1]
  )
  assert compute_metric('rouge_1', hypotheses, references).value == pytest.approx(
    50 * rows[0]
  )  # the tokenizer removes all of row 2
  assert compute_metric('rouge_1(stem=True)', ['running cats'], [['run cat']]).value == 100


def test_spaces_at_the_ends_and_repeated_spaces_are_ignored():
  assert compute_metric('exact_match', ['x y'], [[' x  y ']]).value == 100
  assert compute_metric('character_error_rate', ['x y'], [[' x  y ']]).value == 0


@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=5))
def test_error_rates_equal_those_of_jiwer(rows):
  hypotheses, references = map(list, zip(*rows, strict=True))
  reference_lists = [[reference] for reference in references]
  word_error_rate = compute_metric('word_error_rate', hypotheses, reference_lists).value
  assert word_error_rate == pytest.approx(100 * jiwer.wer(references, hypotheses))
  character_error_rate = compute_metric('character_error_rate', hypotheses, reference_lists).value
  assert character_error_rate == pytest.approx(100 * jiwer.cer(references, hypotheses))


@pytest.mark.parametrize(
  ('spec', 'hypotheses', 'references', 'message'),
  [
    ('blue', HYPOTHESES, REFERENCES, r"unknown metric 'blue' \(did you mean 'bleu'\?\)"),
    ('bleu(tokenise="none")', HYPOTHESES, REFERENCES, "did you mean 'tokenize'"),
    ('bleu(tokenize="non")', HYPOTHESES, REFERENCES, "did you mean 'none'"),
    ('bleu(lowercase="yes")', HYPOTHESES, REFERENCES, "option lowercase must be True or False, got 'yes'"),
    ('rouge_1(stem=True, tokenize="space")', HYPOTHESES, REFERENCES, "stem=True needs tokenize='ascii', got 'space'"),
    ('bleu(order=0)', HYPOTHESES, REFERENCES, "metric 'bleu': option order must be at least 1, got 0"),
    ('bleu_1(order=2)', HYPOTHESES, REFERENCES, "unknown option of metric 'bleu_1': 'order'"),
    ('rouge_1(kind="rouge2")', HYPOTHESES, REFERENCES, "unknown option of metric 'rouge_1': 'kind'"),
    ('chrf(word_order=-1)', HYPOTHESES, REFERENCES, "metric 'chrf': option word_order must be at least 0, got -1"),
    ('exact_match(lowercase=True)', HYPOTHESES, REFERENCES, "metric 'exact_match' has no options, got 'lowercase'"),
    ('bleu(', HYPOTHESES, REFERENCES, 'cannot parse'),
    ('bleu', [], [], 'at least one row'),
    ('bleu', ['a'], [['a'], ['b']], '1 hypotheses and 2 rows'),
    ('bleu', ['a', 'b'], [['a'], []], 'row 1 needs a list of at least one reference'),
    ('bleu', ['a'], ['a'], 'row 0 needs a list'),
    ('token_error_rate', ['a'], [['']], 'token_error_rate needs a row whose nearest reference is not empty'),
  ],
)
def test_wrong_arguments_raise_an_error_of_one_line(spec, hypotheses, references, message):
  with pytest.raises(UserError, match=message) as error:
    compute_metric(spec, hypotheses, references)
  assert '\n' not in str(error.value)


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('last', [math.inf, -math.inf, math.nan])
def test_runs_are_summarized_even_if_a_value_is_not_finite(last):
  summary = metrics.aggregate_runs([metrics.MetricValue(value, 'nat', 'x') for value in (1.0, math.inf, last)])
  assert summary.value == pytest.approx(1 + math.inf + last, nan_ok=True) and math.isnan(summary.deviation)
  finite = metrics.aggregate_runs([metrics.MetricValue(value, 'nat', 'x') for value in (1.0, 4.0)])
  assert (finite.value, finite.deviation) == pytest.approx((2.5, math.sqrt(4.5)))
