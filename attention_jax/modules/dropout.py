"""Dropout of features."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.dropout import keep_mask


class Dropout(nn.Module):
  """x [...] with each number 0 with probability `rate`, and divided by 1 - rate otherwise. Srivastava et al. 2014.

  It draws from the rng 'dropout', by `kept`, which costs next to nothing; the bits of a generator for ciphers, as
  flax.linen.Dropout takes them, are a tenth of the time of a small Transformer's gradient on a CPU.
  """

  rate: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
    if deterministic or not self.rate:
      return x
    return jnp.where(keep_mask(self.make_rng('dropout'), self.rate, x.shape), x / (1 - self.rate), 0)
