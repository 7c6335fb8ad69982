"""Convolutions over sequences as one product of matrices, and layers whose weights are normalised."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import product


class Normed(nn.Module):
  """(g v / ‖v‖) · x + b for each output, x [..., D] -> [..., F]. Weight normalisation, Salimans & Kingma 2016.

  It starts with weights v ~ N(0, variance / D) and without bias: where inputs have variance 1, outputs have `variance`.

  Attributes:
    features: F.
    variance: 4 for what goes into a gated linear unit, which has a quarter of it left; times the part of the inputs
      that dropout keeps, for it divides by that (Gehring et al. 2017, section 3.5).
  """

  features: int
  variance: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    size = x.shape[-1]
    v = self.param('direction', nn.initializers.normal((self.variance / size) ** 0.5), (size, self.features))
    norm = jnp.linalg.norm(v, axis=0)
    gain = self.param('gain', lambda rng: norm)
    bias = self.param('bias', nn.initializers.zeros, (self.features,)).astype(self.dtype)
    y = product(x.astype(self.dtype), (v * (gain / norm)[None]).astype(self.dtype))
    return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class GatedConvolution(nn.Module):
  """a * σ(b), [a; b] = W near + b: near [..., width * D] -> [..., F]. Gehring et al. 2017, section 3.2.

  Attributes: features, F; dropout, of what goes in; see `windows` for what that is.
  """

  features: int
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, near: jax.Array) -> jax.Array:
    return nn.glu(Normed(2 * self.features, 4 * (1 - self.dropout), self.dtype)(near))


def windows(x: jax.Array, before: int, after: int) -> jax.Array:
  """x [B, T, D] -> [B, T, (before + 1 + after) * D]: each position among those around it, zeros beyond the ends."""
  size = x.shape[1]
  padded = jnp.pad(x, ((0, 0), (before, after), (0, 0)))
  return jnp.concatenate([padded[:, i : i + size] for i in range(before + 1 + after)], axis=-1)


def average_residual(x: jax.Array, y: jax.Array) -> jax.Array:
  """(x + y) √0.5: as varied as each of them is. Gehring et al. 2017, section 3.4."""
  return (x + y) * 0.5**0.5


def scale_gradient(x: jax.Array, part: float) -> jax.Array:
  """x itself, with `part` of its gradient."""
  still = jax.lax.stop_gradient(x)
  return still + part * (x - still)
