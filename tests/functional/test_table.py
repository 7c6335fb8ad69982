"""Tables of variants: a row that contradicts its function is refused, and so is every spec that cannot be meant."""

import pytest

import attention_jax as aj
from attention_jax.functional.table import Param, Row, check_table, lookup, parse_spec, parse_specs


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
  ('spec', 'expected'),
  [
    ('dot', ('dot', {})),
    (' dot() ', ('dot', {})),
    ('word(min_count=2)', ('word', {'min_count': 2})),
    ("text(train='a, b', sizes=(1, -2), level=None)", ('text', {'train': 'a, b', 'sizes': (1, -2), 'level': None})),
  ],
)
def test_specs(spec, expected):
  assert parse_spec(spec) == expected


@pytest.mark.parametrize(
  'spec',
  [
    '',
    'a b',
    'a.b',
    'dot(',
    'dot(3)',
    'dot(x=y)',
    'dot(x=f(1))',
    'dot(**{"x": 1})',
    'dot(x={[]: 1})',
    '3',
    'dot\0',
    'dot + sum',
  ],
)
def test_unreadable_specs(spec):
  with pytest.raises(aj.UserError, match=r"^cannot read .*; write 'name' or 'name\(option=literal, ...\)'$"):
    parse_spec(spec)


def test_an_option_is_given_once():
  with pytest.raises(aj.UserError, match='dot: option x is given twice; possible: once'):
    parse_spec('dot(x=1, y=2, x=2)')


@pytest.mark.parametrize(
  ('specs', 'expected'),
  [
    ('', {}),
    (' dot ', {'dot': {}}),
    ("a(x='+')+b + c(y=-1, z=(1 + 2j))", {'a': {'x': '+'}, 'b': {}, 'c': {'y': -1, 'z': 1 + 2j}}),
    ('a + (b + c)', None),
    ('a + a(x=1)', None),
    ('a + 3', None),
    ('a - b', None),
    ('+a', None),
    ('a +', None),
    ('a, b', None),
  ],
)
def test_sums_of_specs(specs, expected):
  if expected is not None:
    assert parse_specs(specs) == expected and list(parse_specs(specs)) == list(expected)
    return
  with pytest.raises(aj.UserError, match=r"^cannot read .*; write 'name\(option=literal, ...\) \+ name \+ ...', each"):
    parse_specs(specs)


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
