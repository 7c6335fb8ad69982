"""Content- and location-based addressing of a memory, and writing to it: Graves, Wayne & Danihelka 2014 (NTM)."""

import functools
import math

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Float, Int
from attention_jax.functional.dense import Mask, Scores, Weights, check_single_query, softmax
from attention_jax.functional.masking import at_least_float32, zero_masked


@check_single_query
def addressing(
  scores: Scores,
  mask: Mask,
  *,
  query: Float[Array, ' Dq'],
  previous: Scores,
  strength: Float[Array, ' Dq'],
  gate: Float[Array, ' Dq'],
  power: Float[Array, ' Dq'],
  shift: Float[Array, 'K Dq'],
  strength_bias: Float[Array, ''],
  gate_bias: Float[Array, ''],
  power_bias: Float[Array, ''],
  shift_bias: Float[Array, ' K'],
) -> Weights:
  """w ∝ (s ∗ (g softmax(β e) + (1 - g) w'))^γ: content or previous weights, shifted and sharpened. Graves et al. 2014.

  Equations 5 and 7 to 9; with the score `cosine(beta=1.0)` (equation 6) this is the whole of section 3.3. e are the
  scores, and w' the weights of the previous query. As long as nothing has been attended to (w' = 0), g is 1.

  The other symbols are functions of the query q, with biases that are omitted here: β = ζ(strengthᵀ q), g = σ(gateᵀ q),
  γ = 1 + ζ(powerᵀ q), and s = softmax(shift q) over shifts by -⌊K/2⌋ ... ⌊K/2⌋ positions, without the last one if K is
  even. ζ is softplus, and ∗ is the circular convolution of `shift_weights`.
  """
  scores = at_least_float32(scores)
  query = at_least_float32(query)

  def linear(weight: Array, bias: Array) -> Array:
    product = jnp.einsum('...d,d->...', at_least_float32(weight), query, precision='highest')
    return (product + at_least_float32(bias)).astype(scores.dtype)

  # Products of larger numbers could overflow, and so could their gradients. A clipped number gets no gradient.
  limit = math.sqrt(jnp.finfo(scores.dtype).max)
  beta = jnp.minimum(jax.nn.softplus(linear(strength, strength_bias)), limit)
  content = softmax(beta * jnp.clip(scores, -limit, limit), mask)
  previous = zero_masked(previous.astype(scores.dtype), mask)
  interpolation = jnp.where(previous.any(), jax.nn.sigmoid(linear(gate, gate_bias)), 1.0)
  shifts = jax.nn.softmax(linear(shift, shift_bias))
  weights = shift_weights(interpolation * content + (1 - interpolation) * previous, mask, shifts)
  # At this power, any weight below the largest one vanishes: a greater power would only make gradients overflow.
  max_power = 1e3 / jnp.finfo(scores.dtype).eps
  return sharpen(weights, jnp.minimum(1 + jax.nn.softplus(linear(power, power_bias)), max_power))


def shift_weights(weights: Weights, mask: Mask, shifts: Float[Array, ' K']) -> Weights:
  """Circular convolution Σ_k shifts[k] weights[s - k + ⌊K/2⌋]. Graves et al. 2014, equation 8.

  The circle runs from the first to the last unmasked position. Weight that would reach a masked position in between is
  dropped. If this would leave no weight, the weights are returned unshifted.

  Args:
    weights: the weights before the shift.
    mask: True = may be attended to.
    shifts: the probability of each shift, from -⌊K/2⌋ positions upwards.

  Returns:
    The weights after the shift, which sum to less than 1 if weight was dropped.
  """
  size = mask.shape[0]  # not len(), which raises TypeError for the symbolic size of an exported function
  positions = jnp.arange(size)
  first = jnp.min(jnp.where(mask, positions, size))
  last = jnp.max(jnp.where(mask, positions, -1))
  centre = len(shifts) // 2

  def rotate(x: Weights, step: int, source: Int[Array, ''], target: Int[Array, '']) -> Weights:
    """Moves x by one position, and its entry at `source` to `target`."""
    # Not a gather, whose gradient adds one number at a time on a CPU.
    wrapped = jnp.sum(jnp.where(positions == source, x, 0.0))
    return jnp.where(positions == target, wrapped, jnp.roll(x, step))

  total = shifts[centre] * weights
  right = weights
  left = weights
  for k in range(1, centre + 1):
    right = rotate(right, 1, source=last, target=first)
    left = rotate(left, -1, source=first, target=last)
    total = total + shifts[centre - k] * left
    if centre + k < len(shifts):
      total = total + shifts[centre + k] * right
  total = zero_masked(total, mask)
  return jnp.where(total.any(), total, weights)


def sharpen(weights: Weights, power: Float[Array, '']) -> Weights:
  """weights^power / Σ weights^power, and 0 if all weights are 0. Graves et al. 2014, equation 9."""
  largest = weights.max()
  relative = weights / jnp.where(largest > 0, largest, 1.0)
  # Double where: the gradient of log is infinite at 0, and at numbers whose reciprocal overflows.
  is_safe = relative > jnp.finfo(relative.dtype).tiny
  powers = jnp.where(is_safe, jnp.exp(power * jnp.log(jnp.where(is_safe, relative, 1.0))), 0.0)
  total = powers.sum()
  # Not maximum(total, 1), whose gradient is halved where both are equal.
  return powers / jnp.where(total > 0, total, 1.0)


def write_memory(
  memory: Float[Array, 'S D'], weights: Float[Array, 'H S'], erase: Float[Array, 'H D'], add: Float[Array, 'H D']
) -> Float[Array, 'S D']:
  """M Π_h (1 - w_h e_hᵀ) + Σ_h w_h a_hᵀ for H write heads. Graves et al. 2014, equations 3 and 4.

  All heads erase before any head adds, so that the result does not depend on their order.

  Args:
    memory: M, the memory before the heads write.
    weights: w, the position weights of each head.
    erase: e, the share that each head erases, from 0 to 1.
    add: a, the vector that each head adds.

  Returns:
    The memory after all heads have written.
  """
  # reduce, because the gradient of jnp.prod is slow.
  retained = functools.reduce(jnp.multiply, 1 - weights[:, :, None] * erase[:, None])
  return memory * retained + jnp.einsum('hs,hd->sd', weights, add)
