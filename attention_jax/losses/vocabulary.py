"""The cross entropy of a linear layer over a large vocabulary, without the logits of a whole batch.

Steps of the batch are worked through a few at a time: logits, their softmax, and at once what they say to the gradient.
No logits are kept, and none are computed twice. `losses.cross_entropy` of all logits says what is right.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention_jax.functional.masking import vary_like
from attention_jax.kernels.sharding import batch_mesh_axis
from attention_jax.modules.linear import product, sum_outer_products
from attention_jax.modules.outputs import LinearLogits

MAX_LOGITS = 2**21  # at a time: they stay in the cache of a core, and no device is too small for them


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear_cross_entropy(linear: LinearLogits, target: jax.Array, mask: jax.Array, smoothing: float) -> tuple:
  """(loss, accuracy) as sums over real tokens, as losses.cross_entropy has them of linear.logits().

  Args: linear, features [B, T, D]; target [B, T]; mask [B, T], True = real. Only the loss has a gradient.
  """
  return _over_steps(linear, target, mask, smoothing, False)[0]


def _forward(linear, target, mask, smoothing):
  return _over_steps(linear, target, mask, smoothing, True)


def _backward(smoothing, gradient, cotangents):
  scale = cotangents[0]
  return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient), None, None


linear_cross_entropy.defvjp(_forward, _backward)


def _over_steps(linear: LinearLogits, target, mask, smoothing, differentiate: bool):
  """(loss, accuracy), and the gradient of the loss with respect to `linear` or None."""
  axis = batch_mesh_axis(len(target))
  if axis is None:
    return _of_rows(linear, target, mask, smoothing, differentiate)

  # Otherwise the steps of the loop would add up the kernel's gradient over devices, each of them.
  def on_each(linear, target, mask):
    sums, gradient = _of_rows(linear, target, mask, smoothing, differentiate)
    add = functools.partial(jax.lax.psum, axis_name=axis)
    return add(sums), gradient and LinearLogits(gradient.features, *add((gradient.kernel, gradient.bias)))

  rows, whole = PartitionSpec(axis), PartitionSpec()
  split = LinearLogits(rows, whole, whole)
  found = whole, split if differentiate else None
  return jax.shard_map(on_each, in_specs=(split, rows, rows), out_specs=found, check_vma=False)(linear, target, mask)


def _of_rows(linear: LinearLogits, target, mask, smoothing, differentiate: bool):
  """As `_over_steps`, of rows that are on one device."""
  features, kernel, bias = linear
  batch, steps, vocabulary = *target.shape, kernel.shape[-1]
  some = min(steps, max(1, MAX_LOGITS // (batch * vocabulary)))
  missing = -steps % some

  def cut(x):
    """[B, T, ...] -> [T / some, some, B, ...]."""
    x = jnp.moveaxis(jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), 1, 0)
    return x.reshape(-1, some, *x.shape[1:])

  def some_steps(total, part):
    sums, to_kernel, to_bias = total
    x, target, mask = (x.reshape(-1, *x.shape[2:]) for x in part)  # one product of two matrices each: modules/linear.py
    logits = jnp.where(mask[..., None], LinearLogits(x, kernel, bias).logits(), 0.0)
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)
    mass = powers.sum(-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, target[..., None], -1)
    losses = jnp.log(mass) + top - (1 - smoothing) * chosen
    if smoothing:
      losses = losses - smoothing * logits.mean(-1, keepdims=True)
    real = mask[..., None]
    # Of equal logits the first is what a search would take. As two maxima: an argmax is not vectorised on CPUs.
    before = jnp.where(jnp.arange(vocabulary)[None] < target[..., None], logits, -jnp.inf).max(-1, keepdims=True)
    right = real & (chosen >= top) & (before < top)
    new = jnp.sum(jnp.where(real, losses, 0.0)), jnp.sum(right, dtype=jnp.float32)
    sums = jax.tree.map(jnp.add, sums, new)
    if not differentiate:
      return (sums, to_kernel, to_bias), ()
    wanted = (1 - smoothing) * (jnp.arange(vocabulary)[None] == target[..., None]) + smoothing / vocabulary
    slope = jnp.where(real, powers / mass - wanted, 0.0).astype(x.dtype)
    to_kernel = to_kernel + sum_outer_products(x, slope, jnp.float32)
    to_bias = to_bias + slope.sum(0, dtype=jnp.float32)
    return (sums, to_kernel, to_bias), product(slope, kernel.astype(x.dtype).T).reshape(part[0].shape)

  nothing = jnp.zeros((), jnp.float32)
  like = lambda x: jnp.zeros(x.shape, jnp.float32) if differentiate else ()
  start = vary_like(((nothing, nothing), like(kernel), like(bias)), linear, target, mask)
  (sums, to_kernel, to_bias), slopes = jax.lax.scan(some_steps, start, (cut(features), cut(target), cut(mask)))
  if not differentiate:
    return sums, None
  to_features = jnp.moveaxis(slopes.reshape(-1, *slopes.shape[2:])[:steps], 0, 1)
  gradient = LinearLogits(to_features, to_kernel.astype(kernel.dtype), to_bias.astype(bias.dtype))
  return sums, gradient
