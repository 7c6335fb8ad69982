"""Differential attention: the difference of two softmaxes over the same values (Ye et al. 2025)."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

INITIAL_LAMBDA = 0.8  # default λ₀; the models of the paper have `lambda_of_layer`
EPSILON = 1e-5  # added to the mean square in the normalisation of each difference


def lambda_of_layer(layer: int) -> float:
  """Returns λ₀ = 0.8 - 0.6 exp(-0.3 (l - 1)) of layer l = 1, 2, ... Ye et al. 2025, section 2.1."""
  return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


class HeadDifference(nn.Module):
  """(1 - λ₀) norm(c₁ - λ c₂) of each pair of heads. Ye et al. 2025, Differential Transformer, equations 1 to 3.

  The norm divides by the root mean square and multiplies by learned gains.
  λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ₀; all pairs share its four learned vectors and the gains of the norm. If
  several heads of queries share a key, the i-th head of one key and the i-th of the next key are a pair.

  Attributes:
    features: width of the learned vectors, that of the keys of a head.
    groups: number G of heads of keys.
    initial_lambda: λ₀.
    dtype: dtype of the result.
  """

  features: int
  groups: int
  initial_lambda: float = INITIAL_LAMBDA
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, contexts: jax.Array) -> jax.Array:
    """Returns [B, N / 2, T, V] for contexts [B, N, T, V]."""
    init = nn.initializers.normal(0.1)
    vectors = {name: self.param(name, init, (self.features,)) for name in ('query_1', 'key_1', 'query_2', 'key_2')}
    first, second = (jnp.exp(jnp.sum(vectors[f'query_{i}'] * vectors[f'key_{i}'])) for i in (1, 2))
    subtracted = (first - second + self.initial_lambda).astype(contexts.dtype)
    batch, heads, *core = contexts.shape
    pairs = contexts.reshape(batch, self.groups // 2, 2, heads // self.groups, *core)
    difference = (pairs[:, :, 0] - subtracted * pairs[:, :, 1]).reshape(batch, heads // 2, *core)
    return (1 - self.initial_lambda) * nn.RMSNorm(epsilon=EPSILON, dtype=self.dtype, name='norm')(difference)
