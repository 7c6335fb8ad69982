"""What the programs are tried on: a task of a few words, and one run trained on it."""

import jax
import pytest
from programs import run, tiny, write_task

from tests.compiled import compiled_once  # noqa: F401 - a fixture


@pytest.fixture(scope='package', autouse=True)
def two_devices():
  """Whole runs see two of the devices: as many as there are cores, and enough to be sharded."""
  with pytest.MonkeyPatch.context() as patch:
    for name in ('devices', 'local_devices'):
      every = getattr(jax, name)
      patch.setattr(jax, name, lambda *args, every=every, **options: every(*args, **options)[:2])
    yield


@pytest.fixture(scope='package')
def task(tmp_path_factory):
  """The folder of a task."""
  return write_task(tmp_path_factory.mktemp('task'))


@pytest.fixture(scope='package')
def trained(task, tmp_path_factory):
  """The folder of a finished run; .printed is what train.py said."""
  folder = tmp_path_factory.mktemp('trained') / 'run'
  ran = run('train', *tiny(task, folder))
  assert ran.code == 0, ran.err
  return folder, ran.out
