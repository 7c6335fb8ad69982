"""Linear layers over arrays of any rank, as one product of two matrices.

A product that leaves several axes in place is no slower itself, but its gradient to the kernel is: compilers for CPUs
copy the whole input into another order first.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp


def product(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """x [..., D] @ kernel [D, F] -> [..., F], of `dtype` where it is given: no more is rounded than that.

  Whatever the inputs are, it is summed in float32 at least. Where x and kernel are both of a lower precision, so are
  the factors of its gradients, and it cannot be differentiated forward (jax.jvp).
  """
  dtype, flat = jnp.dtype(dtype or jnp.result_type(x, kernel)), x.reshape(-1, x.shape[-1])
  low = x.dtype == kernel.dtype and jnp.finfo(x.dtype).bits < 32
  found = _low(flat, kernel, dtype) if low else jnp.matmul(flat, kernel, preferred_element_type=dtype)
  return found.reshape(*x.shape[:-1], kernel.shape[-1])


def _summed(left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """CPUs that multiply numbers of 16 bits do so only where the sums are asked for in 32."""
  return jnp.matmul(left, right, preferred_element_type=jnp.float32).astype(dtype)


_low = jax.custom_vjp(_summed, nondiff_argnums=(2,))
_low.defvjp(
  lambda x, kernel, dtype: (_summed(x, kernel, dtype), (x, kernel)),
  lambda dtype, kept, slope: _gradients(*kept, slope),
)


def _gradients(x: jax.Array, kernel: jax.Array, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
  slope = slope.astype(x.dtype)
  return _summed(slope, kernel.T, x.dtype), sum_outer_products(x, slope, kernel.dtype)


def sum_outer_products(left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """left [N, D], right [N, F] -> Σ_n left_nd right_nf [D, F], summed in float32 at least.

  A compiler for CPUs that finds a transpose before a product makes it a part of it, and has such products of 16 bits in
  float32 alone, at half the rate. It does not find one that takes the rows in groups.
  """
  if jnp.finfo(left.dtype).bits >= 32:
    return jnp.matmul(left.T, right, preferred_element_type=dtype)
  rows, features = left.shape
  groups = left.reshape(-1, math.gcd(rows, 8), features)
  return _summed(groups.transpose(2, 0, 1).reshape(features, rows), right, dtype)


def _of_last_axis(x, kernel, dimensions, precision=None, preferred_element_type=None):
  """`product` with the signature of jax.lax.dot_general, as nn.Dense calls it."""
  del dimensions, precision, preferred_element_type
  return product(x, kernel)


Dense = functools.partial(nn.Dense, dot_general=_of_last_axis)


class ConcatDense(nn.Module):
  """A linear layer over parts [..., D1], [..., D2], ... side by side, whose other axes are broadcast, not copied."""

  features: int
  bias: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, *parts: jax.Array) -> jax.Array:
    sizes = [part.shape[-1] for part in parts]
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (sum(sizes), self.features)).astype(self.dtype)
    at, total = 0, 0.0
    for part, size in zip(parts, sizes, strict=True):
      total, at = total + product(part.astype(self.dtype), kernel[at : at + size]), at + size
    if self.bias:
      bias = self.param('bias', nn.initializers.zeros, (self.features,)).astype(self.dtype)
      total = total + bias.reshape((1,) * (total.ndim - 1) + bias.shape)
    return total
