"""Poolings of a sequence of vectors into one vector: POOLINGS."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.masking import zero_masked
from attention_jax.modules.attention import Attention
from attention_jax.modules.linear import Dense
from attention_jax.specs import Size


class Pooling(nn.Module):
  """Base class of poolings: memory [B, S, D], mask [B, S], final [B, D'] -> a vector [B, V] and weights [B, H, S].

  `final` is the summary of the encoder. H is 1, or heads times hops for a pooling that attends. `Sum` and `Last` do not
  use weights; they return uniform weights. A sequence whose positions are all masked gives a zero vector and zero
  weights; if `attention` projects values with a bias, only the weights are zero.

  Attributes:
    attention: attention of a pooling that attends.
    has_learned_weights: whether the weights are learned.
  """

  has_learned_weights = False
  attention: Attention

  @staticmethod
  def uniform_weights(memory: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns equal weights of all unmasked positions, [B, 1, S], float32."""
    real = mask.astype(jnp.float32)
    return (real / jnp.maximum(real.sum(-1, keepdims=True), 1))[:, None]


class Mean(Pooling):
  """Σ_s h_s / n over the n unmasked positions s."""

  def __call__(self, memory, mask, final, deterministic=True):
    weights = self.uniform_weights(memory, mask)
    return jnp.einsum('bs,bsd->bd', weights[:, 0].astype(memory.dtype), zero_masked(memory, mask)), weights


class Sum(Pooling):
  """Σ_s h_s over the unmasked positions s."""

  def __call__(self, memory, mask, final, deterministic=True):
    return zero_masked(memory, mask).sum(1), self.uniform_weights(memory, mask)


class Max(Pooling):
  """max_s h_s of each feature; the weight of a position is the fraction of the features whose maximum it has."""

  def __call__(self, memory, mask, final, deterministic=True):
    masked_memory = jnp.where(mask[..., None], memory, jnp.finfo(memory.dtype).min)
    fractions = jax.nn.one_hot(masked_memory.argmax(1), memory.shape[1], dtype=jnp.float32).mean(1)
    return jnp.where(mask.any(1, keepdims=True), masked_memory.max(1), 0), zero_masked(fractions, mask)[:, None]


class Last(Pooling):
  """The summary of the encoder, such as the last states of a recurrence in each direction."""

  def __call__(self, memory, mask, final, deterministic=True):
    return jnp.where(mask.any(1, keepdims=True), final, 0), self.uniform_weights(memory, mask)


class AttentionPooling(Pooling):
  """u_s = tanh(W h_s + b), weights = align(score(c, u_s)), Σ_s weights_s h_s, concatenated over learned vectors c.

  With score 'dot' and softmax: Yang et al. 2016, equations 5 to 7 (and 8 to 10 for sentences); with several hops and no
  bias, Lin et al. 2017, equations 5 and 6, where c are the rows of W_s2. Every score is supported, and every alignment
  that trains by backpropagation alone.

  Attributes:
    attention: the score, the alignment, and the width of u as its `features`.
    hops: number of vectors c.
    hidden: whether there is a layer u; without it u_s is h_s.
    bias: whether that layer has a bias b.
  """

  has_learned_weights = True
  hops: Size = 1
  hidden: bool = True
  bias: bool = True

  @nn.compact
  def __call__(self, memory, mask, final, deterministic=True):
    dtype = self.attention.dtype
    memory = zero_masked(memory, mask)  # before the layer: the gradient of its kernel sums over all positions
    keys = memory
    if self.hidden:
      keys = jnp.tanh(Dense(self.attention.features, use_bias=self.bias, dtype=dtype, name='hidden')(memory))
    size = keys.shape[-1]
    queries = self.param('queries', nn.initializers.normal(size**-0.5), (self.hops, size))
    attention = self.attention.copy()  # without the copy, all poolings of a model would share its parameters
    attended_memory = attention.remember(keys, mask, value=memory)
    batch_queries = jnp.broadcast_to(queries.astype(dtype), (len(memory), *queries.shape))
    context, weights = attention.parallel(batch_queries, attended_memory, deterministic)
    return context.reshape(len(memory), -1), weights.reshape(len(memory), -1, weights.shape[-1])


POOLINGS: Mapping[str, type[Pooling]] = {
  'attention': AttentionPooling,
  'last': Last,
  'max': Max,
  'mean': Mean,
  'sum': Sum,
}
