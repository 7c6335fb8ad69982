"""Annotations of arrays, such as `Float[Array, 'T D']`: those of jaxtyping, or placeholders if it is not installed.

The placeholders ignore the shape, so that only jax is needed to import the pure functions. No annotation is checked at
run time; the tests check them.
"""

from typing import Any

try:
  from jaxtyping import AbstractArray, Array, Bool, Float, Int
except ModuleNotFoundError:
  from jax import Array

  class AbstractArray:
    """An annotation of an array."""

    def __class_getitem__(cls, array_and_shape: Any) -> type:
      return cls

  class Bool(AbstractArray):
    """An array of booleans."""

  class Float(AbstractArray):
    """An array of floating-point numbers."""

  class Int(AbstractArray):
    """An array of integers."""


__all__ = ['AbstractArray', 'Array', 'Bool', 'Float', 'Int']
