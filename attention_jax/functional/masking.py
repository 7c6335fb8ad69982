"""Masks (bool, True = may be attended to), dtypes of sums, and types of the carries of loops."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import AxisType, PartitionSpec, reshard
from jax.typing import ArrayLike

from attention_jax.annotations import Array, Bool, Float, Int
from attention_jax.errors import UserError

Dimension = Any  # an int, or a symbolic dimension of jax.export


def padding_mask(lengths: Int[ArrayLike, '...'], size: Dimension) -> Bool[Array, '... S']:
  """Returns a mask that is True for the first `lengths` of `size` positions.

  Raises:
    UserError: for lengths that are not whole numbers, or not from 0 to `size`. Values are checked where they are
      known, which excludes arguments of a jitted function.
  """
  check_size('padding_mask', 'size', size)
  lengths = integer_array('padding_mask', 'lengths', lengths)
  if not isinstance(lengths, jax.core.Tracer) and lengths.is_fully_addressable:
    values = np.asarray(lengths)
    if values.size and not 0 <= values.min() <= values.max() <= size:
      raise UserError(f'padding_mask: lengths must be 0 to {size}, the size, got {values.min()} to {values.max()}')
  return jnp.arange(size).reshape((1,) * lengths.ndim + (size,)) < lengths[..., None]


def causal_mask(size: Dimension) -> Bool[Array, 'T S']:
  """Returns a mask [size, size] that is True where position s is not after query t.

  Raises:
    UserError: for a size that is no whole number or is negative.
  """
  check_size('causal_mask', 'size', size)
  return window_mask(size, size, 0)


def window_mask(
  size: Dimension, left: int, right: int, positions: Int[Array, ' T'] | None = None
) -> Bool[Array, 'T S']:
  """Returns a mask that is True where t - left <= s <= t + right.

  Args:
    size: S, the number of positions.
    left: how many positions before its own a query may attend to.
    right: how many positions after its own a query may attend to.
    positions: the position t of each query; by default 0 ... size - 1.
  """
  offset = relative_positions(jnp.arange(size) if positions is None else positions, size)
  return (-left <= offset) & (offset <= right)


def relative_positions(positions: Int[Array, ' T'], size: Dimension) -> Int[Array, 'T S']:
  """Returns s - t for queries at positions t and for all memory positions s = 0 ... size - 1."""
  return jnp.arange(size)[None, :] - positions[:, None]


def check_size(caller: str, name: str, size: Any, smallest: int = 0) -> None:
  """Raises UserError unless `size` is a whole number that is not below `smallest`, or a symbolic dimension."""
  if is_symbolic_dim(size):
    return
  try:
    is_valid = operator.index(size) >= smallest
  except TypeError:  # also of a traced number
    is_valid = False
  if not is_valid:
    raise UserError(f'{caller}: {name} must be a whole number of at least {smallest}, got {size!r}')


def mask_array(caller: str, mask: Any) -> Array:
  """Returns `mask` as an array; raises UserError unless it is bool.

  In a float mask that is added to scores, 0 means the opposite of False.
  """
  return _array_of(caller, 'mask', mask, jnp.bool_, 'bool, True = may be attended to')


def integer_array(caller: str, name: str, x: Any) -> Array:
  """Returns `x` as an array; raises UserError unless it is one of whole numbers."""
  return _array_of(caller, name, x, jnp.integer, 'whole numbers')


def float_array(caller: str, name: str, x: Any) -> Array:
  """Returns `x` as an array; raises UserError unless it is one of floats."""
  return _array_of(caller, name, x, jnp.floating, 'float')


def _array_of(caller: str, name: str, x: Any, dtype: Any, expected: str) -> Array:
  """Returns `x` as an array; raises UserError unless its dtype is a `dtype`, which the message calls `expected`."""
  try:
    array = jnp.asarray(x)
  except (TypeError, ValueError):
    raise UserError(f'{caller}: {name} must be {expected}, got {x!r}') from None
  if not jnp.issubdtype(array.dtype, dtype):
    raise UserError(f'{caller}: {name} must be {expected}, got {array.dtype}')
  return array


def combine_masks(*masks: Bool[Array, '...'] | None) -> Bool[Array, '...'] | None:
  """Returns the logical and of all masks that are not None, broadcast against each other; None if there are none.

  Raises:
    UserError: for masks that are not bool, and for shapes that do not broadcast. Pass a padding mask [B, S] as
      [B, 1, S] to combine it with [T, S].
  """
  arrays = [mask_array('combine_masks', mask) for mask in masks if mask is not None]
  if not arrays:
    return None
  rank = max(array.ndim for array in arrays)
  aligned = [array.reshape((1,) * (rank - array.ndim) + array.shape) for array in arrays]
  for axis in range(rank):
    if len({array.shape[axis] for array in aligned} - {1}) > 1:
      shapes = ', '.join(str(list(array.shape)) for array in arrays)
      raise UserError(
        f'combine_masks: masks {shapes} do not broadcast; pass a padding mask [B, S] as mask[:, None], beside [T, S]'
      )
  return functools.reduce(operator.and_, aligned)


def zero_masked(array: ArrayLike, mask: Bool[ArrayLike, '...'] | None) -> ArrayLike:
  """Returns `array` with exact zeros, and without gradient, where the mask is False, even if it contains NaN there.

  Args:
    array: any array.
    mask: True = keep. It may lack trailing axes of the array. None keeps everything.
  """
  if mask is None:
    return array
  mask = mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
  return jnp.where(mask, array, jnp.zeros((), array.dtype))


def masked_mean(x: ArrayLike, mask: Bool[ArrayLike, '...']) -> Array:
  """Returns the mean [B, D] of x [B, S, D] over the unmasked positions of mask [B, S]; zeros if there are none."""
  return zero_masked(x, mask).sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1).astype(x.dtype)


def accumulation_dtype(*arrays: Array):
  """Returns the dtype for sums of `arrays`: float64 if any of them is float64, otherwise float32."""
  return jnp.float64 if any(jnp.asarray(array).dtype == jnp.float64 for array in arrays) else jnp.float32


def at_least_float32(x: Float[Array, '...']) -> Float[Array, '...']:
  """Casts to float32; float64 stays float64. Weights are float32 even if everything else is bfloat16."""
  return jnp.asarray(x).astype(accumulation_dtype(x))


def share_over_steps(tree: Any) -> Callable[[], Any]:
  """Returns a function that returns `tree`. The step of a scan calls it instead of closing over `tree`.

  The gradient of an array that all steps share is a sum over steps, which in 16 bits loses most of its small terms.
  The gradients of 16-bit arrays that the function returns are added in float32.
  """
  is_narrow = jax.tree.map(lambda x: getattr(x, 'dtype', None) in (jnp.bfloat16, jnp.float16), tree)
  wide = jax.tree.map(lambda x, narrow: x.astype(jnp.float32) if narrow else x, tree, is_narrow)
  return lambda: jax.tree.map(lambda x, y, narrow: y.astype(x.dtype) if narrow else x, tree, wide, is_narrow)


def _varying_axes(x) -> frozenset[str]:
  """Returns the mesh axes over which `x` varies under shard_map."""
  array_type = jax.typeof(x)
  manual = getattr(array_type, 'manual_axis_type', None)  # jax 0.10; jax 0.9 has `vma`
  return array_type.vma if manual is None else manual.varying


def type_for_mesh(constants: Any) -> Any:
  """Returns a tree of arrays whose constants have the type of the current mesh, if that has axes of type Explicit.

  A constant number has the type of no mesh, and jax.vmap over rows that such a mesh splits rejects it as the carry of
  a loop.
  """
  if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
    return constants
  return jax.tree.map(lambda x: reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x, constants)


def vary_like(start, *operands):
  """Casts the initial carry of a loop so that the loop works under shard_map.

  A loop requires that a step returns a carry of the type that it takes. Under shard_map, that type includes the mesh
  axes over which an array varies: none for a constant, those of `operands` for a result computed from them.

  Args:
    start: the constants that the loop starts from, a tree of arrays.
    operands: the arrays that a step depends on, trees as well.

  Returns:
    `start`, typed as varying over the mesh axes over which any of the operands varies.
  """
  start = type_for_mesh(start)
  axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(operands)))
  return jax.lax.pcast(start, tuple(axes), to='varying') if axes else start


def vary_alike(operands: Any) -> Any:
  """Casts the operands of a jax.custom_vjp so that its gradients work under shard_map.

  A custom gradient has the type of its operand, also where that operand varies over fewer mesh axes than the others,
  such as parameters beside a sharded batch. The gradient of the cast adds it up over the other axes.

  Args:
    operands: a tree of arrays.

  Returns:
    The operands, typed as varying over the mesh axes over which any of them varies.
  """
  axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(operands)))

  def cast(x):
    missing = tuple(axes - _varying_axes(x))
    return jax.lax.pcast(x, missing, to='varying') if missing else x

  return jax.tree.map(cast, operands)


def min_finite(dtype) -> jax.Array:
  """Returns the most negative finite number, the value of masked scores in a maximum and of a maximum over nothing."""
  return jnp.asarray(jnp.finfo(dtype).min, dtype)
