"""Runs behind URLs: trained, resumed after the machine was lost, and read on another one."""

import shutil
import uuid

import fsspec
import jax
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.systems import experiment, remote_runs
from attention_jax.systems.runs import open_run
from attention_jax.training.remote_folder import STATE
from tests.systems.helpers import read_tree, train_quietly

pytestmark = pytest.mark.usefixtures('on_two_devices')


@pytest.fixture
def url(tmp_path, monkeypatch):
  """A folder in memory, with an empty cache of working copies."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return f'memory://{uuid.uuid4().hex}/run'


def lose_machine(tmp_path):
  shutil.rmtree(tmp_path / 'cache')
  remote_runs._READ.clear()


def test_a_run_continues_on_another_machine(trained, config, url, tmp_path, monkeypatch):
  stream = experiment.stream

  def failing_stream(batches, start, stop):
    yield from stream(batches, start, 3)
    raise OSError('the machine is lost')

  with monkeypatch.context() as patch, pytest.raises(OSError, match='lost'):
    patch.setattr(experiment, 'stream', failing_stream)
    train_quietly(config, url)
  lose_machine(tmp_path)
  results, lines = train_quietly(config, url)
  assert results == trained.results
  assert lines[0].startswith(f'{url} is trained in {tmp_path}/cache/attention_jax/runs/run-')
  assert lines[1].startswith('downloading ') and lines[-1] == f'uploaded to {url}'

  lose_machine(tmp_path)
  run = open_run(url)
  files = set(read_tree(run.folder)) - {STATE}
  assert {name.split('/')[0] for name in files} == {path.name for path in trained.folder.iterdir()} - {'.lock'}
  for kind in ('latest', 'best'):
    expected = open_run(trained.folder, kind)
    jax.tree.map(np.testing.assert_array_equal, open_run(url, kind).params, expected.params)

  (run.folder / 'attention.png').write_bytes(b'picture')
  outputs = []
  remote_runs.upload_outputs(outputs.append)
  assert outputs == [f'uploaded to {url}/attention.png']
  system, root = fsspec.url_to_fs(url)
  names = {path.removeprefix(root).strip('/').split('/')[0] for path in system.find(root)}
  assert names == {path.name for path in trained.folder.iterdir()} - {'checkpoints', 'best', '.lock'} | {
    'attention.png',
    'manifest.json',
    'objects',
  }


def test_folders_without_a_run(url):
  with pytest.raises(UserError, match=f'{url} holds no run; expected the URL of a training run'):
    open_run(url)


def test_several_processes_need_a_shared_folder(config, url, monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  message = r'several processes cannot train behind a URL; expected a folder of a file system that they share'
  with pytest.raises(UserError, match=message), remote_runs.training_folder(url, print):
    pass
