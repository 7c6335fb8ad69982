"""The run folder: it belongs to one config and to one process at a time, and foreign files are left alone."""

import json
import os

import filelock
import pytest

from attention_jax.errors import UserError
from attention_jax.training.folder import (
  CONFIG,
  LOCK,
  MUTABLE_FIELDS,
  check_folder,
  own_folder,
  prepare_folder,
  read_config,
)

RUN = {'model': {'features': 8, 'cell': 'luong'}, 'training': {'steps': 10, 'seed': 0}, 'buckets': ((5, 6), (7, 8))}


def run_with(**fields):
  """RUN with other values, by 'section_field'."""
  config = json.loads(json.dumps(RUN))
  for name, value in fields.items():
    section, field = name.split('_')
    config[section][field] = value
  return config


def test_a_folder_belongs_to_its_config(tmp_path):
  folder = prepare_folder(tmp_path / 'a' / 'run', RUN)
  assert read_config(folder) == json.loads(json.dumps(RUN))
  assert os.listdir(folder) == [CONFIG]
  assert prepare_folder(folder, RUN) == folder
  content = (folder / CONFIG).read_bytes()
  with pytest.raises(UserError) as error:
    prepare_folder(folder, run_with(model_features=9, training_seed=1, model_heads=2))
  message = str(error.value)
  assert 'model.features is 8 in its config.json, 9 in this config' in message
  assert 'training.seed is 0 in its config.json, 1 in this config' in message
  assert 'model.heads is absent in its config.json, 2 in this config' in message
  assert '\n' not in message and (folder / CONFIG).read_bytes() == content


def test_mutable_fields_may_differ_on_resume(tmp_path):
  assert 'training.steps' in MUTABLE_FIELDS
  prepare_folder(tmp_path, RUN)
  prepare_folder(tmp_path, run_with(training_steps=20))
  assert read_config(tmp_path)['training']['steps'] == 20


def test_fields_of_the_evaluation_may_differ_on_resume_except_the_metric_that_selects(tmp_path):
  def run(*metrics, **fields):
    evaluation = {'batch_size': 8, 'beams': 5, 'group_references': False, 'metrics': metrics}
    return RUN | {'training': RUN['training'] | {'select': 'bleu'}, 'evaluation': evaluation | fields}

  prepare_folder(tmp_path, run('bleu', 'chrf'))
  changed = run('exact_match', 'bleu', batch_size=1, beams=1)
  prepare_folder(tmp_path, changed)
  assert read_config(tmp_path)['evaluation']['metrics'] == ['exact_match', 'bleu']
  with pytest.raises(
    UserError, match=r'evaluation.metrics is \["bleu"\] in its config.json, \["bleu\(lowercase=True\)"\]'
  ):
    prepare_folder(tmp_path, run('bleu(lowercase=True)', 'chrf'))
  with pytest.raises(UserError, match=r'evaluation.group_references is false in its config.json, true in this config'):
    prepare_folder(tmp_path, run('bleu', group_references=True))
  with pytest.raises(
    UserError, match=r'training.select is "bleu".*or another folder, in which config.initial_run=.*state'
  ):
    prepare_folder(tmp_path, changed | {'training': RUN['training'] | {'select': 'exact_match'}})


@pytest.mark.parametrize(
  ('stored', 'given', 'message'),
  [
    (
      {'model_cell': {}},
      {'model_cell': {'gate': True}},
      'cell is {} .*, absent in this config; model.cell.gate is',
    ),
    ({}, {'model_features': 8.0}, r'model.features is 8 in its config.json, 8.0 in this config;'),
    ({}, {'training_seed': False}, r'training.seed is 0 in its config.json, false in this config;'),
    ({'training_patience': 3}, {'training_patience': 4}, r'training.patience is 3 in its config.json, 4'),
  ],
)
def test_empty_groups_and_values_of_other_types_differ(tmp_path, stored, given, message):
  prepare_folder(tmp_path, run_with(**stored))
  prepare_folder(tmp_path, run_with(**stored))
  with pytest.raises(UserError, match=message):
    prepare_folder(tmp_path, run_with(**given))


def test_a_config_without_a_new_field_is_completed(tmp_path):
  def fill_defaults(stored):
    return stored | {'model': {'dropout': (0.1, 0.2)} | stored['model']}

  prepare_folder(tmp_path, RUN)
  config = run_with(model_dropout=(0.1, 0.2))
  with pytest.raises(UserError, match=r'model.dropout is absent in its config.json, \[0.1, 0.2\] in this config'):
    prepare_folder(tmp_path, config)
  assert check_folder(tmp_path, config, fill_defaults)
  assert prepare_folder(tmp_path, config, fill_defaults) == tmp_path
  with pytest.raises(UserError, match=r'model.dropout is \[0.1, 0.2\] in its config.json, 0.5 in this config'):
    prepare_folder(tmp_path, run_with(model_dropout=0.5), fill_defaults)


def test_checking_changes_nothing(tmp_path):
  assert not check_folder(tmp_path / 'new', RUN) and not (tmp_path / 'new').exists()
  assert not check_folder(tmp_path, RUN) and not os.listdir(tmp_path)
  prepare_folder(tmp_path, RUN)
  content = (tmp_path / CONFIG).read_bytes()
  assert check_folder(tmp_path, run_with(training_steps=20))
  assert (tmp_path / CONFIG).read_bytes() == content


def test_foreign_files_are_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('x')
  with pytest.raises(UserError, match=r'holds files \(thesis.tex\) but no config.json; choose an empty or new folder'):
    prepare_folder(tmp_path, RUN)
  assert os.listdir(tmp_path) == ['thesis.tex']
  with pytest.raises(UserError, match=r'cannot use .*thesis.tex as the folder of a run'):
    prepare_folder(tmp_path / 'thesis.tex', RUN)


def test_the_lock_and_unfinished_files_are_no_foreign_files(tmp_path):
  for name in (LOCK, f'.{CONFIG}.0123.part', '.data.json.4567.part'):
    (tmp_path / name).touch()
  assert not check_folder(tmp_path, RUN)
  prepare_folder(tmp_path, RUN)
  assert read_config(tmp_path)['model'] == RUN['model']


def test_an_unreadable_config_is_an_error(tmp_path):
  (tmp_path / CONFIG).write_text('{"model":')
  with pytest.raises(UserError, match=r'cannot read .*config.json'):
    prepare_folder(tmp_path, RUN)
  with pytest.raises(UserError, match=r'holds no config.json; expected the folder of a training run'):
    read_config(tmp_path / 'nowhere')


def test_a_locked_folder_cannot_be_locked_again(tmp_path):
  folder = tmp_path / 'new' / 'run'
  lines = []
  with own_folder(folder, lines.append):
    assert (folder / LOCK).exists()
    with (
      pytest.raises(UserError, match=f'another process is training in {folder}; choose another folder'),
      own_folder(folder, lines.append),
    ):
      pass
  with pytest.raises(KeyError), own_folder(folder, lines.append):  # the first lock is released
    raise KeyError
  with own_folder(folder, lines.append):  # and that which ends with an error
    pass
  assert not lines


def test_a_file_system_without_locks_is_logged(tmp_path, monkeypatch):
  def acquire(lock):
    raise NotImplementedError('no locks')

  monkeypatch.setattr(filelock.FileLock, 'acquire', acquire)
  lines = []
  with own_folder(tmp_path, lines.append):
    assert lines == [f'cannot lock {tmp_path} (no locks): another process that trains in it would not be detected']
