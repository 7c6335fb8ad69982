"""The programs `models` and `export_run`."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from attention_jax.systems.ready_made import ready_made_folder
from tests.experiments.helpers import run
from tests.experiments.test_bad_input import assert_user_error


@pytest.fixture
def commands(trained, tmp_path, monkeypatch):
  """The commands of trainings; each copies a finished run instead of training."""
  started = []

  def train(command):
    workdir = next(word.partition('=')[2] for word in command if word.startswith('--workdir='))
    shutil.copytree(trained[0], workdir)
    started.append(command)
    return SimpleNamespace(returncode=0)

  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(subprocess, 'run', train)
  return started


@pytest.mark.long
def test_models_are_trained_exported_and_used_by_name(commands, tmp_path):
  workdir = tmp_path / 'models'
  result = run('models', f'--workdir={workdir}')
  assert result.code == 0, result.err
  assert [[word for word in command if word.startswith('--')][:2] for command in commands] == [
    ['--config=configs/dates.py:bahdanau2015_deep_tanh', f'--workdir={workdir}/dates'],
    ['--config=configs/shapes.py:xu2015_soft', f'--workdir={workdir}/shapes'],
  ]
  assert '--config.training.steps=2000' in commands[1]
  assert '@nettalk needs --folder with train.tsv and dev.tsv of NETtalk, see configs/nettalk.py; not made' in result.out
  assert ready_made_folder('dates').is_dir() and not ready_made_folder('nettalk').exists()
  assert run('translate', '--workdir=@dates', stdin=b'eins zwei').code == 0
  commands.clear()
  assert run('models', '--names=dates', f'--workdir={workdir}').out.startswith('@dates is in ')
  assert commands == []


@pytest.mark.long
def test_models_whose_data_are_not_generated_need_a_folder(commands, tmp_path):
  result = run('models', '--names=nettalk', '--folder=data', f'--workdir={tmp_path}')
  assert result.code == 0 and commands[0][-1] == '--config.data.folder=data'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--names=dates,nettalk'], '@nettalk needs --folder with'),
    (['--names=dates,nettak'], "unknown ready-made model 'nettak' (did you mean 'nettalk'?)"),
    (['--names=dates', '--workdir=s3://bucket/models'], "'s3://bucket/models': orbax does not write to S3"),
  ],
)
def test_mistakes_are_reported_before_any_training(arguments, message, commands):
  assert_user_error(run('models', *arguments), [f'error: {message}'])
  assert commands == []


def test_training_does_not_write_to_a_ready_made_model(commands):
  result = run('train', '--config=configs/dates.py', '--workdir=@dates')
  assert_user_error(result, ["error: '@dates' names a ready-made model, which is only read; expected a folder\n"])


@pytest.mark.long
def test_an_exported_run_translates_like_the_original(trained, tmp_path):
  folder = tmp_path / 'exported'
  result = run('export_run', f'--workdir={trained[0]}', f'--output={folder}')
  assert result.code == 0 and result.out.startswith(f'written to {folder} (0.')
  lines = b'eins zwei\ndrei\n'
  translated = run('translate', f'--workdir={folder}', stdin=lines)
  assert translated == run('translate', f'--workdir={trained[0]}', stdin=lines)
  assert run('export_run', f'--workdir={trained[0]}', f'--output={folder}').code == 2
