"""Attributions: how much each input position contributes to each output, from gradients and from removal.

Each takes a function of the inputs of one example, or of their mask, and returns one number for each output and each
position.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention_jax.functional.masking import at_least_float32, zero_masked


def gradient_times_input(fn: Callable[[jax.Array], jax.Array], inputs: jax.Array) -> jax.Array:
  """Σ_d xₛ_d ∂yₜ/∂xₛ_d. Denil, Demiraj & de Freitas 2014.

  Args:
    fn: inputs [S, D] -> outputs [T].
    inputs: the vectors of the input positions.

  Returns:
    [T, S].
  """
  return jnp.einsum('tsd,sd->ts', jax.jacrev(fn)(inputs), inputs)


def integrated_gradients(
  fn: Callable[[jax.Array], jax.Array], inputs: jax.Array, baseline: jax.Array | None = None, steps: int = 32
) -> jax.Array:
  """Σ_d (xₛ_d - x'ₛ_d) ∫₀¹ ∂yₜ(x' + α(x - x'))/∂xₛ_d dα. Sundararajan, Taly & Yan 2017, equation 1.

  The integral is a sum over the centres of `steps` intervals with ends (i / steps)⁴, in float32 or float64. They are
  short near x': a model that normalises its inputs changes most there if x' is zero. Attributions to all positions sum
  to y(x) - y(x') up to the error of that sum.

  Args:
    fn: inputs [S, D] -> outputs [T].
    inputs: x, the vectors of the input positions.
    baseline: x', [S, D]; zeros by default.
    steps: number of points.

  Returns:
    [T, S].
  """
  baseline = at_least_float32(jnp.zeros_like(inputs) if baseline is None else baseline)
  difference = at_least_float32(inputs) - baseline

  def add(total, interval):
    low, high = interval
    point = (baseline + (low + high) / 2 * difference).astype(inputs.dtype)
    return total + (high - low) * jax.jacrev(fn)(point).astype(total.dtype), None

  start = jnp.zeros((*jax.eval_shape(fn, inputs).shape, *inputs.shape), difference.dtype)
  ends = (jnp.arange(steps + 1, dtype=difference.dtype) / steps) ** 4
  total, _ = jax.lax.scan(add, start, (ends[:-1], ends[1:]))
  return jnp.einsum('tsd,sd->ts', total, difference)


def leave_one_out(fn: Callable[[jax.Array], jax.Array], mask: jax.Array) -> jax.Array:
  """yₜ(all positions) - yₜ(all positions but s). Li, Monroe & Jurafsky 2016; Jain & Wallace 2019, section 4.1.

  Args:
    fn: mask [S] -> outputs [T]; a function of the positions where the mask is True.
    mask: the real positions; one is left out by masking it. Attention keeps the positions of the others; a recurrent
      encoder that sorts padding to the end reads them without a gap.

  Returns:
    [T, S]; 0 at masked positions.
  """
  without = mask[None, :] & ~jnp.eye(mask.size, dtype=bool)
  return zero_masked(fn(mask)[None, :] - jax.lax.map(fn, without), mask).T
