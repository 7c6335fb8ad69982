"""Shares compiled programs between the tests of this folder, which train the same toy model repeatedly."""

import uuid

import pytest

from tests.compiled import compilation_cache_folder, shared_compilation_cache  # noqa: F401 - fixtures


@pytest.fixture
def url():
  """A new folder in memory."""
  return f'memory://runs/{uuid.uuid4().hex}'
