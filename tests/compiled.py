"""What whole runs compile, compiled once: for all workers, and for the processes that tests start.

Only for tests that compile the same again and again; elsewhere keeping it takes longer than compiling.
"""

import contextlib
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def _remembered(folder: Path):
  settings = {
    'jax_compilation_cache_dir': str(folder),
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


@pytest.fixture(scope='package', autouse=True)
def shared_compilation_cache(tmp_path_factory, worker_id):
  """Imported by the conftest.py of a package."""
  base = tmp_path_factory.getbasetemp()
  with _remembered((base if worker_id == 'master' else base.parent) / 'compiled'):
    yield


def cache_environment() -> dict[str, str]:
  """What lets a process that a test starts share it."""
  folder = jax.config.jax_compilation_cache_dir
  return {'JAX_COMPILATION_CACHE_DIR': folder, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
