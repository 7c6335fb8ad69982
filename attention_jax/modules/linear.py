"""Linear layers over arrays of any rank, as one product of two matrices.

A product over several leading axes is equally fast, but its gradient with respect to the kernel is slow: XLA for CPU
first copies the whole input into another order.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.masking import vary_alike
from attention_jax.kernels.target import is_traced_for_counting, kernel_platform


def product(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
  """x [..., D] @ kernel [D, F] -> [..., F], summed in float32 or a higher precision.

  If x and kernel have the same dtype of less than 32 bits, the cotangent is rounded to it as well, and forward-mode
  differentiation (jax.jvp) is not supported.

  Args:
    x: inputs, [..., D].
    kernel: kernel, [D, F].
    dtype: dtype of the result, which is rounded once; by default the common dtype of x and kernel.

  Returns:
    The product, [..., F].
  """
  dtype = jnp.dtype(dtype or jnp.result_type(x, kernel))
  flat = x.reshape(-1, x.shape[-1])
  is_low_precision = x.dtype == kernel.dtype and jnp.finfo(x.dtype).bits < 32
  if is_low_precision:
    y = _low_precision_product(*vary_alike((flat, kernel)), dtype)
  else:
    y = jnp.matmul(flat, kernel, preferred_element_type=dtype)
  return y.reshape(*x.shape[:-1], kernel.shape[-1])


def product_with_transpose(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """x [N, F] @ kernelᵀ, kernel [D, F] -> [N, D], summed in float32 or a higher precision.

  It is computed as one contraction of the last axes, because XLA for CPU computes the product with a transposed matrix
  of 16-bit numbers in float32, which takes two to five times as long.

  Args:
    x: [N, F].
    kernel: [D, F], of the dtype of x.

  Returns:
    The product, of the dtype of x.
  """
  last_axes = (((1,), (1,)), ((), ()))
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  return jax.lax.dot_general(x, kernel, last_axes, preferred_element_type=dtype).astype(x.dtype)


def _matmul_with_float32_sums(left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """left @ right; CPUs multiply 16-bit numbers natively only if 32-bit sums are requested."""
  return jnp.matmul(left, right, preferred_element_type=jnp.float32).astype(dtype)


def _low_precision_forward(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype):
  return _matmul_with_float32_sums(x, kernel, dtype), (x, kernel)


def _low_precision_backward(dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array):
  x, kernel = residuals
  cotangent = cotangent.astype(x.dtype)
  return product_with_transpose(cotangent, kernel), sum_outer_products(x, cotangent, kernel.dtype)


_low_precision_product = jax.custom_vjp(_matmul_with_float32_sums, nondiff_argnums=(2,))
_low_precision_product.defvjp(_low_precision_forward, _low_precision_backward)


def sum_outer_products(left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Σ_n left_nd right_nf, summed in float32 or a higher precision.

  Args:
    left: [N, D].
    right: [N, F].
    dtype: dtype of the result.

  Returns:
    The sum, [D, F].
  """
  if jnp.finfo(left.dtype).bits >= 32:
    return jnp.matmul(left.T, right, preferred_element_type=dtype)
  if kernel_platform() == 'cpu' and not is_traced_for_counting():
    return _sum_outer_products_on_cpu(left, right, dtype)
  return _matmul_with_float32_sums(left.T, right, dtype)


def _sum_outer_products_on_cpu(left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """`sum_outer_products` of 16-bit numbers.

  XLA for CPU merges a transposition of an operand into the product, and then computes it in float32, at a fifth to a
  half of the rate. A separate transposition is slow too, because it moves one number at a time. This function
  transposes by a product with the identity, which is exact for finite numbers and faster, although it costs as many
  multiplications as the sum if left and right are equally wide.
  """
  if left.shape[1] > right.shape[1]:
    return _sum_outer_products_on_cpu(right, left, dtype).T
  transposed = product_with_transpose(jnp.eye(left.shape[1], dtype=left.dtype), left)
  # Without the barrier, XLA merges a transposition of the result, such as that of a tied embedding, into a product of
  # 16-bit numbers for which it has no kernel.
  return jax.lax.optimization_barrier(_matmul_with_float32_sums(transposed, right, dtype))


def add_bias(y: jax.Array, bias: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Adds a bias in float32 or a higher precision.

  Its gradient, a sum over all rows, is then computed in this precision too: a 16-bit sum would lose most small terms.

  Args:
    y: [..., F].
    bias: [F].
    dtype: dtype of the result, which is rounded once.

  Returns:
    The sum, [..., F].
  """
  y, bias = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (y, bias))
  return (y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)).astype(dtype)


class Dense(nn.Module):
  """Linear layer x [..., D] -> [..., F], with the parameters and initialisers of nn.Dense.

  Attributes:
    features: width of the output, F.
    use_bias: whether to add a bias.
    dtype: dtype of the computation and of the output.
    kernel_init: initialiser of the kernel [D, F].
  """

  features: int
  use_bias: bool = True
  dtype: jnp.dtype = jnp.float32
  kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.param('kernel', self.kernel_init, (x.shape[-1], self.features)).astype(self.dtype)
    x = x.astype(self.dtype)
    if not self.use_bias:
      return product(x, kernel)
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    return add_bias(product(x, kernel, jnp.promote_types(self.dtype, jnp.float32)), bias, self.dtype)


class ConcatDense(nn.Module):
  """A linear layer over the concatenation of parts [..., D1], [..., D2], ...

  The other axes of the parts are broadcast, without copies of the parts.
  """

  features: int
  use_bias: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, *parts: jax.Array) -> jax.Array:
    sizes = [part.shape[-1] for part in parts]
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (sum(sizes), self.features)).astype(self.dtype)
    start = 0
    total = 0.0
    for part, size in zip(parts, sizes, strict=True):
      total = total + product(part.astype(self.dtype), kernel[start : start + size])
      start += size
    if self.use_bias:
      total = add_bias(total, self.param('bias', nn.initializers.zeros, (self.features,)), self.dtype)
    return total
