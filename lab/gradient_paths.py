"""The gradient that reaches each source position from each target position, and how it depends on their distance.

Without attention, it passes through every step of both recurrences between the two (Hochreiter & Schmidhuber 1997;
Bengio, Simard & Frasconi 1994); attention joins each pair of positions by one step (Bahdanau, Cho & Bengio 2015).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from attention_jax.analysis.interventions import AnalysedPair, source_vectors, with_vectors
from attention_jax.errors import UserError
from attention_jax.functional.masking import at_least_float32
from attention_jax.models.encoder_decoder import EncoderDecoder


def gradient_norms(outputs: Callable[[jax.Array], jax.Array], inputs: jax.Array) -> jax.Array:
  """Returns ‖∂ yₜ / ∂ xₛ‖₂ for every pair of positions.

  Args:
    outputs: a function from inputs [S, D] to one number y for each target position, [T].
    inputs: x, [S, D].

  Returns:
    The norms, [T, S].
  """
  return jnp.linalg.norm(jax.jacrev(outputs)(inputs), axis=-1)


def source_gradients(
  model: EncoderDecoder, params: Any, source: jax.Array, source_mask: jax.Array, target: jax.Array
) -> jax.Array:
  """Returns the norm of the gradient of the logit of each target token with respect to each source embedding.

  The logit is that of the reference token minus the mean of all logits. Unlike the log-probability, it has a gradient
  that does not vanish as the model becomes certain.

  Args:
    model: a model that embeds tokens. Its logits must not be log-probabilities: its output layer does not copy, and its
      alignment is not latent.
    params: its parameters.
    source: source ids, [S].
    source_mask: True at real positions, [S].
    target: target ids, [T].

  Returns:
    The norms, [T, S].
  """
  pair = AnalysedPair(model, params, source, target)

  def outputs(vectors: jax.Array) -> jax.Array:
    changed = with_vectors(pair, vectors)
    inputs = (source[None], source_mask[None], target[None])
    logits = changed.model.apply({'params': changed.params}, *inputs).logits[0]
    reference = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    return reference - logits.mean(-1)

  return gradient_norms(outputs, at_least_float32(source_vectors(pair)))


def recurrent_distances(source_length: int, target_length: int) -> np.ndarray:
  """Returns the least number of recurrent steps from each source position to each target position, [T, S].

  This holds for an encoder of one layer that reads in both directions, and a decoder that starts from the last states
  of both: position s has min(s, S - 1 - s) steps to the nearer end, and target position t is the (t + 1)-th step of
  the decoder.

  Args:
    source_length: S, EOS included.
    target_length: T.
  """
  source = np.arange(source_length)
  to_end = np.minimum(source, source_length - 1 - source)
  return to_end[None, :] + np.arange(1, target_length + 1)[:, None]


def rms_by_distance(distances: np.ndarray, norms: np.ndarray, min_count: int = 1) -> dict[int, float]:
  """Returns the root mean square of the norms at each distance, in order.

  Args:
    distances: whole numbers.
    norms: the norms, an array of the same shape.
    min_count: minimum number of norms at a distance; distances with fewer are left out.

  Raises:
    UserError: for different shapes.
  """
  distances = np.asarray(distances)
  norms = np.asarray(norms, float)
  if distances.shape != norms.shape:
    raise UserError(
      f'distances and norms must have the same shape, got {list(distances.shape)} and {list(norms.shape)}'
    )
  values, counts = np.unique(distances, return_counts=True)
  return {
    int(distance): float(np.sqrt(np.mean(norms[distances == distance] ** 2)))
    for distance in values[counts >= min_count]
  }


def factor_per_step(means: dict[int, float]) -> float:
  """Returns the factor by which the gradient changes with each step of distance: 1 if distance has no effect.

  It is the exponential of the slope of log(mean) by distance, fitted by least squares.

  Args:
    means: distance -> mean norm, all positive; at least two distances.
  """
  slope = scipy.stats.linregress(list(means), np.log(list(means.values()))).slope
  return float(np.exp(slope))
