"""Linear layers over arrays of any rank, as one product of two matrices.

A product that leaves several axes in place is no slower itself, but its gradient to the kernel is: compilers for CPUs
copy the whole input into another order first.
"""

import functools

import flax.linen as nn
import jax


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x [..., D] @ kernel [D, F] -> [..., F]."""
  return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


def _of_last_axis(x, kernel, dimensions, precision=None, preferred_element_type=None):
  """`product` with the signature of jax.lax.dot_general, as nn.Dense calls it."""
  del dimensions, precision, preferred_element_type
  return product(x, kernel)


Dense = functools.partial(nn.Dense, dot_general=_of_last_axis)
