"""Linear layers over arrays of any rank, as one product of two matrices.

A product that leaves several axes in place is no slower itself, but its gradient to the kernel is: compilers for CPUs
copy the whole input into another order first.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp


def product(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """x [..., D] @ kernel [D, F] -> [..., F], of `dtype` where it is given: no more is rounded than that."""
  found = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=dtype)
  return found.reshape(*x.shape[:-1], kernel.shape[-1])


def _of_last_axis(x, kernel, dimensions, precision=None, preferred_element_type=None):
  """`product` with the signature of jax.lax.dot_general, as nn.Dense calls it."""
  del dimensions, precision, preferred_element_type
  return product(x, kernel)


Dense = functools.partial(nn.Dense, dot_general=_of_last_axis)


class Joined(nn.Module):
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
