"""Deep recurrent attention model of several objects in one picture. Ba, Mnih & Kavukcuoglu 2015."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.modules.linear import Dense
from attention_jax.modules.recurrent import RecurrentCell, State, zero_state
from attention_jax.specs import Positive, Repeats, Size
from attention_jax.systems.glimpsing.glimpses import GlimpseNetworkOutput, retina, sample_location


class DeepGlimpseNetwork(nn.Module):
  """Two LSTM layers read glimpses; the lower one emits a label per object, the upper one the next location.

  Ba, Mnih & Kavukcuoglu 2015, section 3: g = G_image(x) * G_loc(l) with x the patches at l, r¹ = LSTM(g), r² =
  LSTM(r¹), the next l ~ N(tanh(U r²), deviation²), and after every `glimpses` glimpses a label from r¹. The context,
  the picture resized to `size` x `size` pixels, determines the initial state of r² alone: labels depend on it only
  through the locations. The first location is an input, as in GlimpseNetwork, and G_image has one hidden layer.

  Attributes:
    labels: number of labels, L.
    objects: number of objects, K.
    glimpses: number of glimpses of each object.
    size: side of the finest patch in pixels, see `retina`.
    scales: number of patches, see `retina`.
    hidden: width of the layer of the patches.
    features: width of g and of both LSTM layers.
    deviation: standard deviation of a location, in units of half a picture.
    dtype: dtype of the computation.
  """

  attention_kind = 'hard, by glimpses'  # for the log of a run
  labels: int
  objects: int = 1
  glimpses: Repeats = 6
  size: Size = 8
  scales: Size = 1
  hidden: Size = 128
  features: Size = 256
  deviation: Positive = 0.15
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    def layer(features):
      return Dense(features, dtype=self.dtype)

    self.patch = layer(self.hidden)
    self.what = layer(self.features)
    self.where = layer(self.features)
    self.context = layer(self.features)
    self.reader = RecurrentCell('lstm', self.features, self.dtype)
    self.mover = RecurrentCell('lstm', self.features, self.dtype)
    self.policy = layer(2)
    self.baseline = layer(1)
    self.classifier = layer(self.labels)

  def __call__(self, pictures: jax.Array, first: jax.Array, deterministic: bool = True) -> GlimpseNetworkOutput:
    """Classifies the objects of pictures; locations are sampled with the rng 'attention'.

    Args:
      pictures: [B, height, width, C], from 0 to 1.
      first: the first location [B, 2].
      deterministic: whether locations are the means of the policy instead of samples.

    Returns:
      GlimpseNetworkOutput with logits [B, K, L] and T = K times `glimpses` locations.
    """
    reader_state, mover_state = self._first_states(pictures)
    location = first
    log_density = jnp.zeros(len(pictures))
    steps = []
    logits = []
    for number in range(1, self.objects * self.glimpses + 1):
      # The loss of the baseline trains the layer of the baseline alone.
      expected_reward = self.baseline(jax.lax.stop_gradient(mover_state[0]))[:, 0].astype(jnp.float32)
      steps.append((location, log_density, expected_reward))
      reader_state = self.reader(reader_state, self.reader.project(self._glimpse(pictures, location)))
      mover_state = self.mover(mover_state, self.mover.project(reader_state[0]))
      if number % self.glimpses == 0:
        logits.append(self.classifier(reader_state[0]).astype(jnp.float32))
      mean = jnp.tanh(self.policy(mover_state[0]).astype(jnp.float32))
      rng = None if deterministic else self.make_rng('attention')
      location, log_density = sample_location(mean, self.deviation, rng)
    columns = (jnp.stack(column, axis=1) for column in zip(*steps, strict=True))
    return GlimpseNetworkOutput(jnp.stack(logits, axis=1), *columns)

  def _first_states(self, pictures: jax.Array) -> tuple[State, State]:
    """Returns the initial states: zeros for r¹, and for r² a function of the resized picture."""
    zeros = zero_state('lstm', len(pictures), self.features, self.dtype)
    shape = (len(pictures), self.size, self.size, pictures.shape[-1])
    coarse = jax.image.resize(pictures, shape, 'linear')
    return zeros, (jnp.tanh(self.context(coarse.reshape(len(pictures), -1))), zeros[1])

  def _glimpse(self, pictures: jax.Array, location: jax.Array) -> jax.Array:
    """Returns g [B, F] of a location [B, 2]."""
    patches = jax.vmap(lambda picture, place: retina(picture, place, self.size, self.scales))(pictures, location)
    patch_features = nn.relu(self.patch(patches.reshape(len(pictures), -1)))
    return nn.relu(self.what(patch_features)) * nn.relu(self.where(location))
