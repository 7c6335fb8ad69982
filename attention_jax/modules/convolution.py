"""Convolutions over sequences as a single matrix product, and weight-normalised layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import product


class Normed(nn.Module):
  """(g v / ‖v‖) · x + b for each output, x [..., D] -> [..., F]. Weight normalisation, Salimans & Kingma 2016.

  Weights are initialised from v ~ N(0, variance / D) and biases with 0, so that inputs of variance 1 give outputs of
  variance `variance`.

  Attributes:
    features: F.
    variance: variance of the outputs at initialisation. It is 4 before a gated linear unit, which keeps about a quarter
      of it. After dropout it is multiplied by the keep probability, because dropout divides by that (Gehring et al.
      2017, section 3.5).
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
  """A ⊗ σ(B), [A; B] = W x + b: windows x [..., width * D] -> [..., F]. Gehring et al. 2017, section 3.2.

  Attributes:
    features: F.
    dropout: dropout rate of the inputs before `windows`; it determines the initial scale.
  """

  features: int
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.glu(Normed(2 * self.features, 4 * (1 - self.dropout), self.dtype)(x))


def windows(x: jax.Array, before: int, after: int) -> jax.Array:
  """Concatenates every position with its neighbours; positions beyond the ends are zeros.

  Args:
    x: sequences, [B, T, D].
    before: number of positions before each position.
    after: number of positions after each position.

  Returns:
    Windows, [B, T, (before + 1 + after) * D].
  """
  size = x.shape[1]
  padded = jnp.pad(x, ((0, 0), (before, after), (0, 0)))
  return jnp.concatenate([padded[:, i : i + size] for i in range(before + 1 + after)], axis=-1)


def average_residual(x: jax.Array, y: jax.Array) -> jax.Array:
  """(x + y) √0.5, which preserves the variance of x and y. Gehring et al. 2017, section 3.4."""
  return (x + y) * 0.5**0.5


def scale_gradient(x: jax.Array, factor: float) -> jax.Array:
  """Returns x, and multiplies its gradient by `factor`."""
  constant = jax.lax.stop_gradient(x)
  return constant + factor * (x - constant)
