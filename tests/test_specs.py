"""Spec strings: parsing, and the one binder that every table uses."""

import dataclasses
import math
from typing import Annotated

import pytest

import attention_jax as aj
from attention_jax.specs import (
  Fraction,
  Positive,
  Range,
  Size,
  bind,
  check_fields,
  parse,
  parse_sum,
  schema_of,
  split_outside_brackets,
)


def read_table(path, *, size: Size, rate: Fraction = 0.0, scale: Positive = 1.0, names: str | tuple[str, str] = 'a'):
  """A row with required, bounded and union options."""


def read_many(path, *, names: tuple[str, ...] = ()):
  """A row with a tuple of any length."""


def no_options(path):
  """A row without options."""


TABLE = {'read_table': read_table, 'read_many': read_many, 'no_options': no_options}


@pytest.mark.parametrize(
  ('spec', 'expected'),
  [
    ('dot', ('dot', {})),
    (' dot() ', ('dot', {})),
    ('word(min_count=2)', ('word', {'min_count': 2})),
    ("text(train='a, b', sizes=(1, -2), level=None)", ('text', {'train': 'a, b', 'sizes': (1, -2), 'level': None})),
  ],
)
def test_a_spec_is_parsed_to_a_name_and_options(spec, expected):
  assert parse(spec) == expected


UNREADABLE = ['', 'a b', 'a.b', 'dot(', 'dot(3)', 'dot(x=y)', 'dot(x=f(1))', 'dot(**{"x": 1})', 'dot(x={[]: 1})']


@pytest.mark.parametrize('spec', [*UNREADABLE, '3', 'dot\0', 'dot + sum'])
def test_unreadable_specs_raise(spec):
  with pytest.raises(aj.UserError, match=r"^cannot parse .*; expected 'name' or 'name\(option=literal, ...\)'$"):
    parse(spec)


@pytest.mark.parametrize(
  ('specs', 'expected'),
  [
    ('', {}),
    (' dot ', {'dot': {}}),
    ("a(x='+')+b + c(y=-1, z=(1 + 2j))", {'a': {'x': '+'}, 'b': {}, 'c': {'y': -1, 'z': 1 + 2j}}),
  ],
)
def test_sums_of_distinct_specs_are_parsed(specs, expected):
  assert parse_sum(specs) == expected and list(parse_sum(specs)) == list(expected)


@pytest.mark.parametrize('specs', ['a + (b + c)', 'a + a(x=1)', 'a + 3', 'a - b', '+a', 'a +', 'a, b'])
def test_other_expressions_are_no_sums(specs):
  message = r"^cannot parse .*; expected 'name\(option=literal, ...\) \+ name \+ ...', each"
  with pytest.raises(aj.UserError, match=message):
    parse_sum(specs)


def test_bind_returns_the_row_and_its_options():
  assert bind('read_table(size=2, scale=3)', TABLE, 'reader') == ('read_table', read_table, {'size': 2, 'scale': 3})
  assert bind("read_table(size=1, names=('a', 'b'))", TABLE, 'reader')[2] == {'size': 1, 'names': ('a', 'b')}
  assert bind('no_options', TABLE, 'reader') == ('no_options', no_options, {})


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (
      'read_tabel',
      "unknown reader 'read_tabel' (did you mean 'read_table'?); expected one of: no_options, read_many, read_table",
    ),
    ('read_table', "reader 'read_table' needs size; its options: size, rate, scale, names"),
    ('read_table(siz=1)', "unknown option of reader 'read_table': 'siz' (did you mean 'size'?)"),
    ('read_table(size=1.5)', "reader 'read_table': option size must be a whole number, got 1.5"),
    ('read_table(size=0)', 'option size must be at least 1, got 0'),
    ('read_table(size=1, rate=1)', 'option rate must be at least 0 and less than 1, got 1'),
    ('read_table(size=1, scale=0)', 'option scale must be greater than 0, got 0'),
    ('read_table(size=1, scale=1e999)', 'option scale must be finite, got inf'),
    ("read_table(size=1, names=('a',))", "option names must be str | tuple[str, str], got ('a',)"),
    ('no_options(size=1)', "reader 'no_options' has no options, got 'size'"),
    ('read_table(size=1, rate=0, size=2)', 'read_table: option size must be set once, got it 2 times'),
  ],
)
def test_mistakes_in_a_spec_are_named(spec, message):
  with pytest.raises(aj.UserError) as error:
    bind(spec, TABLE, 'reader')
  assert message in str(error.value)


def test_every_entry_of_a_tuple_is_checked():
  assert bind("read_many(names=('a', 'b'))", TABLE, 'reader')[2] == {'names': ('a', 'b')}
  names = ('a', 3, *'bcdefgh')
  for _ in range(20):  # beartype would check one entry, drawn at random
    with pytest.raises(aj.UserError) as error:
      bind(f'read_many(names={names})', TABLE, 'reader')
    assert str(error.value) == f"reader 'read_many': option names must be tuple[str, ...], got {names}"


@dataclasses.dataclass(frozen=True)
class Fields:
  """A group of a config."""

  steps: Size = 10
  decay: Annotated[float, Range(0, 1)] = 0.5
  buckets: tuple[int, ...] = (3,)

  def __post_init__(self):
    check_fields(self, 'config.training')


def test_fields_of_a_config_are_checked():
  with pytest.raises(aj.UserError, match=r'^config\.training.decay must be at least 0 and at most 1, got nan$'):
    Fields(decay=math.nan)
  with pytest.raises(aj.UserError, match=r"^config\.training.steps must be a whole number, got 'ten'$"):
    Fields(steps='ten')


def test_a_schema_is_read_from_a_dataclass_a_function_or_a_mapping():
  assert schema_of(Fields)['steps'] == (int, 10, Range(1))
  assert list(schema_of(read_table, exclude={'scale'})) == ['size', 'rate', 'names']
  assert schema_of({'a': 1.5})['a'][:2] == (float, 1.5)


@pytest.mark.parametrize(
  ('limits', 'text', 'inside', 'outside'),
  [
    (Range(), 'finite', (0, -1e300), (math.inf, math.nan)),
    (Range(1), 'at least 1', (1, 5, 10**400), (0.99, -(10**400), math.inf)),
    (Range(0, 1, include_low=False), 'greater than 0 and at most 1', (1e-9, 1), (0, 1.01)),
    (Range(high=2, include_high=False), 'less than 2', (-5, 1.9), (2,)),
  ],
)
def test_a_range_contains_the_values_that_its_text_states(limits, text, inside, outside):
  assert str(limits) == text
  assert all(value in limits for value in inside) and not any(value in limits for value in outside)


def test_separators_inside_of_brackets_and_quotes_are_no_separators():
  assert split_outside_brackets("a;(b;c);'d;e'", ';') == ['a', '(b;c)', "'d;e'"]
  assert split_outside_brackets(r"'it\'s; a';'\\';b", ';') == [r"'it\'s; a'", r"'\\'", 'b']
