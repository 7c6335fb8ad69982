"""Fixtures of this folder."""

import jax
import jax.numpy as jnp
import pytest

from tests.losses.helpers import TINY, B, T, V, tiny_batch


@pytest.fixture
def case(rng):
  """logits, target and mask; the last row is a filler row."""
  logits = 3 * jax.random.normal(rng, (B, T, V))
  target = jax.random.randint(jax.random.fold_in(rng, 1), (B, T), 0, V)
  mask = jnp.arange(T)[None] < jnp.array([5, 2, 0])[:, None]
  return logits, target, mask


@pytest.fixture(scope='module')
def tiny_params():
  batch = tiny_batch()
  params = jax.jit(TINY.init)(jax.random.key(1), batch.source, batch.source_mask, batch.target)['params']
  return jax.tree.map(lambda x: 2.0 * x, params)
