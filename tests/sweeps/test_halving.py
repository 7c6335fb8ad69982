"""Successive halving: rungs, survivors, schedules that do not depend on the rung."""

import math

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps import halving
from attention_jax.sweeps.halving import (
  best_validation,
  fix_anneal_length,
  fix_schedule_length,
  parse_halving,
  reachable_steps,
  rungs,
  survivors,
)
from attention_jax.sweeps.ledger import RUNG, open_ledger
from attention_jax.sweeps.space import grid
from attention_jax.sweeps.sweep import SweepRequest, check_request
from attention_jax.training.optim import make_schedule
from tests.sweeps.helpers import FAKE_TRAIN, base_config, make_base, write_run


def test_rungs_grow_by_the_factor_and_end_at_the_total():
  assert rungs(3000, 300, 3) == [300, 900, 2700, 3000]
  assert rungs(900, 100, 3) == [100, 300, 900]
  assert rungs(100, 300, 3) == [100]


def test_the_best_settings_survive():
  values = {'a': 3.0, 'b': 1.0, 'c': math.nan, 'd': 2.0}
  assert survivors(values, 2, higher_is_better=True) == ['a', 'd']
  assert survivors(values, 2, higher_is_better=False) == ['b', 'd']
  assert survivors(values, 10, higher_is_better=True) == ['a']
  assert survivors({'a': 1.0, 'b': 1.0}, 2, higher_is_better=True) == ['a']


def test_values_after_a_rung_exclude_later_evaluations(tmp_path):
  first = write_run(tmp_path / 'a', base_config(), {}, curve=[5.0, 3.0, 9.0])  # steps 10, 20, 30
  second = write_run(tmp_path / 'b', base_config(), {}, curve=[1.0, 2.0])
  assert best_validation([first, second], 'exact_match', 20, higher_is_better=True) == (5 + 2) / 2
  assert best_validation([first], 'exact_match', 20, higher_is_better=False) == 3
  assert math.isnan(best_validation([first, tmp_path / 'missing'], 'exact_match', 20, higher_is_better=True))


def test_a_run_that_is_past_a_rung_is_trained_as_far_as_it_was(tmp_path, monkeypatch):
  monkeypatch.setattr(halving, 'updates_made', {tmp_path / 'a': 80, tmp_path / 'b': 0}.get)
  assert reachable_steps([tmp_path / 'b', tmp_path / 'a'], 50) == 80
  assert reachable_steps([tmp_path / 'b'], 50) == 50


@pytest.mark.parametrize('curve', [[math.nan, 4.0, 5.0], [4.0, math.nan, 5.0], [4.0, 5.0, math.nan]])
def test_an_evaluation_that_is_nan_is_never_the_best(tmp_path, curve):
  folder = write_run(tmp_path / 'a', base_config(), {}, curve=curve)
  assert best_validation([folder], 'exact_match', 30, higher_is_better=True) == 5
  assert best_validation([folder], 'exact_match', 30, higher_is_better=False) == 4


def test_schedules_are_those_of_the_whole_run():
  assert fix_schedule_length('cosine(peak=0.1)', 90) == 'cosine(steps=90, peak=0.1)'
  assert fix_schedule_length('cosine(steps=40)', 90) == 'cosine(steps=40)'
  assert fix_schedule_length('rsqrt', 90) == 'rsqrt'
  fixed = make_schedule(fix_schedule_length('cosine(peak=0.1)', 90), steps=30)
  assert float(fixed(20)) == float(make_schedule('cosine(peak=0.1)', steps=90)(20))
  assert fix_anneal_length('gain: linear(peak=2.0); beta: constant', 90) == (
    'gain: linear(steps=90, peak=2.0); beta: constant'
  )
  assert fix_anneal_length('', 90) == ''


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('halving', 'needs first'),
    ('halving(first=3, factor=1)', 'factor must be at least 2'),
    ('half', "--halving 'half'"),
  ],
)
def test_mistakes_in_a_spec_of_halving_raise(spec, message):
  with pytest.raises(UserError) as error:
    parse_halving(spec)
  assert message in str(error.value)
  assert parse_halving('halving(first=3)') == (3, 3)


def test_a_first_rung_at_the_end_of_training_raises(tmp_path):
  request = SweepRequest(tmp_path, make_base(), [{}], 1, FAKE_TRAIN, halving='halving(first=100)')
  with pytest.raises(UserError, match=r'first must be below training\.steps=100, got 100; no setting would be dropped'):
    check_request(request)
  assert len(check_request(request._replace(halving='halving(first=99)'))) == 1


def test_settings_are_compared_by_one_metric(tmp_path):
  settings = grid({'training.select': ['accuracy', 'exact_match']})
  request = SweepRequest(tmp_path, make_base(), settings, 1, FAKE_TRAIN, halving='halving(first=50)')
  message = 'one training.select, got accuracy, exact_match'
  with pytest.raises(UserError, match=message):
    check_request(request)
  assert len(check_request(request._replace(halving=''))) == 2
  with open_ledger(tmp_path) as ledger:
    ledger.append(RUNG, steps=50, select='exact_match', values={}, dropped=[])
  assert len(check_request(request._replace(settings=settings[1:]))) == 1
  with pytest.raises(UserError, match=message):
    check_request(request._replace(settings=settings[:1]))
