"""Shared fixtures: a task of a few words, one run trained on it, and runs that programs open once."""

from pathlib import Path

import jax
import pytest

from attention_jax.systems import runs
from attention_jax.training.paths import is_in_bucket
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


@pytest.fixture(scope='module', autouse=True)
def runs_are_opened_once():
  """A run that a program opens again, with unchanged files, is the same object, whose programs are compiled already."""
  open_run = runs.open_run
  opened = {}

  def open_once(folder, checkpoint='best', evaluation=runs.NO_OVERRIDES, dtype=''):
    path = runs.resolve_folder(folder)
    runs.check_run_files(path)
    files = sorted((str(file), file.stat().st_mtime_ns) for file in Path(path).rglob('*'))
    key = str((path, checkpoint, sorted(evaluation.items()), dtype, len(jax.devices()), files))
    if checkpoint.endswith(runs.SUFFIX) or is_in_bucket(path):
      return open_run(folder, checkpoint, evaluation, dtype)
    if key not in opened:
      opened[key] = open_run(folder, checkpoint, evaluation, dtype)
    return opened[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(runs, 'open_run', open_once)
    yield
