"""Fixtures of this folder, whose tests train the same toy model repeatedly and share compiled programs."""

import types
import uuid

import pytest

from attention_jax.training import clock, watch
from tests.compiled import compilation_cache_folder, shared_compilation_cache  # noqa: F401 - fixtures


@pytest.fixture
def url():
  """The URL of a new folder in memory."""
  return f'memory://runs/{uuid.uuid4().hex}'


@pytest.fixture
def time(monkeypatch):
  """A clock that only the test advances: `time.now` in seconds."""
  fake = types.SimpleNamespace(now=0.0)
  fake.monotonic = lambda: fake.now
  for module in (watch, clock):
    monkeypatch.setattr(module, 'time', fake)
  return fake
