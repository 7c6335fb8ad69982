"""Runs are collected from the ledger of a sweep, or from folders."""

import dataclasses
import math
import re

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.adopt import plan_adoption
from attention_jax.sweeps.collect import collect_folders, collect_sweep
from attention_jax.sweeps.ledger import PLANNED, open_ledger, planned_event, read_state
from attention_jax.sweeps.report import folders_report, sweep_report
from attention_jax.sweeps.resolve import resolve
from attention_jax.training.digests import add_file_digests, drop_file_digests
from tests.sweeps.helpers import NO_ROWS, SETTINGS, base_config, make_base, make_sweep, write_run


def test_single_runs_are_not_tested_and_units_without_a_run_are_left_out(tmp_path):
  make_sweep(tmp_path, SETTINGS, seeds=1)
  with open_ledger(tmp_path) as ledger:
    unit = next(iter(ledger.state.units.values())).unit
    ledger.append(PLANNED, **planned_event(dataclasses.replace(unit, id='never started')))
  assert len(collect_sweep(tmp_path, read_state(tmp_path))) == 4
  report = sweep_report(tmp_path, NO_ROWS, print)
  assert report.unfinished == 1
  assert all(contrast.verdict == 'not tested' for contrast in report.contrasts)
  assert not any('p values are those' in note for note in report.notes)
  assert all(math.isnan(row.cells[report.columns[0]].mean.low) for row in report.rows)


def test_any_finished_runs_are_compared(tmp_path):
  first = write_run(tmp_path / 'x' / 'a', base_config(), {'test': {'exact_match': 3.0}})
  second = write_run(tmp_path / 'x' / 'b', base_config(model__embedding=16), {'test': {'exact_match': 5.0}})
  settings = collect_folders([first, second])
  assert [setting.label for setting in settings] == ['a', 'b']
  assert settings[1].factors == {'model.embedding': 16}
  for same in (first, first.parent / '..' / 'x' / 'a'):
    with pytest.raises(UserError, match=f'got {re.escape(str(same))} twice'):
      collect_folders([first, same])
  with pytest.raises(UserError, match='expected at least two run folders'):
    folders_report([first], NO_ROWS, print)
  add_file_digests(second, ['config.json'])  # as a start with more updates does
  with pytest.raises(UserError, match=r'b has been continued since its results\.json, and has not finished'):
    collect_folders([first, second])
  add_file_digests(second, ['results.json'])
  collect_folders([first, second])
  drop_file_digests(second)
  (second / 'results.json').unlink()
  with pytest.raises(UserError, match=r'b has no results\.json; expected a finished run'):
    collect_folders([first, second])


def test_runs_side_by_side_share_the_time_of_their_updates(tmp_path):
  results = {'test': {'exact_match': 3.0}}
  alone = write_run(tmp_path / 'alone', base_config(), results, curve=[1.0, 2.0])
  together = write_run(tmp_path / 'together', base_config(seeds=2), results)
  for seed in (0, 1):
    write_run(together / f'seed_{seed}', base_config(training__seed=seed), results, curve=[1.0, 2.0])
  single, pair = (setting.runs for setting in collect_folders([alone, together]))
  assert len(pair) == 2 and single[0].training_seconds > 0
  assert [run.training_seconds for run in pair] == [single[0].training_seconds / 2] * 2
  first, second = collect_folders([together / 'seed_0', together / 'seed_1'])  # the same as by the folder of both
  assert [*first.runs, *second.runs] == pair
  setting = resolve(make_base(), {})
  with open_ledger(tmp_path / 'sweep') as ledger:  # adopted, one seed at a time
    for event in plan_adoption(ledger.state, ledger.folder, together / 'seed_1', [setting]).events:
      ledger.append(**event)
    (adopted,) = collect_sweep(ledger.folder, ledger.state)
  assert adopted.runs == pair[1:]


def test_settings_of_a_sweep_that_was_extended_with_other_flags_are_distinguished(tmp_path):
  for base in (make_base(), make_base(training__steps=200)):
    make_sweep(tmp_path, SETTINGS[:2], seeds=1, base=base)
  settings = collect_sweep(tmp_path, read_state(tmp_path))
  assert [setting.label for setting in settings] == [
    f'score=dot, alignment={alignment}, steps={steps}'
    for steps in (100, 200)
    for alignment in ('softmax', 'local_p(width=10)')
  ]
  assert settings[2].factors == SETTINGS[0] | {'training.steps': 200}


def test_earlier_settings_have_the_values_of_options_and_presets_that_are_varied_later(tmp_path):
  make_sweep(tmp_path, [{'model.embedding': '8'}, {'training.schedule.peak': '0.01'}, {'preset': 'other'}], seeds=1)
  settings = collect_sweep(tmp_path, read_state(tmp_path))
  assert [setting.label for setting in settings] == [
    'embedding=8, peak=0.001, preset=preset',
    'embedding=256, peak=0.01, preset=preset',
    'embedding=256, peak=0.001, preset=other',
  ]
  assert settings[0].factors == {'model.embedding': 8, 'training.schedule.peak': 0.001, 'preset': 'preset'}


def test_runs_are_compared_without_their_data(tmp_path):
  data = {'data__task': "tsv(train='train.tsv')", 'data__folder': str(tmp_path / 'gone')}
  first = write_run(tmp_path / 'a', base_config(**data), {'test': {'exact_match': 3.0}})
  second = write_run(tmp_path / 'b', base_config(**data, model__embedding=16), {'test': {'exact_match': 5.0}})
  lines = []
  report = folders_report([first, second], NO_ROWS, lines.append)
  assert [row.cells[report.columns[0]].mean.value for row in report.rows] == [3.0, 5.0]
  assert all(math.isnan(row.update_flop) for row in report.rows)
  (line,) = lines
  assert line.startswith('the FLOP of an update are not counted: ') and 'train.tsv: no such file' in line
