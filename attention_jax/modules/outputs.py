"""Output layers: from a decoder's features to logits over the vocabulary. Logits are float32."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp


class VocabularyOutput(nn.Module):
  """A linear layer over the vocabulary: features [..., D] -> logits [..., size]."""

  size: int
  embedding: nn.Module
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    return nn.Dense(self.size, dtype=self.dtype)(features).astype(jnp.float32)


class TiedOutput(nn.Module):
  """Logits against the target embeddings (Press & Wolf 2017), after a projection to their width."""

  size: int
  embedding: nn.Module
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    narrow = nn.Dense(self.embedding.features, use_bias=False, dtype=self.dtype)(features)
    bias = self.param('bias', nn.initializers.zeros, (self.size,))
    scores = self.embedding.scores(narrow).astype(jnp.float32)
    return scores + bias.reshape((1,) * (scores.ndim - 1) + bias.shape)


OUTPUTS: Mapping[str, type[nn.Module]] = {'vocabulary': VocabularyOutput, 'tied': TiedOutput}
