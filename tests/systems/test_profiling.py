"""Profiles of updates: names of operations, times without those of events inside, and one whole profile."""

from types import SimpleNamespace

import pytest

from attention_jax.errors import UserError
from attention_jax.systems.profiling import (
  BACKWARD,
  FORWARD,
  LOSS,
  OPTIMIZER,
  UNNAMED,
  Operation,
  UpdateProfile,
  _own_times,
  parse_operation,
  profile_update,
)


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('jit(f)/jvp(Model)/encoder/encoder.run_layer/layers_0/dot_general', (('encoder', 'layers_0'), FORWARD)),
    ('jit(f)/transpose(jvp(Model))/decoder/while/body/closed_call/cell.attend/dot_general', None),
    ('jit(f)/transpose(jvp(Model))/decoder/checkpoint/rematted_computation/cell.attend/vmap(jit(dot_general))', None),
    ('jit(f)/jvp()/make_update.<locals>.compute_gradients/while/cond/dot_general', ((), FORWARD)),
    ('dot_general', ((), FORWARD)),
  ],
)
def test_names_of_the_compiler_are_modules_phases_and_operations(name, expected):
  module, phase = expected or (('decoder', 'cell'), BACKWARD)
  assert parse_operation(name) == Operation(module, phase, 'dot_general')
  assert parse_operation(name, is_optimizer=True) == Operation((), OPTIMIZER, 'dot_general')


def test_the_time_of_an_event_is_that_without_the_events_inside():
  events = [('while', 0, 100), ('a', 10, 30), ('b', 15, 5), ('a', 50, 20), ('c', 200, 7)]
  line = SimpleNamespace(
    events=[
      SimpleNamespace(start_ns=start, duration_ns=duration, stats={'hlo_op': name, 'hlo_module': 'm'})
      for name, start, duration in events
    ]
    + [SimpleNamespace(start_ns=0, duration_ns=1000, stats={})]  # of the runtime: not an operation
  )
  times = {}
  for (program, name), seconds in _own_times(line):
    assert program == 'm'
    times[name] = times.get(name, 0) + round(seconds * 1e9)
  assert times == {'while': 50, 'a': 45, 'b': 5, 'c': 7}


def test_tables_sum_the_times_of_operations():
  times = {
    Operation(('encoder', 'layers_0', 'attention'), FORWARD, 'dot_general'): 1.0,
    Operation(('encoder', 'layers_0', 'feed'), BACKWARD, 'dot_general'): 2.0,
    Operation(('encoder', 'layers_1'), FORWARD, 'exp'): 4.0,
    Operation((), FORWARD, 'log'): 8.0,
    Operation((), OPTIMIZER, 'add'): 16.0,
    Operation((), UNNAMED, 'copy'): 0.5,
  }
  profile = UpdateProfile((2, 3), 'rows, length', 1.0, 1.0, times)
  assert profile.by_kind() == {'add': 16.0, 'log': 8.0, 'exp': 4.0, 'dot_general': 3.0, 'copy': 0.5}
  modules = profile.by_module(2)
  assert list(modules) == [OPTIMIZER, LOSS, 'encoder.layers_1', 'encoder.layers_0', UNNAMED]
  assert modules['encoder.layers_0'] == {FORWARD: 1.0, BACKWARD: 2.0}
  assert profile.by_module(1)['encoder'] == {FORWARD: 5.0, BACKWARD: 2.0}


def test_a_profile_has_the_modules_of_both_passes_and_the_optimiser(config, tmp_path):
  profile = profile_update(config, 1, tmp_path / 'trace')
  assert profile.shape == (8, 5, 5) and profile.seconds > 0 and profile.flop > 0
  modules = profile.by_module(1)
  assert {'encoder', 'decoder', OPTIMIZER} <= modules.keys()
  assert all(modules[name].keys() >= {FORWARD, BACKWARD} for name in ('encoder', 'decoder'))
  assert 'dot_general' in profile.by_kind() and all(seconds >= 0 for seconds in profile.times.values())
  assert len(list(tmp_path.rglob('perfetto_trace.json.gz'))) == 1


def test_several_seeds_have_no_profile(config):
  with pytest.raises(UserError, match=r'a profile is that of one run in one process, got config\.seeds=2'):
    profile_update({**config, 'seeds': 2}, 1)
