"""Metrics by hand, against jiwer, and with a different number of references in every row."""

import math

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.errors import UserError
from attention_jax.inference import metrics
from attention_jax.inference.metrics import METRICS, compute_metric

LINES = st.lists(st.sampled_from(['a', 'bb', 'c', 'dd']), min_size=1, max_size=6).map(' '.join)
SAME = (['a b c d', 'e f g h i'], [['a b c d', 'x y'], ['e f g h i']])


@pytest.mark.parametrize('name', METRICS)
def test_a_perfect_output_is_perfect(name):
  value, unit, signature = compute_metric(name, *SAME)
  assert value == pytest.approx(100 if metrics.higher_is_better(name) else 0)
  assert unit in ('%', 'points') and signature


@pytest.mark.parametrize('name', METRICS)
def test_a_worse_output_is_worse(name):
  worse = compute_metric(name, ['a b c x', 'e f g h'], SAME[1]).value
  assert (worse < 100) if metrics.higher_is_better(name) else (worse > 0)


def test_options_reach_sacrebleu():
  given = ['A b c d.'], [['a b c d .']]
  assert compute_metric('bleu(tokenize="13a", lowercase=True)', *given).value == pytest.approx(100)
  none = compute_metric("bleu(tokenize='none')", *given)
  assert none.value < 50
  assert all(part in none.signature for part in ('tok:none', 'case:mixed', 'nrefs:1'))
  assert compute_metric('chrf(lowercase=True)', *given).value == pytest.approx(100)
  assert 'nw:2' in compute_metric('chrf(word_order=2)', *given).signature
  assert 'case:mixed' in compute_metric('ter(lowercase=False)', *given).signature


def test_bleu_of_shorter_n_grams_by_hand():
  given = ['a b c x'], [['a b c d', 'a x']]  # all 4 words, 2 of 3 pairs, 1 of 3 - 1 triples; as long as a reference
  for order, precisions in ((1, [1]), (2, [1, 2 / 3]), (3, [1, 2 / 3, 1 / 2])):
    expected = 100 * math.prod(precisions) ** (1 / order)
    found = compute_metric(f'bleu_{order}(tokenize="none")', *given)
    assert found.value == pytest.approx(expected) and found.signature.endswith(f'|order:{order}')
    assert found == compute_metric(f'bleu(tokenize="none", order={order})', *given)
  with pytest.raises(UserError, match='order is 0; possible: 1 or more'):
    compute_metric('bleu(order=0)', *given)


def test_a_row_with_fewer_references_is_not_padded_with_an_empty_one():
  hypotheses, references = ['a b c d e', 'f g'], [['a b c d e', 'a b c'], ['f g h i j k']]
  alone = [['a b c d e'], ['f g h i j k']]
  for name in ('bleu', 'chrf', 'ter'):
    several = compute_metric(name, hypotheses, references)
    assert 'nrefs:var' in several.signature
    if name != 'ter':  # tercom divides by the mean length of a row's references
      assert several.value == pytest.approx(compute_metric(name, hypotheses, alone).value)


def test_nearest_reference_by_edits():
  hypotheses = ['K AE T', 'D AO G Z']
  references = [['K AA T S', 'K AE T'], ['D AO G', 'D AA G Z', 'X']]  # 0 edits of 3; 1 of 3, the first of two as near
  assert compute_metric('phoneme_error_rate', hypotheses, references).value == pytest.approx(100 * 1 / 6)
  assert compute_metric('sequence_error_rate', hypotheses, references).value == 50
  assert compute_metric('exact_match', hypotheses, references).value == 50
  assert compute_metric('character_error_rate', ['abc'], [['abcd', 'xyz']]).value == 25
  assert compute_metric('exact_match', ['x y'], [[' x  y ']]).value == 100  # what no vocabulary of words could say
  assert compute_metric('character_error_rate', ['x y'], [[' x  y ']]).value == 0
  assert compute_metric('token_error_rate', ['a b c d'], [['x']]).value == 400


@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=5))
def test_rates_agree_with_jiwer(rows):
  hypotheses, references = map(list, zip(*rows, strict=True))
  several = [[reference] for reference in references]
  assert compute_metric('word_error_rate', hypotheses, several).value == pytest.approx(
    100 * jiwer.wer(references, hypotheses)
  )
  assert compute_metric('character_error_rate', hypotheses, several).value == pytest.approx(
    100 * jiwer.cer(references, hypotheses)
  )


@pytest.mark.parametrize(
  ('spec', 'hypotheses', 'references', 'message'),
  [
    ('blue', *SAME, r"unknown metric 'blue' \(did you mean 'bleu'\?\)"),
    ('bleu(tokenise="none")', *SAME, "did you mean 'tokenize'"),
    ('bleu(tokenize="non")', *SAME, "did you mean 'none'"),
    ('bleu(lowercase="yes")', *SAME, 'lowercase is True or False like False'),
    ('exact_match(lowercase=True)', *SAME, "unknown option of metric 'exact_match'"),
    ('bleu(', *SAME, 'cannot read'),
    ('bleu', [], [], 'at least one row'),
    ('bleu', ['a'], [['a'], ['b']], '1 hypotheses and 2 rows'),
    ('bleu', ['a', 'b'], [['a'], []], 'row 1 needs a list of at least one reference'),
    ('bleu', ['a'], ['a'], 'row 0 needs a list'),
    ('token_error_rate', ['a'], [['']], 'every reference is empty'),
  ],
)
def test_mistakes(spec, hypotheses, references, message):
  with pytest.raises(UserError, match=message) as raised:
    compute_metric(spec, hypotheses, references)
  assert '\n' not in str(raised.value)
