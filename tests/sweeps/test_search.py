"""Random and quasi-random settings: ranges, methods, seeds."""

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.search import METHODS, log_integer, search

RANGES = {
  'a': 'linear(low=-1.0, high=3.0)',
  'b': 'log(low=1e-4, high=1e-2)',
  'c': 'integer(low=2, high=5)',
  'd': 'log_integer(low=1, high=64)',
}


@pytest.mark.parametrize('method', METHODS)
def test_points_lie_in_their_ranges_and_depend_on_the_seed(method):
  settings = search(RANGES, 64, method, seed=1)
  values = {name: np.array([setting[name] for setting in settings]) for name in RANGES}
  assert len(settings) == 64 and list(settings[0]) == list(RANGES)
  assert values['a'].min() >= -1 and values['a'].max() <= 3 and 0.5 < values['a'].mean() < 1.5
  assert values['b'].min() >= 1e-4 and values['b'].max() <= 1e-2
  assert 0.4e-3 < np.exp(np.log(values['b']).mean()) < 2.5e-3  # uniform in the logarithm
  assert set(values['c'].tolist()) == {2, 3, 4, 5} and values['c'].dtype == int
  assert values['d'].min() >= 1 and values['d'].max() <= 64 and np.median(values['d']) < 20
  assert search(RANGES, 64, method, seed=1) == settings != search(RANGES, 64, method, seed=2)


@pytest.mark.parametrize(('name', 'low', 'high'), [('linear', 0.12346, 0.12348), ('log', 12351, 12354)])
def test_rounded_values_stay_in_their_range(name, low, high):
  values = {setting['a'] for setting in search({'a': f'{name}(low={low}, high={high})'}, 16)}
  assert low <= min(values) and max(values) <= high


def test_values_of_a_narrow_range_are_distinct():
  for spec in ('log(low=0.999, high=0.9999)', 'linear(low=0.12346, high=0.12348)', 'linear(low=1234567, high=1234577)'):
    assert len({setting['a'] for setting in search({'a': spec}, 16)}) == 16
  # Four digits are enough for a wide range.
  values = [setting['a'] for setting in search({'a': 'linear(low=0.5, high=3.0)'}, 16)]
  assert values == [float(f'{value:.4g}') for value in values]


def test_quasi_random_points_cover_a_range_more_evenly_than_random_ones():
  def largest_gap(method):
    return np.diff(sorted(setting['a'] for setting in search({'a': RANGES['a']}, 32, method))).max()

  assert largest_gap('halton') < largest_gap('random') and largest_gap('sobol') < largest_gap('random')


def test_the_lowest_point_of_a_logarithmic_range_is_its_lowest_number():
  for low in (1, 5, 7):
    scale = log_integer(low=low, high=64)
    assert scale.value(scale.low) == low


@pytest.mark.parametrize(
  ('ranges', 'options', 'message'),
  [
    ({'a': 'lin(low=1, high=2)'}, {}, r"unknown range of a: 'lin' \(did you mean 'linear'\?\)"),
    ({'a': 'log(low=0, high=2)'}, {}, 'option low must be greater than 0, got 0'),
    ({'a': 'linear(low=2, high=2)'}, {}, 'a: low must be less than high'),
    ({'a': 'linear(low=1)'}, {}, 'needs high'),
    ({'a': 'log_integer(low=0, high=2)'}, {}, 'low must be at least 1, got 0'),
    (RANGES, {'method': 'sobl'}, r"unknown method of --search_method 'sobl' \(did you mean 'sobol'\?\)"),
    (RANGES, {'method': 'sobol', 'points': 3}, 'sobol needs a power of two as the number of points, got 3'),
    (RANGES, {'points': 0}, '--points must be at least 1, got 0'),
    (RANGES, {'seed': -1}, '--search_seed must be at least 0, got -1'),
  ],
)
def test_invalid_ranges_and_options_raise(ranges, options, message):
  with pytest.raises(UserError, match=message):
    search(ranges, **{'points': 4} | options)
