"""Recurrent visual attention: classifies a picture from a few glimpses at sampled locations. Mnih et al. 2014."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import Dense
from attention_jax.specs import Positive, Repeats, Size, check_fields


class GlimpseNetworkOutput(NamedTuple):
  """Logits, and the location, log-density and baseline of each glimpse.

  Attributes:
    logits: [B, L], after the last glimpse; for a network that reads K objects, [B, K, L], after the last glimpse of
      each object.
    locations: [B, T, 2], centres of the glimpses: row and column, from -1 at the top left to 1 at the bottom right.
    log_policy: [B, T], log-density of each location conditional on the glimpses before it. It is 0 for the first
      location, which the policy does not choose, and for all locations of deterministic calls.
    baselines: [B, T], sum of the later rewards, predicted before each glimpse; 0 for a network without rewards.
    transforms: [B, T, 2, 3], affine transforms of the regions that were read, in the coordinates of functional.spatial;
      () for glimpses by a retina.
  """

  logits: jax.Array
  locations: jax.Array
  log_policy: jax.Array
  baselines: jax.Array
  transforms: Any = ()


def retina(picture: jax.Array, location: jax.Array, size: int, scales: int) -> jax.Array:
  """Extracts square patches of size, 2 size, 4 size ... pixels around a location. Mnih et al. 2014, section 3.1.

  Args:
    picture: [height, width, C]; pixels beyond its edges count as 0.
    location: [2], as in GlimpseNetworkOutput.
    size: side of the finest patch in pixels, and of every patch in cells.
    scales: number of patches.

  Returns:
    The mean of the pixels in each cell of each patch, [scales, size, size, C].
  """
  cell_size = 2 ** jnp.arange(scales)[:, None, None]  # pixels along an axis

  def pixel_weights(axis: int) -> jax.Array:
    """Returns the weight of each pixel of an axis in the mean of each cell, [scales, size, pixels]."""
    pixels = picture.shape[axis]
    middle = jnp.round((location[axis] + 1) / 2 * pixels).astype(jnp.int32)
    first = middle - size * cell_size // 2 + cell_size * jnp.arange(size)[None, :, None]
    offset = jnp.arange(pixels)[None, None] - first
    return ((offset >= 0) & (offset < cell_size)) / cell_size.astype(jnp.float32)

  row_weights = pixel_weights(0)
  column_weights = pixel_weights(1)
  return jnp.einsum('srh,hwk,scw->srck', row_weights, picture, column_weights, precision=jax.lax.Precision.HIGHEST)


def sample_location(mean: jax.Array, deviation: float, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Samples locations around their means [B, 2]; returns them with their log-densities [B].

  The densities have a gradient with respect to the means, the samples have none. Without an rng, the locations are
  the means, and the log-densities 0.

  Args:
    mean: means of the locations [B, 2], from -1 to 1, see GlimpseNetworkOutput.
    deviation: standard deviation of both coordinates, in the unit of the means.
    rng: PRNG key, consumed; None for no sampling.

  Returns:
    The locations [B, 2], clipped to the picture if they are samples, and the log-densities [B], which are those of the
    samples before clipping.
  """
  if rng is None:
    return mean, jnp.zeros(len(mean))
  noise = jax.random.normal(rng, mean.shape)
  location = jax.lax.stop_gradient(mean + deviation * noise)
  standardized = (location - mean) / deviation
  log_normalizer = jnp.log(deviation * jnp.sqrt(2 * jnp.pi))
  return location.clip(-1, 1), -jnp.sum(standardized**2 / 2 + log_normalizer, -1)


class GlimpseNetwork(nn.Module):
  """h_t = ReLU(W h_{t-1} + V g_t), g_t of the retina and the location; l_{t+1} ~ N(tanh(U h_t), deviation²).

  Mnih et al. 2014, section 3.1: the glimpse network, the core, the location network, and the label after the last
  glimpse. In their section 4 the mean of a location is U h_t; the tanh keeps it inside the picture. The gradients of
  the policy and of the baseline do not reach h.

  Attributes:
    labels: number of labels, L.
    glimpses: number of glimpses, T.
    size: side of the finest patch in pixels, see `retina`.
    scales: number of patches, see `retina`.
    hidden: width of the layers of the patches and of the location.
    features: width of g and h.
    deviation: standard deviation of a location, in units of half a picture.
    dtype: dtype of the computation.
  """

  attention_kind = 'hard, by glimpses'  # for the log of a run
  labels: int
  glimpses: Repeats = 6
  size: Size = 8
  scales: Size = 1
  hidden: Size = 128
  features: Size = 256
  deviation: Positive = 0.15
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, pictures: jax.Array, first: jax.Array, deterministic: bool = True) -> GlimpseNetworkOutput:
    """Classifies pictures; locations are sampled with the rng 'attention'.

    Args:
      pictures: [B, height, width, C], from 0 to 1.
      first: the first location [B, 2].
      deterministic: whether locations are the means of the policy instead of samples.

    Returns:
      GlimpseNetworkOutput.
    """
    patch_layer = self._layer(self.hidden, 'patch')
    location_layer = self._layer(self.hidden, 'location')
    patch_output = self._layer(self.features, 'what')
    location_output = self._layer(self.features, 'where')
    core = self._layer(self.features, 'core')
    inputs = self._layer(self.features, 'inputs')
    policy = self._layer(2, 'policy')
    baseline = self._layer(1, 'baseline')
    extract_patches = jax.vmap(lambda picture, location: retina(picture, location, self.size, self.scales))

    location = first
    h = jnp.zeros((len(pictures), self.features), self.dtype)
    log_density = jnp.zeros(len(pictures))
    locations = []
    log_policy = []
    baselines = []
    for step in range(self.glimpses):
      locations.append(location)
      log_policy.append(log_density)
      baselines.append(baseline(jax.lax.stop_gradient(h))[:, 0].astype(jnp.float32))

      patches = extract_patches(pictures, location)
      patch_features = nn.relu(patch_layer(patches.reshape(len(pictures), -1)))
      location_features = nn.relu(location_layer(location))
      g = nn.relu(patch_output(patch_features) + location_output(location_features))
      h = nn.relu(core(h) + inputs(g))

      is_last = step + 1 == self.glimpses
      if not is_last:
        mean = jnp.tanh(policy(jax.lax.stop_gradient(h)).astype(jnp.float32))
        rng = None if deterministic else self.make_rng('attention')
        location, log_density = sample_location(mean, self.deviation, rng)

    logits = self._layer(self.labels, 'labels')(h).astype(jnp.float32)
    return GlimpseNetworkOutput(logits, jnp.stack(locations, 1), jnp.stack(log_policy, 1), jnp.stack(baselines, 1))

  def _layer(self, features: int, name: str) -> Dense:
    """Returns a new linear layer."""
    return Dense(features, dtype=self.dtype, name=name)


@dataclasses.dataclass(frozen=True)
class GlimpseConfig:
  """The fields of `config.model` and their defaults.

  Attributes:
    network: a spec of picture_classifiers.NETWORKS; fields that the network does not have are not used.
    samples: number of sampled paths of locations for each picture of a training batch.
    glimpses: number of glimpses, of each object if there are several.
    size: side of the finest patch, or of the region of a spatial transformer, in pixels.
    scales: number of patches, each twice as large as the one before.
    hidden: width of the layers of the patches and of the location, or of the layer that locates a region.
    features: width of the glimpse vector and of the recurrent state, or of the last layer before the labels.
    deviation: standard deviation of a location, in units of half a picture.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
  """

  network: str = 'glimpses'
  samples: Repeats = 1
  glimpses: Repeats = 6
  size: Size = 8
  scales: Size = 1
  hidden: Size = 128
  features: Size = 256
  deviation: Positive = 0.15
  dtype: str = 'float32'

  def __post_init__(self):
    check_fields(self, 'config.model')
