"""Strict settings for every test: 8 virtual CPU devices, rank promotion raises, shapes of floor 0 are checked."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'

import jax
import jaxtyping
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')

# Before the first import of the package: every jaxtyping annotation of floor 0 is enforced from here on.
jaxtyping.install_import_hook(
  'attention_jax.functional', 'beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))'
)


@pytest.fixture
def rng():
  return jax.random.key(7)
