"""Parameters of attention, each with a leading axis of heads: those of a table row, and projections."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.functional.table import Row, init_row_params
from attention_jax.modules.linear import product


class RowParams(nn.Module):
  """Learned parameters of a table row, each with a leading axis of heads."""

  row: Row

  @nn.compact
  def __call__(self, names: Iterable[str], heads: int, **sizes: int) -> dict[str, jax.Array]:
    """Returns the parameters of these names for this number of heads; their shapes depend on `sizes`."""

    def init_heads(rng, name):
      return jax.vmap(lambda rng: init_row_params(rng, self.row, sizes, [name])[name])(jax.random.split(rng, heads))

    return {name: self.param(name, init_heads, name) for name in names}


def project_to_heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Projects x [B, T, D] by a kernel [N, D, F] to [B, N, T, F]."""
  heads, size, features = kernel.shape
  y = product(x, jnp.moveaxis(kernel, 0, 1).reshape(size, heads * features))
  return jnp.moveaxis(y.reshape(*x.shape[:-1], heads, features), -2, 1)


def append_one(x: jax.Array) -> jax.Array:
  """Appends a feature of 1 to x [..., D], the input of a HeadKernel with a bias."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)], constant_values=1)


def group_heads(tree: Any, groups: int, axis: int) -> Any:
  """Splits `axis` of every array of a pytree, N heads, into two axes: G groups and N / G heads of a group.

  Args:
    tree: pytree of arrays.
    groups: number G of heads of keys and values.
    axis: the axis of the heads.
  """

  def group(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])

  return jax.tree.map(group, tree)


class HeadKernel(nn.Module):
  """Kernel [N, D, F] of a linear projection [D] -> [N, F], for an input of D features.

  With a bias, the last feature of the input is 1, and the last row of the kernel is the bias. The initial scale is that
  of one layer D -> N F (Glorot & Bengio 2010), whatever the number of heads.
  """

  heads: int
  features: int
  bias: bool = False

  @nn.compact
  def __call__(self, size: int) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform', in_axis=1, out_axis=(0, 2))
    kernel = self.param('kernel', init, (self.heads, size - self.bias, self.features))
    if not self.bias:
      return kernel
    bias = self.param('bias', nn.initializers.zeros, (self.heads, self.features))
    return jnp.concatenate([kernel, bias[:, None]], axis=1)
