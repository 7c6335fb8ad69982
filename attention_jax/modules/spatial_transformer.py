"""The flax module of a spatial transformer: it finds a region of a picture and reads it. Jaderberg et al. 2015."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import choose
from attention_jax.functional.spatial import TRANSFORMS, affine_grid, bilinear_sample
from attention_jax.modules.convolution import Conv
from attention_jax.modules.linear import Dense
from attention_jax.specs import Size


class SpatialTransformer(nn.Module):
  """Localisation network, grid generator and bilinear sampler. Jaderberg et al. 2015, section 3.

  The localisation network has two 5 x 5 convolutions, each with ReLU and max pooling by 2, a ReLU layer, and a linear
  layer that initially returns the parameters of the identity.

  Attributes:
    size: height and width of the result, in pixels.
    transform: a key of TRANSFORMS.
    filters: features of each convolution.
    hidden: width of the ReLU layer.
    dtype: dtype of the localisation network except its last layer, which is float32 like coordinates and pixels.
  """

  size: Size = 28
  transform: str = 'affine'
  filters: Size = 20
  hidden: Size = 128
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, pictures: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads a region of each picture.

    Args:
      pictures: [B, height, width, C].

    Returns:
      The regions [B, size, size, C], and the transforms θ [B, 2, 3] in the coordinates of functional.spatial.
    """
    row = TRANSFORMS[choose(self.transform, TRANSFORMS, 'transform')]
    x = pictures.astype(self.dtype)
    for _ in range(2):
      x = nn.relu(Conv(self.filters, (5, 5), dtype=self.dtype)(x))
      x = nn.max_pool(x, (2, 2), strides=(2, 2), padding='SAME')
    x = nn.relu(Dense(self.hidden, dtype=self.dtype, name='located')(x.reshape(len(x), -1)))

    def identity(rng, shape, dtype):
      return jnp.asarray(row.identity, dtype)

    zeros = nn.initializers.zeros
    params = nn.Dense(len(row.identity), kernel_init=zeros, bias_init=identity, name='transform')(x.astype(jnp.float32))
    theta = jax.vmap(row.fn)(params)

    def read(picture: jax.Array, theta: jax.Array) -> jax.Array:
      return bilinear_sample(picture, affine_grid(theta, self.size, self.size))

    return jax.vmap(read)(pictures.astype(jnp.float32), theta), theta
