"""The implementation chunked stores a part of the array of queries, keys and features."""

import re

import jax
import jax.numpy as jnp

import attention_jax as aj
from attention_jax.kernels import chunked


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


def test_the_bound_of_entries_uses_the_width_of_the_array_not_that_of_the_key(monkeypatch):
  length = 16
  features = 32
  params = aj.init_params(jax.random.key(0), score='concat', query=4, key=4, features=features)
  x = jnp.ones((length, 4))
  monkeypatch.setattr(chunked, 'MAX_BLOCK_ENTRIES', 2 * length * features)  # two queries
  program = jax.make_jaxpr(lambda x: aj.attend(x, x, x, params=params, score='concat', implementation='chunked'))(x)
  assert re.findall(r'length=(\d+)', str(program)) == ['8']
