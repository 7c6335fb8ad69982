"""Recurrent model of visual attention: a few glimpses of a picture at locations that a policy selects."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import Dense
from attention_jax.specs import Positive, Size, check_fields


class GlimpseNetworkOutput(NamedTuple):
  """Output of a glimpse network.

  Attributes:
    logits: logits of the labels after the last glimpse, [B, L].
    locations: locations of the glimpses, [B, T, 2]: row and column, from -1 at the top left to 1 at the bottom right.
    log_policy: log-density of each location given the previous glimpses, [B, T]; 0 for the first location, which is an
      input, and if locations are not sampled.
    baselines: expected reward before each glimpse, [B, T].
  """

  logits: jax.Array
  locations: jax.Array
  log_policy: jax.Array
  baselines: jax.Array


def retina(picture: jax.Array, location: jax.Array, size: int, scales: int) -> jax.Array:
  """Extracts patches of size, 2 size, 4 size ... pixels, each averaged to size x size. Mnih et al. 2014, section 3.1.

  Args:
    picture: a picture, [height, width, C]; pixels beyond its edges are 0.
    location: centre of the patches, [2], as in GlimpseNetworkOutput.
    size: rows and columns of each patch.
    scales: number of patches.

  Returns:
    Patches, [scales, size, size, C].
  """
  cell = 2 ** jnp.arange(scales)[:, None, None]  # pixels along each axis that are averaged to one

  def averaging_weights(axis: int) -> jax.Array:
    """Weight of every pixel of an axis in each cell, [scales, size, pixels]."""
    pixels = picture.shape[axis]
    middle = jnp.round((location[axis] + 1) / 2 * pixels).astype(jnp.int32)
    first = middle - size * cell // 2 + cell * jnp.arange(size)[None, :, None]
    offset = jnp.arange(pixels)[None, None] - first
    return ((offset >= 0) & (offset < cell)) / cell.astype(jnp.float32)

  rows = averaging_weights(0)
  columns = averaging_weights(1)
  return jnp.einsum('srh,hwk,scw->srck', rows, picture, columns, precision=jax.lax.Precision.HIGHEST)


class GlimpseNetwork(nn.Module):
  """h_t = ReLU(W h_{t-1} + V g_t), g_t of the retina and the location; l_{t+1} ~ N(tanh(U h_t), deviation²).

  Mnih et al. 2014, section 3.1: the glimpse network, the core, the location network, and the label after the last
  glimpse. In section 4 of the paper the mean of a location is U h_t; the tanh keeps it inside the picture. The policy
  and the baseline do not propagate gradients into h.

  Attributes:
    labels: number L of labels.
    glimpses: number T of glimpses.
    size, scales: arguments of `retina`.
    hidden: width of the layers over the retina and over the location.
    features: width of g and h.
    deviation: standard deviation of a location, in units of half a picture.
  """

  labels: int
  glimpses: Size = 6
  size: Size = 8
  scales: Size = 1
  hidden: Size = 128
  features: Size = 256
  deviation: Positive = 0.15
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, pictures: jax.Array, first: jax.Array, deterministic: bool = True) -> GlimpseNetworkOutput:
    """Classifies pictures from T glimpses.

    Args:
      pictures: pictures, [B, height, width, C], from 0 to 1.
      first: first locations, [B, 2].
      deterministic: whether each next location is its mean; otherwise it is drawn with the rng 'attention'.
    """

    def dense(features: int, name: str) -> nn.Module:
      return Dense(features, dtype=self.dtype, name=name)

    retina_layer = dense(self.hidden, 'seen')
    location_layer = dense(self.hidden, 'placed')
    retina_to_glimpse = dense(self.features, 'what')
    location_to_glimpse = dense(self.features, 'where')
    state_layer = dense(self.features, 'core')
    glimpse_to_state = dense(self.features, 'inputs')
    policy = dense(2, 'policy')
    baseline = dense(1, 'baseline')
    location = first
    log_density = jnp.zeros(len(pictures))
    h = jnp.zeros((len(pictures), self.features), self.dtype)
    locations = []
    log_densities = []
    baselines = []
    for step in range(self.glimpses):
      baselines.append(baseline(jax.lax.stop_gradient(h))[:, 0].astype(jnp.float32))
      locations.append(location)
      log_densities.append(log_density)
      patches = jax.vmap(lambda picture, at: retina(picture, at, self.size, self.scales))(pictures, location)
      retina_features = nn.relu(retina_layer(patches.reshape(len(pictures), -1)))
      location_features = nn.relu(location_layer(location))
      g = nn.relu(retina_to_glimpse(retina_features) + location_to_glimpse(location_features))
      h = nn.relu(state_layer(h) + glimpse_to_state(g))
      if step + 1 < self.glimpses:
        mean = jnp.tanh(policy(jax.lax.stop_gradient(h)).astype(jnp.float32))
        location, log_density = self._next_location(mean, deterministic)
    logits = dense(self.labels, 'labels')(h).astype(jnp.float32)
    return GlimpseNetworkOutput(logits, jnp.stack(locations, 1), jnp.stack(log_densities, 1), jnp.stack(baselines, 1))

  def _next_location(self, mean: jax.Array, deterministic: bool) -> tuple[jax.Array, jax.Array]:
    """Draws a location around its mean; returns it and its log-density. Returns the mean and 0 if deterministic."""
    if deterministic:
      return mean, jnp.zeros(len(mean))
    noise = jax.random.normal(self.make_rng('attention'), mean.shape)
    sample = jax.lax.stop_gradient(mean + self.deviation * noise)
    standardized = (sample - mean) / self.deviation
    log_density = -jnp.sum(standardized**2 / 2 + jnp.log(self.deviation * jnp.sqrt(2 * jnp.pi)), -1)
    return sample.clip(-1, 1), log_density


@dataclasses.dataclass(frozen=True)
class GlimpseConfig:
  """Fields of `config.model` and their defaults.

  Attributes beside those of GlimpseNetwork:
    samples: number of sampled sequences of locations for each picture of a batch during training.
  """

  samples: Size = 1
  glimpses: Size = 6
  size: Size = 8
  scales: Size = 1
  hidden: Size = 128
  features: Size = 256
  deviation: Positive = 0.15
  dtype: str = 'float32'

  def __post_init__(self):
    check_fields(self, 'config.model')
