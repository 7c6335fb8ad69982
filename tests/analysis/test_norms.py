"""Norms of weighted vectors, against the vectors themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import analysis


@pytest.mark.long
def test_norms_of_one_head_are_weights_times_norms_of_values():
  norms = analysis.weighted_norms(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([[3.0, 4.0], [0.0, 0.1]]))
  np.testing.assert_allclose(norms, [[2.5, 0.05], [5, 0]], rtol=1e-6)


def test_several_heads_add_their_vectors():
  weights = jax.random.uniform(jax.random.key(0), (3, 4, 5))
  values = jax.random.normal(jax.random.key(1), (3, 5, 6))
  expected = jnp.linalg.norm(jnp.einsum('hts,hsv->tsv', weights, values), axis=-1)
  np.testing.assert_allclose(analysis.weighted_norms(weights, values), expected, rtol=1e-5)
  opposite = jnp.stack([values[0], -values[0]])
  np.testing.assert_allclose(analysis.weighted_norms(weights[:1].repeat(2, 0), opposite), 0, atol=1e-3)
