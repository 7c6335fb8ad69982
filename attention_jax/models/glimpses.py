"""The recurrent model of visual attention: a few glimpses of a picture, each where the model wants the next one."""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import Dense
from attention_jax.specs import Positive, Size, check_fields


class GlimpseNetworkOutput(NamedTuple):
  """What came of a picture.

  Attributes:
    logits: [B, L], after the last glimpse.
    locations: [B, T, 2], where it looked: row and column, from -1 at the top left to 1 at the bottom right.
    log_policy: [B, T], the log-density of each location, given what was seen before it; 0 for the first, which is
      drawn from no policy, and where nothing is drawn.
    baselines: [B, T], the reward that was expected before each.
  """

  logits: jax.Array
  locations: jax.Array
  log_policy: jax.Array
  baselines: jax.Array


def retina(picture: jax.Array, location: jax.Array, size: int, scales: int) -> jax.Array:
  """Patches of size, 2 size, 4 size ... pixels around a location, each as size x size means: [scales, size, size, C].

  Args: picture [height, width, C], 0 beyond its edges; location [2] as in GlimpseNetworkOutput. Mnih et al. 2014,
  section 3.1.
  """
  cell = 2 ** jnp.arange(scales)[:, None, None]

  def shares(axis: int) -> jax.Array:
    """[scales, size, pixels]: how much of each cell every pixel of an axis is."""
    pixels = picture.shape[axis]
    middle = jnp.round((location[axis] + 1) / 2 * pixels).astype(jnp.int32)
    first = middle - size * cell // 2 + cell * jnp.arange(size)[None, :, None]
    away = jnp.arange(pixels)[None, None] - first
    return ((away >= 0) & (away < cell)) / cell.astype(jnp.float32)

  return jnp.einsum('srh,hwk,scw->srck', shares(0), picture, shares(1), precision=jax.lax.Precision.HIGHEST)


class GlimpseNetwork(nn.Module):
  """h_t = ReLU(W h_{t-1} + V g_t), g_t of the retina and the location; l_{t+1} ~ N(tanh(U h_t), deviation²).

  Mnih et al. 2014, section 3.1: the glimpse network, the core, the location network, and the label after the last
  glimpse. In their section 4 the mean of a location is U h_t; the tanh keeps it in the picture. Nothing of the policy
  or of the baseline sends gradients into h.

  Attributes:
    labels: how many.
    glimpses: T.
    size, scales: of the retina, see `retina`.
    hidden, features: widths of what the retina and the location become, and of g and h.
    deviation: of a location, in units of half a picture.
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
    """pictures [B, height, width, C] from 0 to 1; first [B, 2], the first location. Draws from the rng 'attention'."""
    layer = lambda features, name: Dense(features, dtype=self.dtype, name=name)
    seen, placed = layer(self.hidden, 'seen'), layer(self.hidden, 'placed')
    what, where, core = (layer(self.features, name) for name in ('what', 'where', 'core'))
    inputs, policy, expect = layer(self.features, 'inputs'), layer(2, 'policy'), layer(1, 'baseline')
    location, h = first, jnp.zeros((len(pictures), self.features), self.dtype)
    density, locations, densities, baselines = jnp.zeros(len(pictures)), [], [], []
    for step in range(self.glimpses):
      expected = expect(jax.lax.stop_gradient(h))[:, 0].astype(jnp.float32)
      locations, densities, baselines = [*locations, location], [*densities, density], [*baselines, expected]
      patches = jax.vmap(lambda picture, at: retina(picture, at, self.size, self.scales))(pictures, location)
      of_retina = nn.relu(seen(patches.reshape(len(pictures), -1)))
      g = nn.relu(what(of_retina) + where(nn.relu(placed(location))))
      h = nn.relu(core(h) + inputs(g))
      if step + 1 < self.glimpses:
        location, density = self._next(jnp.tanh(policy(jax.lax.stop_gradient(h)).astype(jnp.float32)), deterministic)
    logits = layer(self.labels, 'labels')(h).astype(jnp.float32)
    return GlimpseNetworkOutput(logits, *(jnp.stack(x, 1) for x in (locations, densities, baselines)))

  def _next(self, mean: jax.Array, deterministic: bool) -> tuple[jax.Array, jax.Array]:
    """A location around its mean, and its log-density; the mean itself where nothing is drawn."""
    if deterministic:
      return mean, jnp.zeros(len(mean))
    noise = jax.random.normal(self.make_rng('attention'), mean.shape)
    drawn = jax.lax.stop_gradient(mean + self.deviation * noise)
    away = (drawn - mean) / self.deviation
    return drawn.clip(-1, 1), -jnp.sum(away**2 / 2 + jnp.log(self.deviation * jnp.sqrt(2 * jnp.pi)), -1)


@dataclasses.dataclass(frozen=True)
class GlimpseConfig:
  """The fields of `config.model` and their defaults.

  Attributes as in GlimpseNetwork, and samples: ways of looking at each picture of a batch while training.
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
