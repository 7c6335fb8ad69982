"""Top-k and logsumexp over a large vocabulary, by blocks.

On CPUs each pass over the logits of a step costs as much as a layer. The logits are copied once, into an array of whole
blocks, and read twice: for the maximum of each block, and for the sum of exponentials. Top-k then reads a few blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.masking import at_least_float32

BLOCK = 64  # tokens per block


def pad_to_blocks(logits: jax.Array) -> jax.Array:
  """Pads logits [..., V] with -inf up to a multiple of BLOCK; those of 16 bits become float32, as sums need."""
  logits = at_least_float32(logits)
  missing = -logits.shape[-1] % BLOCK
  return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def block_maxima(padded: jax.Array) -> jax.Array:
  """Returns the maxima [..., V / BLOCK] of the blocks of padded logits [..., V]."""
  return padded.reshape(*padded.shape[:-1], -1, BLOCK).max(-1)


def log_sum_exp(logits: jax.Array) -> jax.Array:
  """log Σ exp of logits [..., V] -> [...]; -inf where all of them are."""
  padded = pad_to_blocks(logits)
  maximum = block_maxima(padded).max(-1, keepdims=True)
  maximum = jnp.where(jnp.isfinite(maximum), maximum, 0.0)  # -inf minus -inf would be NaN
  return jnp.log(jnp.exp(padded - maximum).sum(-1)) + maximum[..., 0]


def masked_top_k(logits: jax.Array, allowed: np.ndarray, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the largest of the allowed logits, the smaller id first in a tie; one pass of maxima replaces a sort.

  Only blocks with the largest maxima can hold the results. If the maximum of a block is not allowed, the block may hold
  no result, so one more block is searched for each block with ids that are not allowed.

  Args:
    logits: [..., V], or padded by `pad_to_blocks`.
    allowed: [V] bool.
    count: number of results; V if V is smaller.

  Returns:
    values [..., count], -inf where fewer logits are allowed, and ids [..., count].
  """
  padded = pad_to_blocks(logits)
  size = len(allowed)
  maxima = block_maxima(padded)
  extra_blocks = len(set(np.flatnonzero(~allowed) // BLOCK))
  _, blocks = jax.lax.top_k(maxima, min(count + extra_blocks, maxima.shape[-1]))
  blocks = jnp.sort(blocks, axis=-1)  # keeps the first of equal logits first
  offsets = jnp.arange(BLOCK).reshape((1,) * logits.ndim + (BLOCK,))
  ids = (blocks[..., None] * BLOCK + offsets).reshape(*blocks.shape[:-1], -1)
  allowed = jnp.asarray(np.pad(allowed, (0, padded.shape[-1] - size)))
  candidates = jnp.where(allowed[ids], jnp.take_along_axis(padded, ids, axis=-1), -jnp.inf)
  values, indices = jax.lax.top_k(candidates, min(count, size))
  return values, jnp.take_along_axis(ids, indices, axis=-1).astype(jnp.int32)
