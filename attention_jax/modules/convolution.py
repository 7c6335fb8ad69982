"""Convolutions over sequences as a single matrix product, weight-normalised layers, and convolutions over pictures."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import add_bias, product


class Normed(nn.Module):
  """(g v / ‖v‖) · x + b for each output, x [..., D] -> [..., F]. Weight normalisation, Salimans & Kingma 2016.

  Weights are initialised from v ~ N(0, variance / D) and biases with 0, so that inputs of variance 1 give outputs of
  variance `variance`.

  Attributes:
    features: F.
    variance: variance of the outputs at initialisation. It is 4 before a gated linear unit, which keeps a quarter of a
      small variance. After dropout it is multiplied by the keep probability, because dropout divides by that (Gehring
      et al. 2017, section 3.5).
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
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    kernel = (v * (gain / norm)[None]).astype(self.dtype)
    return add_bias(product(x.astype(self.dtype), kernel, jnp.promote_types(self.dtype, jnp.float32)), bias, self.dtype)


class GatedConvolution(nn.Module):
  """A ⊗ σ(B), [A; B] = W x + b: windows x [..., width * D] -> [..., F]. Gehring et al. 2017, section 3.2.

  Attributes:
    features: F.
    dropout: dropout rate that the caller applies before `windows`; it determines the initial scale.
  """

  features: int
  dropout: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.glu(Normed(2 * self.features, 4 * (1 - self.dropout), self.dtype)(x))


class Conv(nn.Module):
  """Convolution over pictures [B, H, W, C] with zeros beyond the edges -> [B, ⌈H / strides⌉, ⌈W / strides⌉, F].

  It has the parameters and initialisers of nn.Conv.

  Attributes:
    features: number of channels of the output, F.
    kernel_size: height and width of the kernel.
    strides: stride along both axes.
    dtype: dtype of the computation and of the output.
  """

  features: int
  kernel_size: tuple[int, int]
  strides: int = 1
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, pictures: jax.Array) -> jax.Array:
    shape = (*self.kernel_size, pictures.shape[-1], self.features)
    kernel = self.param('kernel', nn.initializers.lecun_normal(), shape).astype(self.dtype)
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    y = jax.lax.conv_general_dilated(
      pictures.astype(self.dtype),
      kernel,
      (self.strides, self.strides),
      'SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    return add_bias(y, bias, self.dtype)


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


def scaled_residual(x: jax.Array, y: jax.Array) -> jax.Array:
  """(x + y) √0.5, which has the variance of x and y if they are uncorrelated. Gehring et al. 2017, section 3.4."""
  return (x + y) * 0.5**0.5


def scale_gradient(x: jax.Array, factor: float) -> jax.Array:
  """Returns x, and multiplies its gradient by `factor`."""
  constant = jax.lax.stop_gradient(x)
  return constant + factor * (x - constant)
