"""Picture classifiers that read parts of a picture, by hard glimpses or by a spatial transformer: NETWORKS."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.convolution import Conv
from attention_jax.modules.linear import Dense
from attention_jax.modules.spatial_transformer import SpatialTransformer
from attention_jax.specs import Size
from attention_jax.systems.glimpsing.deep_glimpses import DeepGlimpseNetwork
from attention_jax.systems.glimpsing.glimpses import GlimpseNetwork, GlimpseNetworkOutput


class SpatialTransformerNetwork(nn.Module):
  """A spatial transformer before a small convolutional classifier, trained by backpropagation. Jaderberg et al. 2015.

  The region that is read is resampled to `size` x `size` pixels; two 3 x 3 convolutions with ReLU, the second of them
  with stride 2, a ReLU layer and a linear layer classify it. Nothing is sampled at random.

  Attributes:
    labels: number of labels, L.
    size: side of the region in pixels, after it is resampled.
    hidden: width of the ReLU layer of the localisation network.
    features: width of the ReLU layer of the classifier.
    transform: a row of functional.spatial.TRANSFORMS: 'affine', or 'attention' for an upright window.
    filters: features of each convolution, also of those of the localisation network.
    dtype: dtype of the computation.
  """

  attention_kind = 'soft, by a spatial transformer'  # for the log of a run
  labels: int
  size: Size = 8
  hidden: Size = 128
  features: Size = 256
  transform: str = 'affine'
  filters: Size = 20
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, pictures: jax.Array, first: jax.Array, deterministic: bool = True) -> GlimpseNetworkOutput:
    """Classifies pictures.

    Args:
      pictures: [B, height, width, C], from 0 to 1.
      first: not used; the first location of a network of glimpses.
      deterministic: not used.

    Returns:
      GlimpseNetworkOutput with one location, the centre of the region, which no policy has chosen.
    """
    transformer = SpatialTransformer(self.size, self.transform, self.filters, self.hidden, self.dtype)
    regions, theta = transformer(pictures)
    x = regions.astype(self.dtype)
    for strides in (1, 2):
      x = nn.relu(Conv(self.filters, (3, 3), strides=strides, dtype=self.dtype)(x))
    x = nn.relu(Dense(self.features, dtype=self.dtype, name='region')(x.reshape(len(x), -1)))
    logits = Dense(self.labels, dtype=self.dtype, name='labels')(x).astype(jnp.float32)
    centre = theta[:, None, ::-1, 2]  # row and column
    zeros = jnp.zeros((len(pictures), 1))
    return GlimpseNetworkOutput(logits, centre, zeros, zeros, theta[:, None])


NETWORKS: Mapping[str, type[nn.Module]] = {
  'glimpses': GlimpseNetwork,
  'deep_glimpses': DeepGlimpseNetwork,
  'spatial_transformer': SpatialTransformerNetwork,
}
