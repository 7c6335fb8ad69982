"""Fixtures of the tests of sweeps."""

import pytest

from tests.systems.helpers import write_pairs


@pytest.fixture(scope='package')
def data_folder(tmp_path_factory):
  """A folder with a table of pairs for each split."""
  return write_pairs(tmp_path_factory.mktemp('pairs'))
