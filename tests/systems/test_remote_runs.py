"""Runs behind URLs: trained, resumed after the machine was lost, and read on another one."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import uuid

import fsspec
import jax
import numpy as np
import pytest
from attention_jax.training.remote_folder import STATE

from attention_jax.errors import UserError
from attention_jax.systems import experiment, remote_runs
from attention_jax.systems.runs import open_run
from tests.systems.helpers import read_tree, train_quietly

pytestmark = pytest.mark.usefixtures('on_two_devices')


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
  """Sets an empty cache of working copies."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def url(empty_cache):
  """The URL of a new folder in memory."""
  return f'memory://{uuid.uuid4().hex}/run'


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """The URL of a new folder in a bucket of S3, which a server on this machine simulates."""
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))  # any free port
    port = sock.getsockname()[1]
  for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
    monkeypatch.setenv(name, 'any')
  monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
  monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{port}')
  with (tmp_path / 'server.log').open('wb') as log:
    server = subprocess.Popen([sys.executable, '-m', 'moto.server', f'--port={port}'], stdout=log, stderr=log)
  try:
    wait_for_port(port, server)
    fsspec.filesystem('s3').mkdir('bucket')
    yield 's3://bucket/run'
  finally:
    server.kill()
    server.wait()


def wait_for_port(port, server):
  """Returns when the server accepts connections."""
  deadline = time.monotonic() + 60
  while server.poll() is None and time.monotonic() < deadline:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(('127.0.0.1', port)):
      return
    time.sleep(0.1)
  raise AssertionError('the simulated S3 has not started')


def lose_machine(tmp_path):
  shutil.rmtree(tmp_path / 'cache')
  remote_runs._OPENED.clear()


@pytest.fixture(params=['url', pytest.param('bucket', marks=pytest.mark.long)])
def any_url(request, empty_cache):
  """The URL of a new folder, in memory or in a bucket."""
  return request.getfixturevalue(request.param)


def test_a_run_resumes_on_another_machine(trained, config, any_url, tmp_path, monkeypatch):
  url = any_url
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
  filesystem, root = fsspec.url_to_fs(url)
  names = {path.removeprefix(root).strip('/').split('/')[0] for path in filesystem.find(root)}
  assert names == {path.name for path in trained.folder.iterdir()} - {'checkpoints', 'best', '.lock'} | {
    'attention.png',
    'manifest.json',
    'objects',
  }


def test_a_url_without_a_run_is_an_error(url):
  with pytest.raises(UserError, match=f'{url} holds no run; expected the URL of a training run'):
    open_run(url)
