"""Fixtures of the tests of sweeps."""

import pytest

from attention_jax.sweeps.report import sweep_report
from tests.sweeps.helpers import NO_ROWS, SETTINGS, make_sweep
from tests.systems.helpers import write_pairs


@pytest.fixture(scope='package')
def data_folder(tmp_path_factory):
  """A folder with a table of pairs for each split."""
  return write_pairs(tmp_path_factory.mktemp('pairs'))


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
  """The folder of a sweep of SETTINGS with made-up results. Tests must not change its ledger and runs."""
  path = tmp_path_factory.mktemp('sweep')
  make_sweep(path, SETTINGS)
  return path


@pytest.fixture(scope='session')
def report(folder):
  """The report of `folder`."""
  return sweep_report(folder, NO_ROWS, print)
