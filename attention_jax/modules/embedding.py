"""Token embeddings."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.dropout import Dropout
from attention_jax.tokens import UNK


def oov_to_unk(ids: jax.Array, size: int) -> jax.Array:
  """Replaces out-of-vocabulary ids, those from `size` on, by UNK."""
  return jnp.where(ids < size, ids, UNK)


class Embedding(nn.Module):
  """Embeds token ids [...] as vectors [..., F], with dropout; out-of-vocabulary ids are embedded as UNK.

  Attributes:
    size: number of tokens in the vocabulary; ids from `size` on are out-of-vocabulary words.
    features: F.
    dropout: dropout rate of the vectors.
  """

  size: int
  features: int
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    self.table = nn.Embed(self.size, self.features, embedding_init=nn.initializers.normal(self.features**-0.5))
    self.drop = Dropout(self.dropout)

  def __call__(self, ids: jax.Array, deterministic: bool = True) -> jax.Array:
    # Cast here and not in the table, so that the gradients of equal tokens are added in the dtype of the parameters.
    vectors = self.table(oov_to_unk(ids, self.size)).astype(self.dtype)
    return self.drop(vectors, deterministic=deterministic)

  def vectors(self) -> jax.Array:
    """Returns all vectors [size, F], for an output layer with tied weights."""
    return self.table.embedding
