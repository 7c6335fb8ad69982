"""Cross entropy of a linear layer over a large vocabulary, without the logits of a whole batch in memory.

The loop runs over chunks of the steps of a batch. Each iteration computes logits, their softmax and, if differentiated,
their contribution to the gradient. Logits are neither stored nor computed twice. The result equals
`losses.sequence.cross_entropy` of all logits, up to rounding.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention_jax.functional.masking import vary_alike, vary_like
from attention_jax.kernels.sharding import batch_mesh_axis
from attention_jax.modules.linear import product_with_transpose, sum_outer_products
from attention_jax.modules.outputs import LinearLogits

# Logits of a chunk, 8 MiB in float32: few enough for the memory of every device. A chunk has at least one step of the
# batch, even if that has more logits.
MAX_LOGITS = 2**21


def linear_cross_entropy(linear: LinearLogits, target: jax.Array, mask: jax.Array, smoothing: float) -> tuple:
  """Returns the sums (loss, accuracy) of `cross_entropy` for linear.logits(); only the loss has a gradient.

  Args:
    linear: features [B, T, D], kernel [D, V] and bias [V].
    target: [B, T] ids.
    mask: [B, T], True = real.
    smoothing: ε of the label smoothing.
  """
  return _linear_cross_entropy(*vary_alike((linear, target, mask)), smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear_cross_entropy(linear: LinearLogits, target, mask, smoothing: float) -> tuple:
  return _loss_and_gradient(linear, target, mask, smoothing, False)[0]


def _forward(linear, target, mask, smoothing):
  return _loss_and_gradient(linear, target, mask, smoothing, True)


def _backward(smoothing, gradient, cotangents):
  scale = cotangents[0]
  return jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradient), None, None


_linear_cross_entropy.defvjp(_forward, _backward)


def _loss_and_gradient(linear: LinearLogits, target, mask, smoothing, differentiate: bool):
  """(loss, accuracy), and the gradient of the loss with respect to `linear`, or None."""
  axis = batch_mesh_axis(len(target))
  if axis is None:
    return _loss_and_gradient_on_device(linear, target, mask, smoothing, differentiate)

  # Without shard_map, every iteration of the loop would sum the kernel's gradient over the devices.
  def run_shard(linear, target, mask):
    sums, gradient = _loss_and_gradient_on_device(linear, target, mask, smoothing, differentiate)
    add = functools.partial(jax.lax.psum, axis_name=axis)
    return add(sums), gradient and LinearLogits(gradient.features, *add((gradient.kernel, gradient.bias)))

  batch_spec = PartitionSpec(axis)
  replicated = PartitionSpec()
  linear_spec = LinearLogits(batch_spec, replicated, replicated)
  in_specs = (linear_spec, batch_spec, batch_spec)
  out_specs = (replicated, linear_spec if differentiate else None)
  # The compiler partitions the vocabulary over the axis 'tensor'.
  manual = set(jax.sharding.get_abstract_mesh().axis_names) - {'tensor'}
  sharded = jax.shard_map(run_shard, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)
  return sharded(linear, target, mask)


def _loss_and_gradient_on_device(linear: LinearLogits, target, mask, smoothing, differentiate: bool):
  """`_loss_and_gradient` of the rows of one device."""
  features, kernel, bias = linear
  batch, steps = target.shape
  vocabulary = kernel.shape[-1]
  chunk = min(steps, max(1, MAX_LOGITS // (batch * vocabulary)))
  missing = -steps % chunk

  def split_steps(x):
    """[B, T, ...] -> [T / chunk, chunk, B, ...]."""
    x = jnp.moveaxis(jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), 1, 0)
    return x.reshape(-1, chunk, *x.shape[1:])

  def add_chunk(totals, inputs):
    sums, kernel_gradient, bias_gradient = totals
    # Rows are flattened for one product of two matrices, see modules/linear.py.
    x, target, mask = (part.reshape(-1, *part.shape[2:]) for part in inputs)
    logits = jnp.where(mask[..., None], LinearLogits(x, kernel, bias).logits(), 0.0)
    maximum = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - maximum)
    normalizer = powers.sum(-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, target[..., None], -1)
    losses = jnp.log(normalizer) + maximum - (1 - smoothing) * chosen
    if smoothing:
      losses = losses - smoothing * logits.mean(-1, keepdims=True)
    is_real = mask[..., None]
    # Among equal logits the first one counts, as in a search. Two maxima, because CPUs do not vectorise an argmax.
    before = jnp.where(jnp.arange(vocabulary)[None] < target[..., None], logits, -jnp.inf).max(-1, keepdims=True)
    is_correct = is_real & (chosen >= maximum) & (before < maximum)
    chunk_sums = (jnp.sum(jnp.where(is_real, losses, 0.0)), jnp.sum(is_correct, dtype=jnp.float32))
    sums = jax.tree.map(jnp.add, sums, chunk_sums)
    if not differentiate:
      return (sums, kernel_gradient, bias_gradient), ()
    is_target = jnp.arange(vocabulary)[None] == target[..., None]
    labels = (1 - smoothing) * is_target + smoothing / vocabulary
    logit_gradient = jnp.where(is_real, powers / normalizer - labels, 0.0).astype(x.dtype)
    kernel_gradient = kernel_gradient + sum_outer_products(x, logit_gradient, jnp.float32)
    bias_gradient = bias_gradient + logit_gradient.sum(0, dtype=jnp.float32)
    feature_gradient = product_with_transpose(logit_gradient, kernel.astype(x.dtype)).reshape(inputs[0].shape)
    return (sums, kernel_gradient, bias_gradient), feature_gradient

  def zeros_like(x):
    return jnp.zeros(x.shape, jnp.float32) if differentiate else ()

  zero = jnp.zeros((), jnp.float32)
  initial = vary_like(((zero, zero), zeros_like(kernel), zeros_like(bias)), linear, target, mask)
  chunks = (split_steps(features), split_steps(target), split_steps(mask))
  (sums, kernel_gradient, bias_gradient), feature_gradients = jax.lax.scan(add_chunk, initial, chunks)
  if not differentiate:
    return sums, None
  feature_gradient = jnp.moveaxis(feature_gradients.reshape(-1, *feature_gradients.shape[2:])[:steps], 0, 1)
  gradient = LinearLogits(feature_gradient, kernel_gradient.astype(kernel.dtype), bias_gradient.astype(bias.dtype))
  return sums, gradient
