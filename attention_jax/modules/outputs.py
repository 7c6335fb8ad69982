"""Output layers: from a decoder's features to logits over the vocabulary. Logits are float32."""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import Dense, product


class Linear(NamedTuple):
  """Logits that are not computed yet: features [..., D] @ kernel [D, V] + bias [V], in the dtype of the features."""

  features: jax.Array
  kernel: jax.Array
  bias: jax.Array

  def logits(self) -> jax.Array:
    scores = product(self.features, self.kernel.astype(self.features.dtype))
    bias = self.bias.astype(self.features.dtype)
    return (scores + bias.reshape((1,) * (scores.ndim - 1) + bias.shape)).astype(jnp.float32)


class VocabularyOutput(nn.Module):
  """A linear layer over the vocabulary: features [..., D] -> Linear, whose logits are [..., size]."""

  size: int
  embedding: nn.Module
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, features: jax.Array) -> Linear:
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (features.shape[-1], self.size))
    return Linear(features.astype(self.dtype), kernel, self.param('bias', nn.initializers.zeros, (self.size,)))


class TiedOutput(nn.Module):
  """Logits against the target embeddings (Press & Wolf 2017); features of another width are projected to theirs."""

  size: int
  embedding: nn.Module
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, features: jax.Array) -> Linear:
    if features.shape[-1] != self.embedding.features:
      features = Dense(self.embedding.features, use_bias=False, dtype=self.dtype)(features)
    bias = self.param('bias', nn.initializers.zeros, (self.size,))
    return Linear(features.astype(self.dtype), self.embedding.vectors().T, bias)


OUTPUTS: Mapping[str, type[nn.Module]] = {'vocabulary': VocabularyOutput, 'tied': TiedOutput}
