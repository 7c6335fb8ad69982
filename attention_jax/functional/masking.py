"""Masks: bool, True = may be attended to."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int


def padding_mask(lengths: Int[ArrayLike, '...'], size: int) -> Bool[Array, '... S']:
  """True for the first `lengths` of `size` positions."""
  lengths = jnp.asarray(lengths)
  return jnp.arange(size).reshape((1,) * lengths.ndim + (size,)) < lengths[..., None]


def causal_mask(size: int) -> Bool[Array, 'T S']:
  """True where position s is not after query t."""
  return window_mask(size, size, 0)


def window_mask(size: int, left: int, right: int, at: Int[Array, 'T'] | None = None) -> Bool[Array, 'T S']:
  """True where t - left <= s <= t + right. The queries stand at `at`; by default, one at each of `size` positions."""
  offset = relative_positions(jnp.arange(size) if at is None else at, size)
  return (-left <= offset) & (offset <= right)


def relative_positions(at: Int[Array, 'T'], size: int) -> Int[Array, 'T S']:
  """s - t of queries at `at` and the positions 0 ... size - 1."""
  return jnp.arange(size)[None, :] - at[:, None]


def combine_masks(*masks: Bool[Array, '...'] | None) -> Bool[Array, '...'] | None:
  """Logical and of all masks that are not None, broadcast against each other; None if there are none."""
  given = [jnp.asarray(m) for m in masks if m is not None]
  if not given:
    return None
  rank = max(m.ndim for m in given)
  return functools.reduce(operator.and_, (m.reshape((1,) * (rank - m.ndim) + m.shape) for m in given))


def zero_masked(array: Array, mask: Bool[Array, '...'] | None) -> Array:
  """`array` with exact zeros where the mask is False, whatever stood there, and no gradient from there.

  The mask may lack trailing axes of the array.
  """
  if mask is None:
    return array
  mask = mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
  return jnp.where(mask, array, jnp.zeros((), array.dtype))


def masked_mean(x: Array, mask: Bool[Array, '...']) -> Array:
  """The mean [B, D] of x [B, S, D] over what mask [B, S] shows; zeros where it shows nothing."""
  return zero_masked(x, mask).sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1).astype(x.dtype)


def accumulation_dtype(*arrays: Array):
  """The dtype in which sums of `arrays` are kept: float32, or float64 if any of them is."""
  return jnp.float64 if any(jnp.asarray(a).dtype == jnp.float64 for a in arrays) else jnp.float32


def at_least_float32(scores: Float[Array, '...']) -> Float[Array, '...']:
  """Weights are float32 even when everything else is bfloat16; float64 stays float64."""
  return jnp.asarray(scores).astype(accumulation_dtype(scores))


def vary_like(start, *given):
  """`start`, the constants a loop over `given` starts from, typed as varying over the mesh axes that `given` does.

  shard_map asks for it: a loop's carry must come out with the type it went in with.
  """
  axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(given)))
  return jax.lax.pcast(start, tuple(axes), to='varying') if axes else start


def min_finite(dtype) -> jax.Array:
  """The most negative finite number: what a masked score counts as in a maximum or a sort."""
  return jnp.asarray(jnp.finfo(dtype).min, dtype)
