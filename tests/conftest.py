"""Strict settings for every test: 8 virtual CPU devices, rank promotion raises, warnings are errors."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture
def rng():
  return jax.random.key(7)
