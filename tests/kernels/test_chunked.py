"""Implementations 'chunked' and 'factored': memory, size of blocks, and gradients in 16 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.kernels import chunked
from tests.modules.helpers import draw


@pytest.mark.long
def test_chunked_stores_a_part_of_the_array_of_queries_keys_and_features(monkeypatch):
  length = 512
  features = 128
  sizes = {'query': features, 'key': features, 'features': features}
  params = jax.eval_shape(lambda: aj.init_params(jax.random.key(0), score='additive', **sizes))
  x = jax.ShapeDtypeStruct((length, features), jnp.float32)

  def temporary_bytes(implementation):
    def total(params, x):
      options = {'score': 'additive', 'alignment': 'sparsemax', 'return_weights': False}
      return aj.attend(x, x, x, params=params, implementation=implementation, **options).context.sum()

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  monkeypatch.setattr(chunked, 'MAX_BLOCK_SCORES', 8 * length)
  array_bytes = 4 * length * length * features
  assert temporary_bytes('xla') > array_bytes > 1.5 * temporary_bytes('chunked')


@pytest.mark.long
@pytest.mark.parametrize(('implementation', 'score'), [('chunked', 'scaled_dot'), ('factored', 'additive')])
def test_gradients_of_16_bits_over_many_blocks_are_near_those_of_float32(implementation, score, monkeypatch):
  queries = 512
  size = 8
  features = 4
  sizes = {'query': features, 'key': features, 'features': features}
  params = aj.init_params(jax.random.key(0), score=score, **sizes)
  inputs = (draw(queries, features), draw(size, features), draw(size, features), params)
  monkeypatch.setattr(chunked, 'MAX_BLOCK_SCORES', size)  # one query

  def gradients(implementation, dtype):
    def total(inputs):
      query, key, value, params = inputs
      options = {'score': score, 'implementation': implementation, 'return_weights': False}
      return aj.attend(query, key, value, params=params, **options).context.astype(jnp.float32).sum()

    return jax.jit(jax.grad(total))(jax.tree.map(lambda x: x.astype(dtype), inputs))

  exact = gradients('xla', jnp.float32)
  for gradient, expected in zip(*map(jax.tree.leaves, (gradients(implementation, jnp.bfloat16), exact)), strict=True):
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient, expected, atol=0.02 * np.abs(expected).max())


def test_block_size_depends_on_the_features_of_the_score_not_on_the_width_of_the_key(monkeypatch):
  length = 16
  features = 32
  params = aj.init_params(jax.random.key(0), score='concat', query=4, key=4, features=features)
  x = jnp.ones((length, 4))
  monkeypatch.setattr(chunked, 'MAX_BLOCK_ENTRIES', 2 * length * features)  # two queries
  program = jax.make_jaxpr(lambda x: aj.attend(x, x, x, params=params, score='concat', implementation='chunked'))(x)
  assert re.findall(r'length=(\d+)', str(program)) == ['8']
