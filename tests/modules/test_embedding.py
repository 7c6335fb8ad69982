"""Embeddings: dropout during training alone, and gradients in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.modules.embedding import Embedding
from tests.modules.helpers import gradient_error_of_16_bits, variables

EMBEDDED, WORDS = 5, 11


IDS = jnp.asarray([[1, 4, 2], [10, 0, 3]])


@pytest.mark.long
def test_embeddings_have_dropout_during_training_alone():
  layer = Embedding(WORDS, EMBEDDED, dropout=0.5)
  params = variables(layer, IDS)

  def run(seed, deterministic):
    return np.asarray(layer.apply(params, IDS, deterministic, rngs={'dropout': jax.random.key(seed)}))

  vectors = run(0, True)
  np.testing.assert_array_equal(run(1, True), vectors)
  dropped = run(0, False)
  is_kept = dropped != 0
  assert 0 < is_kept.sum() < is_kept.size
  np.testing.assert_allclose(dropped[is_kept], 2 * vectors[is_kept], rtol=1e-6)
  assert np.any(run(1, False) != dropped)


def test_gradients_in_16_bits_keep_small_terms_of_frequent_tokens():
  ids = jnp.full((1, 4096), 4)
  params = variables(Embedding(WORDS, EMBEDDED), ids)
  assert gradient_error_of_16_bits(lambda dtype: Embedding(WORDS, EMBEDDED, dtype=dtype), params, ids) < 0.03
