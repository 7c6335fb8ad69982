"""A persistent compilation cache that all test workers, and the processes that tests start, share.

Only for tests that compile the same programs repeatedly: for others, writing the cache takes longer than compiling.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

COMPILATION_EVENT = '/jax/core/compile/backend_compile_duration'  # the event of jax after each compilation


@pytest.fixture(scope='session')
def compilation_cache_folder(tmp_path_factory, worker_id) -> Path:
  """The folder of the cache, the same in every worker."""
  base = tmp_path_factory.getbasetemp()
  return (base if worker_id == 'master' else base.parent) / 'compiled'


@contextlib.contextmanager
def cache_compilations(folder: Path):
  """Caches every compilation in `folder`, and restores the settings of jax at the end."""
  settings = {
    'jax_compilation_cache_dir': str(folder),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  previous = {name: getattr(jax.config, name) for name in settings}
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in previous.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@contextlib.contextmanager
def record_compilations() -> Iterator[list[str]]:
  """Yields a list to which jax's event of each program that is compiled, or loaded from the cache, is appended."""
  compiled = []

  def record(event, seconds, **_):
    if event == COMPILATION_EVENT:
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(record)
  try:
    yield compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(record)


def shapes_of(state):
  """Returns the shapes, dtypes and shardings of the arrays of a state."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture(scope='package', autouse=True)
def shared_compilation_cache(compilation_cache_folder):
  """Caches the compilations of a package whose conftest.py imports this fixture and `compilation_cache_folder`."""
  with cache_compilations(compilation_cache_folder):
    yield


def cache_environment() -> dict[str, str]:
  """Returns environment variables with which a process that a test starts uses the same cache."""
  folder = jax.config.jax_compilation_cache_dir
  return {'JAX_COMPILATION_CACHE_DIR': folder, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
