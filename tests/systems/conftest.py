"""Fixtures shared by the tests of systems: a compilation cache, and one finished run."""

import pytest

from tests.compiled import cache_compilations, compilation_cache_folder, shared_compilation_cache  # noqa: F401
from tests.shared_runs import build_once, train_once
from tests.systems.helpers import TrainedRun, tiny_config, train_quietly, two_devices, write_pairs


@pytest.fixture(scope='session')
def data_folder(tmp_path_factory, worker_id):
  """A folder with a table of pairs for each split, shared by all test workers: the config of `trained` has its path."""
  folder, _ = build_once(tmp_path_factory, worker_id, 'pairs', write_pairs)
  return folder


@pytest.fixture(scope='session')
def config(data_folder):
  """The config of `trained`."""
  return tiny_config(data_folder)


@pytest.fixture(scope='session')
def trained(config, tmp_path_factory, worker_id, compilation_cache_folder):  # noqa: F811
  """A finished run of 4 updates, with checkpoints after updates 2 and 4. Tests must not change its folder."""

  def train(folder):
    with cache_compilations(compilation_cache_folder):
      return train_quietly(config, folder)

  folder, first_folder, (results, lines) = train_once(tmp_path_factory, worker_id, 'trained', train)
  return TrainedRun(folder, results, [line.replace(str(first_folder), str(folder)) for line in lines])


@pytest.fixture
def on_two_devices():
  """Runs a test on as many devices as `trained` was trained on, so that results are equal bit for bit."""
  with two_devices():
    yield
