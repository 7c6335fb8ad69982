"""Fixtures shared by the tests of systems: a compilation cache, and one finished run."""

import pytest

from tests.compiled import shared_compilation_cache  # noqa: F401 - a fixture
from tests.systems.helpers import TrainedRun, tiny_config, train_quietly, two_devices, write_pairs


@pytest.fixture(scope='package')
def data_folder(tmp_path_factory):
  """A folder with a table of pairs for each split."""
  return write_pairs(tmp_path_factory.mktemp('pairs'))


@pytest.fixture(scope='package')
def config(data_folder):
  """The config of `trained`."""
  return tiny_config(data_folder)


@pytest.fixture(scope='package')
def trained(config, tmp_path_factory):
  """A finished run of 4 updates, with checkpoints after updates 2 and 4. Tests must not change its folder."""
  folder = tmp_path_factory.mktemp('trained') / 'run'
  results, lines = train_quietly(config, folder)
  return TrainedRun(folder, results, lines)


@pytest.fixture
def on_two_devices():
  """Evaluates on as many devices as `trained` was trained on, so that results are equal bit for bit."""
  with two_devices():
    yield
