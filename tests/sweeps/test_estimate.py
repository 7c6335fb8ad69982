"""Estimates of the time of a sweep."""

import pytest

from attention_jax.sweeps.estimate import Costs, TimeEstimate, estimate_seconds
from attention_jax.sweeps.ledger import FINISHED, STARTED, SweepState, Unit, UnitState
from attention_jax.sweeps.resolve import Resolved, resolve
from attention_jax.sweeps.sweep import SweepRequest, describe_plan
from attention_jax.systems.config import parse_config
from tests.sweeps.helpers import FAKE_TRAIN, SETTINGS, make_base

RESOLVED = [Resolved({}, 'f.py', {}, parse_config({'training': {'steps': 300}}), name) for name in ('a', 'b')]
COSTS = {'a': Costs(1, 2e9), 'b': Costs(1, 4e9)}


def make_state(*units):
  entries = [
    UnitState(Unit(f'u{i}', setting_id, {}, 'f.py', {}, seeds, f'u{i}'), state, seconds)
    for i, (setting_id, seeds, state, seconds) in enumerate(units)
  ]
  return SweepState({entry.unit.id: entry for entry in entries})


def test_the_time_is_the_mean_of_finished_runs_of_the_setting_or_of_all_settings():
  state = make_state(('a', (0,), FINISHED, 90.0), ('a', (1, 2), FINISHED, 220.0), ('b', (0,), STARTED, 5.0))
  estimate = estimate_seconds(state, RESOLVED, COSTS, None)
  assert estimate.seconds == {'a': pytest.approx((90 + 110) / 2), 'b': pytest.approx(100)}
  assert estimate.source == 'the time of 2 finished units of this sweep'


def test_without_finished_runs_the_time_is_the_flop_divided_by_the_rate():
  assert estimate_seconds(make_state(), RESOLVED, COSTS, lambda: 1e9).seconds == {'a': 600, 'b': 1200}
  assert not estimate_seconds(make_state(), RESOLVED, COSTS, None).seconds


@pytest.mark.long
@pytest.mark.parametrize(('jobs', 'time'), [(64, '0:01:30'), (2, '0:03:00')])
def test_the_time_of_a_plan_is_at_least_that_of_its_longest_process(tmp_path, monkeypatch, jobs, time):
  resolved = [resolve(make_base(), setting) for setting in SETTINGS]
  costs = [(setting.id, Costs(1, 1.0)) for setting in resolved]
  estimate = TimeEstimate({setting.id: 90.0 for setting in resolved}, 'made-up times')
  monkeypatch.setattr('attention_jax.sweeps.sweep.detect_devices', lambda: ('cpu', [0]))
  monkeypatch.setattr('attention_jax.sweeps.sweep.measure_costs', lambda *args: costs)
  monkeypatch.setattr('attention_jax.sweeps.sweep.estimate_seconds', lambda *args: estimate)
  lines = []
  request = SweepRequest(tmp_path, make_base(), SETTINGS, 1, FAKE_TRAIN, cluster=f'local(jobs={jobs})')
  describe_plan(request, resolved, lines.append)
  assert lines[-1] == f'time: {time} for the 4 processes to be run, estimated from made-up times'
