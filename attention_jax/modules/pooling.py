"""From a sequence of vectors to one: POOLINGS."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.masking import zero_masked
from attention_jax.modules.attention import Attention
from attention_jax.modules.linear import Dense
from attention_jax.specs import Size


class Pooling(nn.Module):
  """What poolings share: memory [B, S, D], mask [B, S], final [B, D'] -> a vector [B, V] and weights [B, H, S].

  A sequence that is all masked gives zeros. `learns` says whether the weights are learned.
  """

  learns = False
  attention: Attention

  @staticmethod
  def flat(memory: jax.Array, mask: jax.Array) -> jax.Array:
    """Equal weights of all that is there [B, 1, S], float32."""
    real = mask.astype(jnp.float32)
    return (real / jnp.maximum(real.sum(-1, keepdims=True), 1))[:, None]


class Mean(Pooling):
  """Σ_s h_s / S."""

  def __call__(self, memory, mask, final, deterministic=True):
    weights = self.flat(memory, mask)
    return jnp.einsum('bs,bsd->bd', weights[:, 0].astype(memory.dtype), zero_masked(memory, mask)), weights


class Sum(Pooling):
  """Σ_s h_s."""

  def __call__(self, memory, mask, final, deterministic=True):
    return zero_masked(memory, mask).sum(1), self.flat(memory, mask)


class Max(Pooling):
  """max_s h_s, each feature by itself; the weights are the shares of the features that each position gives."""

  def __call__(self, memory, mask, final, deterministic=True):
    low = jnp.finfo(memory.dtype).min
    hidden = jnp.where(mask[..., None], memory, low)
    taken = jax.nn.one_hot(hidden.argmax(1), memory.shape[1], dtype=jnp.float32).mean(1)
    return jnp.where(mask.any(1, keepdims=True), hidden.max(1), 0), zero_masked(taken, mask)[:, None]


class Last(Pooling):
  """The encoder's own summary: the last states of a recurrence, in each direction."""

  def __call__(self, memory, mask, final, deterministic=True):
    return jnp.where(mask.any(1, keepdims=True), final, 0), self.flat(memory, mask)


class AttentionPooling(Pooling):
  """u_s = tanh(W h_s + b), weights = align(score(c, u_s)), Σ_s weights_s h_s, c learned; hops c, side by side.

  With score 'dot' and softmax: Yang et al. 2016, equations 5 to 7 (and 8 to 10 for sentences); with several hops and no
  bias, Lin et al. 2017, equations 5 and 6, where c are the rows of W_s2. Any score and alignment of attention does.

  Attributes:
    attention: score, alignment, and features: the width of u.
    hops: how many vectors c.
    hidden: whether there is a layer u; without it u_s is h_s.
    bias: whether that layer has b.
  """

  learns = True
  hops: Size = 1
  hidden: bool = True
  bias: bool = True

  @nn.compact
  def __call__(self, memory, mask, final, deterministic=True):
    size = self.attention.features if self.hidden else memory.shape[-1]
    dtype = self.attention.dtype
    layer = Dense(size, use_bias=self.bias, dtype=dtype, name='hidden') if self.hidden else None
    keys = jnp.tanh(layer(memory)) if layer else memory
    sought = self.param('sought', nn.initializers.normal(size**-0.5), (self.hops, size))
    attention = self.attention.copy()
    seen = attention.remember(keys, mask, value=memory)
    query = jnp.broadcast_to(sought.astype(dtype), (len(memory), *sought.shape))
    context, weights = attention.parallel(query, seen, deterministic)
    return context.reshape(len(memory), -1), weights.reshape(len(memory), -1, weights.shape[-1])


POOLINGS: Mapping[str, type[Pooling]] = {
  'attention': AttentionPooling,
  'last': Last,
  'max': Max,
  'mean': Mean,
  'sum': Sum,
}
