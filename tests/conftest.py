"""Strict settings for every test: 8 virtual CPU devices, rank promotion raises, shapes of floor 0 are checked.

Hundreds of small programs are compiled and run once, so they are compiled without optimisation unless XLA_FLAGS says
otherwise: `make test-all` takes them as users do.
"""

import os
from pathlib import Path

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false '
  '--xla_cpu_parallel_codegen_split_count=1',
)
os.environ['XLA_FLAGS'] += ' --xla_force_host_platform_device_count=8'

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_traceback_in_locations_limit', 0)  # programs without line numbers are made faster

# No example fails because the machine was busy.
hypothesis.settings.register_profile('untimed', deadline=None)
hypothesis.settings.load_profile('untimed')

# Before the first import of the package: every jaxtyping annotation of floor 0 is enforced from here on.
jaxtyping.install_import_hook(
  'attention_jax.functional', 'beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))'
)


@pytest.fixture(scope='module', autouse=True)
def forget():
  """What has been compiled, where it is much: a process may map 65530 pieces of memory, and each program is several."""
  yield
  if (maps := Path('/proc/self/maps')).exists() and maps.read_bytes().count(b'\n') > 20_000:
    jax.clear_caches()


@pytest.fixture
def rng():
  return jax.random.key(7)
