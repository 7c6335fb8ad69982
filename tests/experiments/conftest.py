"""What the programs are tried on: a task of a few words, and one run trained on it."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from programs import run, tiny, write_task


@pytest.fixture(scope='package', autouse=True)
def compiled_once(tmp_path_factory):
  """The programs compile the same few functions again and again: they share what was compiled."""
  settings = {
    'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('compiled')),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  before = {name: getattr(jax.config, name) for name in settings}
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


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
