"""Tables of variants: a row that contradicts its function is refused, and so is every spec that cannot be meant."""

import pytest

import attention_jax as aj
from attention_jax.functional.table import Param, Row, check_table, lookup


def plain(query, key):
  return key @ query


def learns(query, key, *, w):
  return key @ w @ query


def keeps(scores, mask, *, state):
  return scores, state


def draws(scores, mask, *, rng):
  return scores


def takes_query(scores, mask, *, query=1.0):
  return scores


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    (Row(learns), r"learns \['w'\], the row gives shapes for \[\]"),
    (Row(plain, params={'w': Param(('query',))}), r"learns \[\], the row gives shapes for \['w'\]"),
    (Row(learns, params={'w': Param(('key', 'rank'))}), r"w has unknown sizes \['rank'\]"),
    (Row(learns, params={'w': Param(('key+rank',))}), r"w has unknown sizes \['rank'\]"),
    (Row(learns, params={'w': Param(('key',), 'orthogonal')}), "initialiser 'orthogonal'"),
    (Row(keeps), 'init_state must be given if and only if'),
    (Row(plain, init_state=lambda size, dtype: 0), 'init_state must be given if and only if'),
    (Row(plain, at_test=draws), 'at_test asks for what the variant itself does not have'),
    (Row(takes_query), r"\['query'\] cannot be options"),
    (Row(plain, sizes={'state': 3}), r"\['state'\] cannot be options"),
  ],
)
def test_a_row_that_contradicts_its_function_is_refused(row, message):
  with pytest.raises(TypeError, match=f'^mine: .*{message}'):
    check_table({'mine': row})


def test_a_row_that_agrees_is_returned():
  row = Row(learns, params={'w': Param(('key', 'rank'))}, sizes={'rank': 2})
  table = {'mine': row, 'keeps': Row(keeps, init_state=lambda size, dtype: 0)}
  assert check_table(table) is table


@pytest.mark.parametrize(
  ('spec', 'table', 'message'),
  [
    ('sofmax', aj.ALIGNMENTS, r"^unknown kind 'sofmax' \(did you mean 'softmax'\?\); possible: addr.*, windowed$"),
    ('bahdanau', aj.SCORES, r"^unknown kind 'bahdanau'; possible: additive, concat, "),
    ('softmax(temprature=1)', aj.ALIGNMENTS, r"'softmax': 'temprature' \(did you mean 'temperature'"),
    ('dot(scale=2)', aj.SCORES, "unknown option of kind 'dot': 'scale'"),
    ("softmax(temperature='low')", aj.ALIGNMENTS, "option temperature is a number like 1.0, got 'low'"),
    ('softmax(temperature=True)', aj.ALIGNMENTS, 'option temperature is a number like 1.0, got True'),
    ('low_rank(rank=2.5)', aj.SCORES, 'option rank is a whole number like 32, got 2.5'),
    ('low_rank(rank=0)', aj.SCORES, r"sizes must be at least 1, got \{'rank': 0\}"),
    ('general(w=1)', aj.SCORES, "unknown option of kind 'general': 'w'"),
  ],
)
def test_lookup_says_what_is_possible(spec, table, message):
  with pytest.raises(aj.UserError, match=message) as error:
    lookup(spec, table, 'kind')
  assert '\n' not in str(error.value)


def test_lookup_takes_rows_and_functions():
  row = Row(plain)
  assert lookup(row, aj.SCORES, 'score') is row
  assert lookup(plain, aj.SCORES, 'score') == row
  assert lookup('dot', aj.SCORES, 'score').fn is aj.scores.dot
