"""The tables of the documents are those of the records, and the results of runs are added to the records."""

import json

import pytest

from attention_jax.errors import UserError
from attention_jax.systems.config import parse_config
from attention_jax.systems.experiment import measurable_metrics
from experiments.config_files import load_config
from lab import result_tables
from lab.records import block_names, read_table
from lab.result_tables import RECORDS, add_results, check_flags, documents, outdated_documents, write_documents
from tests.sweeps.helpers import write_run

PATH = 'configs/nettalk.py:bahdanau2015_deep_tanh'


def test_no_table_was_edited_by_hand_and_every_record_is_shown():
  outdated = [path.name for path in outdated_documents()]
  assert outdated == [], 'run: python -m lab.results'
  names = set().union(*(block_names(path.read_text('utf-8')) for path in documents()))
  assert names == {str(path.relative_to(RECORDS).with_suffix('')) for path in RECORDS.rglob('*.json')}


@pytest.mark.long
@pytest.mark.parametrize('path', sorted(RECORDS.glob('*.json')), ids=lambda path: path.stem)
def test_records_name_configs_presets_and_commits(path):
  for row in read_table(path).rows:
    if 'config' in row:
      config = load_config(f'{row["config"]}:{row["preset"]}')
      assert row['commits'] and row['seeds'] and row['metrics']
      names = {name.rpartition('/')[2] for name in row['metrics']} - {'published'}  # a number of the paper
      assert names <= measurable_metrics(parse_config(config))


def test_a_table_changed_by_hand_is_outdated(tmp_path):
  (tmp_path / 'docs').mkdir()
  (tmp_path / 'lab').mkdir()
  (tmp_path / 'lab' / 'results').symlink_to(RECORDS)
  document = tmp_path / 'docs' / 'x.md'
  document.write_text('<!-- table: dates -->\n', 'utf-8')
  write_documents(tmp_path)
  text = document.read_text('utf-8')
  assert '99.5 ± 0.3 %' in text and outdated_documents(tmp_path) == {}
  document.write_text(text.replace('99.5', '99.9'), 'utf-8')
  assert outdated_documents(tmp_path) == {document: text}


def test_results_of_a_run_replace_the_row_with_the_same_flags(tmp_path):
  records = tmp_path / 'results'
  records.mkdir()
  (records / 'nettalk.json').write_bytes((RECORDS / 'nettalk.json').read_bytes())
  config = load_config(f'{result_tables.PROJECT}/{PATH}')
  config.model.attention.alignment = 'sparsemax'
  values = {'phoneme_error_rate': 9.0, 'alignment_error_rate': 5.0}
  folder = write_run(tmp_path / 'run', json.loads(config.to_json_best_effort()), {'validation': values})
  before = read_table(records / 'nettalk.json').rows
  add_results(folder, 'nettalk', PATH, '2 cores', records)
  rows = read_table(records / 'nettalk.json').rows
  (changed,) = [i for i, row in enumerate(rows) if row != before[i]]
  assert len(rows) == len(before) and rows[changed]['flags'] == before[changed]['flags']
  assert rows[changed]['metrics']['validation/alignment_error_rate'] == {'value': 5.0}
  with pytest.raises(UserError, match="unknown table 'netalk'"):
    add_results(folder, 'netalk', PATH, '2 cores', records)


def test_flags_without_effect_are_errors():
  unset = {'check': False, 'add': None, 'table': None, 'config': '', 'hardware': None}
  for values, message in (
    ({'check': True, 'add': 'runs/x', 'table': 'dates'}, '--check writes nothing, but --add adds rows'),
    ({'table': 'dates'}, '--table has no effect without --add, the folder of a run or of a sweep'),
  ):
    with pytest.raises(UserError, match=message):
      check_flags(unset | values)
  for valid in ({}, {'check': True}, {'add': 'runs/x', 'table': 'dates', 'hardware': '2 cores'}):
    check_flags(unset | valid)
