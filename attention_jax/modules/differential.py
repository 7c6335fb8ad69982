"""Differential attention: the difference of two softmaxes over the same values (Ye et al. 2025)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

INITIAL_LAMBDA = 0.8  # λ₀ in all layers; the models of the paper have 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l
EPSILON = 1e-5  # added to the mean square in the normalisation of each difference


class HeadDifference(nn.Module):
  """(1 - λ₀) norm(c₁ - λ c₂) of each pair of heads. Ye et al. 2025, Differential Transformer, equations 1 to 3.

  The norm divides by the root mean square and multiplies by learned gains.
  λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ₀; all pairs share its four learned vectors and the gains of the norm.

  Attributes:
    features: width of the learned vectors, that of the keys of a head.
    dtype: dtype of the result.
  """

  features: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, contexts: jax.Array) -> jax.Array:
    """Returns [B, N / 2, T, V] for contexts [B, N, T, V]; the heads of a pair follow each other."""
    init = nn.initializers.normal(0.1)
    vectors = {name: self.param(name, init, (self.features,)) for name in ('query_1', 'key_1', 'query_2', 'key_2')}
    first, second = (jnp.exp(jnp.sum(vectors[f'query_{i}'] * vectors[f'key_{i}'])) for i in (1, 2))
    subtracted = (first - second + INITIAL_LAMBDA).astype(contexts.dtype)
    difference = contexts[:, 0::2] - subtracted * contexts[:, 1::2]
    return (1 - INITIAL_LAMBDA) * nn.RMSNorm(epsilon=EPSILON, dtype=self.dtype, name='norm')(difference)
