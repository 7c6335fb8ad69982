"""Rows of result tables from the folders of runs and sweeps."""

import math
import shlex
import statistics

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.ledger import LEDGER
from attention_jax.sweeps.space import grid
from attention_jax.systems.config import parse_config
from lab.measured import changed_flags, measured_rows, summarize
from lab.records import Column, Table
from tests.sweeps.helpers import PATH, base_config, make_base, make_sweep, write_run

TABLE = Table([Column('', ['flags']), Column('', metric='test/exact_match'), Column('', metric='unseen/loss')], [])
SETTINGS = grid({'model.attention.alignment': ['softmax', 'local_p(width=10)']})


def load(path):
  assert path == PATH
  return base_config()


def test_a_sweep_has_a_row_per_setting(tmp_path):
  make_sweep(tmp_path, SETTINGS)
  first, second = measured_rows(tmp_path, TABLE, '', load, '2 cores')
  assert 'flags' not in first and second['flags'] == "--config.model.attention.alignment='local_p(width=10)'"
  assert (first['config'], first['preset'], first['seeds']) == ('configs/made_up.py', 'preset', [0, 1, 2])
  assert (first['hardware'], first['commits'], first['time']) == ('2 cores', ['abc'], '0:00:10 of updates')
  entry = second['metrics']['test/exact_match']
  assert list(second['metrics']) == ['test/exact_match'] and len(entry['values']) == 3
  assert entry['value'] == pytest.approx(statistics.fmean(entry['values']), abs=1e-4)
  assert entry['deviation'] == pytest.approx(statistics.stdev(entry['values']), abs=1e-4)


def test_a_sweep_that_was_started_without_a_preset_needs_one(tmp_path):
  make_sweep(tmp_path, SETTINGS[:1], base=make_base()._replace(path='configs/made_up.py'))
  (row,) = measured_rows(tmp_path, TABLE, PATH, load, '2 cores')
  assert (row['config'], row['preset']) == ('configs/made_up.py', 'preset')
  with pytest.raises(UserError, match='does not record its config file and preset'):
    measured_rows(tmp_path, TABLE, '', load, '2 cores')


def test_a_sweep_of_another_config_and_missing_metrics_are_errors(tmp_path):
  (tmp_path / LEDGER).touch()
  with pytest.raises(UserError, match='no run of this sweep has finished'):
    measured_rows(tmp_path, TABLE, PATH, load, '2 cores')
  make_sweep(tmp_path, SETTINGS[:1])
  with pytest.raises(UserError, match=f'the sweep stores its config, {PATH}; leave out --config=other.py:preset'):
    measured_rows(tmp_path, TABLE, 'other.py:preset', load, '2 cores')
  (path,) = tmp_path.glob('*/seed_1/results.json')
  path.write_text(path.read_text().replace('exact_match', 'loss_of_words'))
  with pytest.raises(UserError, match=r'test/exact_match is missing for seeds \[1\] of \[0, 1, 2\]'):
    measured_rows(tmp_path, TABLE, '', load, '2 cores')


def test_a_run_folder_has_one_row(tmp_path):
  folder = write_run(tmp_path / 'a', base_config(model__embedding=16), {'test': {'exact_match': 3.0}})
  (row,) = measured_rows(folder, TABLE, PATH, load, '1 core')
  assert row['flags'] == '--config.model.embedding=16' and row['metrics'] == {'test/exact_match': {'value': 3.0}}
  for path in ('', 'configs/made_up.py'):  # rows without a preset would not replace those of the default preset
    with pytest.raises(UserError, match='expected --config=FILE:PRESET'):
      measured_rows(folder, TABLE, path, load, '1 core')
  with pytest.raises(UserError, match='none of the metrics of the table: test/bleu'):
    measured_rows(folder, Table([Column('', metric='test/bleu')], []), PATH, load, '1 core')


def test_a_split_without_a_final_evaluation_has_the_values_of_the_selected_step(tmp_path):
  table = Table([Column('', metric='test/exact_match'), Column('', metric='validation/exact_match')], [])
  results = {'test': {'exact_match': 3.0}}
  folder = write_run(tmp_path / 'a', base_config(), results, step=20, curve=[50.0, 60.0, 55.0])
  (row,) = measured_rows(folder, table, PATH, load, '1 core')
  assert row['metrics'] == {'test/exact_match': {'value': 3.0}, 'validation/exact_match': {'value': 60.0}}
  results['validation'] = {'loss': 1.0}  # a split that was evaluated at the end, without this metric
  (row,) = measured_rows(write_run(tmp_path / 'b', base_config(), results, step=20), table, PATH, load, '1 core')
  assert 'validation/exact_match' not in row['metrics']


def test_flags_are_those_that_change_the_experiment():
  config = parse_config(base_config(training__seed=3, data__folder='x', training__steps=7, data__buckets=((4, 4),)))
  base = parse_config(base_config())
  flags = changed_flags(config, base)
  assert flags == "--config.data.buckets='((4, 4),)' --config.training.steps=7"
  assert changed_flags(config, base, '--config.training.steps=7') == "--config.data.buckets='((4, 4),)'"
  assert changed_flags(config, base, '--config.training.steps=9') == flags  # a later flag sets another value
  as_list, as_tuple = (parse_config({'data': {'buckets': buckets}}) for buckets in ([[4, 4]], ((4, 4),)))
  assert changed_flags(as_list, as_tuple) == ''


@pytest.mark.parametrize('text', ["birnn(rnn='lstm')", 'plain', 'a b', """both ' and \"""", "cost '$5'"])
def test_a_shell_reads_quoted_values_back(text):
  flags = changed_flags(*(parse_config({'model': {'encoder': encoder}}) for encoder in (text, '')))
  assert shlex.split(flags) == [f'--config.model.encoder={text}']
  # Only a text that double quotes would change is quoted by shlex, which writes each ' as '"'"'.
  assert '"\'"' not in flags or '"' in text or '$' in text


def test_one_seed_has_no_deviation():
  assert summarize([1.23456]) == {'value': 1.2346}
  assert summarize([math.inf, 1.0]) == {'text': 'inf'}  # JSON has no infinity
