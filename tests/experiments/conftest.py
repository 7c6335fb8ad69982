"""Shared fixtures: a task of a few words, and one run trained on it."""

import pytest

from tests.compiled import cache_compilations, compilation_cache_folder, shared_compilation_cache  # noqa: F401
from tests.experiments.helpers import run, tiny_arguments, write_task
from tests.shared_runs import build_once, train_once


@pytest.fixture(scope='session')
def task(tmp_path_factory, worker_id):
  """The folder of a task, the same for all test workers, because the config of `trained` names it."""
  folder, _ = build_once(tmp_path_factory, worker_id, 'task', write_task)
  return folder


@pytest.fixture(scope='session')
def trained(task, tmp_path_factory, worker_id, compilation_cache_folder):  # noqa: F811
  """The folder of a finished run, and what train.py printed."""

  def train(folder):
    with cache_compilations(compilation_cache_folder):
      result = run('train', *tiny_arguments(task, folder))
    assert result.code == 0, result.err
    return result.out

  folder, first_folder, printed = train_once(tmp_path_factory, worker_id, 'trained_by_program', train)
  return folder, printed.replace(str(first_folder), str(folder))
