"""Shared fixtures: a task of a few words, and one run trained on it."""

import pytest

from tests.compiled import cache_compilations, compilation_cache_folder, shared_compilation_cache  # noqa: F401
from tests.experiments.helpers import run, tiny_arguments, write_task


@pytest.fixture(scope='session')
def task(tmp_path_factory):
  """The folder of a task."""
  return write_task(tmp_path_factory.mktemp('task'))


@pytest.fixture(scope='session')
def trained(task, tmp_path_factory, compilation_cache_folder):  # noqa: F811
  """The folder of a finished run, and what train.py printed."""
  folder = tmp_path_factory.mktemp('trained') / 'run'
  with cache_compilations(compilation_cache_folder):
    result = run('train', *tiny_arguments(task, folder))
  assert result.code == 0, result.err
  return folder, result.out
