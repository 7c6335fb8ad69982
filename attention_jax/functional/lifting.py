"""`lift`: applies the function of one sequence to all elements of leading axes, some of which arrays share."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Axes = Sequence[Mapping[str, Any]]  # for each leading axis, arguments of its jax.vmap, such as axis_name


def lift(fn: Callable, axes: Axes, *trees: Any) -> Any:
  """Returns the results of `fn` for every element of the leading axes of its arguments.

  An axis of length 1 is shared: nothing is copied along it. Results have length 1 along an axis that all arguments
  share.

  Args:
    fn: a function of trees of arrays.
    axes: the leading axes.
    *trees: the arguments of `fn`, with these leading axes.
  """
  if not axes:
    return fn(*trees)
  inner = functools.partial(lift, fn, axes[1:])
  if not axes[0] and all(x.shape[0] == 1 for x in jax.tree.leaves(trees)):
    return jax.tree.map(lambda x: x[None], inner(*jax.tree.map(lambda x: x[0], trees)))
  size = next((x.shape[0] for x in jax.tree.leaves(trees) if x.shape[0] != 1), 1)
  in_axes = jax.tree.map(lambda x: None if x.shape[0] != size else 0, trees)
  rest = jax.tree.map(lambda x: x[0] if x.shape[0] != size else x, trees)
  return jax.vmap(inner, in_axes, axis_size=size, **axes[0])(*rest)
