"""Settings from flags and from Python: grids, pairs, products, labels."""

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.space import label, parse_grid, parse_pair, parse_setting, product, short_names, zipped


def test_commas_inside_of_brackets_and_quotes_belong_to_a_value():
  text = 'model.attention.alignment=softmax,local_p(width=10, scale=[1,2]),"a,b"'
  values = [setting['model.attention.alignment'] for setting in parse_grid(text)]
  assert values == ['softmax', 'local_p(width=10, scale=[1,2])', '"a,b"']


def test_grids_are_products_and_the_last_field_varies_fastest():
  settings = product(parse_grid('a=1,2'), parse_grid('b=3,4'))
  assert settings == [{'a': '1', 'b': '3'}, {'a': '1', 'b': '4'}, {'a': '2', 'b': '3'}, {'a': '2', 'b': '4'}]
  assert product() == [{}]
  with pytest.raises(UserError, match='a must be varied once'):
    product(parse_grid('a=1,2'), parse_grid('b=1'), parse_grid('a=3'))


def test_pairs_are_zipped():
  assert parse_pair('config.a=1,2; b=(3,3),4') == [{'a': '1', 'b': '(3,3)'}, {'a': '2', 'b': '4'}]
  assert parse_pair('a=1,1; b=2,3') == [{'a': '1', 'b': '2'}, {'a': '1', 'b': '3'}]  # one of the values may repeat
  with pytest.raises(UserError, match='paired fields must have the same number of values, got a: 2, b: 1'):
    zipped({'a': [1, 2], 'b': [3]})


def test_a_setting_is_parsed():
  assert parse_setting('a=x(y=1; z=2); b=3') == {'a': 'x(y=1; z=2)', 'b': '3'}
  assert parse_setting('a=b=c') == {'a': 'b=c'}


@pytest.mark.parametrize(
  ('parse', 'text', 'message'),
  [
    (parse_grid, '', '--grid is empty; expected field=value,value,...'),
    (parse_grid, 'a', '--grid=a: expected field=value,value,...'),
    (parse_grid, 'a=1,1', "--grid=a=1,1: value '1' must occur once"),
    (parse_setting, 'a=1; a=2', 'a must be set once'),
    (parse_pair, 'a=1,1; b=2,2', '--pair=a=1,1; b=2,2: a=1, b=2 must occur once'),
    (parse_setting, '=1', 'expected field=value; field=value'),
  ],
)
def test_mistakes_in_flags_raise(parse, text, message):
  with pytest.raises(UserError, match=message):
    parse(text)


def test_short_names_are_the_ends_that_differ():
  names = short_names(['model.attention.score', 'other.score', 'training.steps'])
  assert names == {'model.attention.score': 'attention.score', 'other.score': 'other.score', 'training.steps': 'steps'}
  assert label({'model.attention.score': 'dot', 'training.steps': 3}) == 'score=dot, steps=3'
  assert label({}) == 'base'
