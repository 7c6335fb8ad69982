"""Folders that one test worker builds for all: data, and finished runs, of which each worker gets a copy."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock


def build_once(tmp_path_factory, worker_id: str, name: str, build: Callable[[Path], Any]) -> tuple[Path, Any]:
  """Returns a folder that all workers share, and what `build` returned for it. Tests must not change the folder.

  Args:
    tmp_path_factory: the fixture of pytest.
    worker_id: the fixture of pytest-xdist.
    name: a name of the folder, unique among all tests.
    build: creates and fills the folder that it is called with; returns an object that can be pickled.
  """
  base = tmp_path_factory.getbasetemp()
  shared = (base if worker_id == 'master' else base.parent) / 'shared' / name
  shared.mkdir(parents=True, exist_ok=True)
  result = shared / 'result.pkl'
  with filelock.FileLock(shared / 'lock'):
    if not result.exists():
      shutil.rmtree(shared / name, ignore_errors=True)  # left by a worker whose build failed
      result.write_bytes(pickle.dumps(build(shared / name)))
  return shared / name, pickle.loads(result.read_bytes())


def train_once(tmp_path_factory, worker_id: str, name: str, train: Callable[[Path], Any]) -> tuple[Path, Path, Any]:
  """Returns the folder of this worker's copy of a finished run, that of the run, and what `train` returned for it."""
  first_folder, result = build_once(tmp_path_factory, worker_id, name, train)
  folder = tmp_path_factory.mktemp(name) / 'run'
  shutil.copytree(first_folder, folder)
  return folder, first_folder, result
