"""Token embeddings."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.dropout import Dropout
from attention_jax.tokens import UNK


def oov_to_unk(ids: jax.Array, size: int) -> jax.Array:
  """ids, with UNK for words that stand in the source alone: those from `size` on."""
  return jnp.where(ids < size, ids, UNK)


class Embedding(nn.Module):
  """Token ids [...] -> vectors [..., F], with dropout; `vectors` is what a tied output layer needs.

  Ids from `size` on are words that the vocabulary does not know, and read as UNK.
  """

  size: int
  features: int
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.table = nn.Embed(
      self.size, self.features, dtype=self.dtype, embedding_init=nn.initializers.normal(self.features**-0.5)
    )
    self.drop = Dropout(self.dropout)

  def __call__(self, ids: jax.Array, deterministic: bool = True) -> jax.Array:
    return self.drop(self.table(oov_to_unk(ids, self.size)), deterministic=deterministic)

  def vectors(self) -> jax.Array:
    """All vectors [size, F]."""
    return self.table.embedding
