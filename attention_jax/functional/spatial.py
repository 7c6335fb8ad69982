"""Spatial transformers: differentiable attention to a region of a picture. Jaderberg et al. 2015.

Coordinates are (x, y), from -1 at the left and upper edges of a picture to 1 at the right and lower edges: pixel m of a
row of W pixels has its centre at (2 m + 1) / W - 1.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from attention_jax.annotations import Array, Float
from attention_jax.functional.masking import at_least_float32


def affine_grid(theta: Float[Array, '2 3'], height: int, width: int) -> Float[Array, 'height width 2']:
  """(xˢ, yˢ) = θ (xᵗ, yᵗ, 1): where in the source each pixel of the target is read. Jaderberg et al. 2015, equation 1.

  Args:
    theta: θ; the identity [[1, 0, 0], [0, 1, 0]] reads the whole picture.
    height, width: size of the target in pixels.

  Returns:
    Source coordinates of every pixel of the target, in float32 or a higher precision.
  """
  theta = at_least_float32(theta)
  x, y = jnp.meshgrid(_centres(width), _centres(height))
  target = jnp.stack([x, y, jnp.ones_like(x)], axis=-1).astype(theta.dtype)
  return jnp.einsum('ij,hwj->hwi', theta, target, precision='highest')


def bilinear_sample(picture: Float[Array, 'H W C'], grid: Float[Array, '... 2']) -> Float[Array, '... C']:
  """V = Σₙ Σₘ Uₙₘ max(0, 1 - |x - m|) max(0, 1 - |y - n|), x and y in pixels. Jaderberg et al. 2015, equation 5.

  Differentiable in the picture and in the grid; pixels beyond the edges of the picture count as 0.

  Args:
    picture: U.
    grid: coordinates at which the picture is read.

  Returns:
    The picture at each point of the grid.
  """
  picture = jnp.asarray(picture)
  height, width = picture.shape[:2]
  x = (grid[..., 0] + 1) / 2 * width - 0.5
  y = (grid[..., 1] + 1) / 2 * height - 0.5
  left = jnp.floor(x)
  top = jnp.floor(y)
  result = 0.0
  for row, row_weight in ((top, top + 1 - y), (top + 1, y - top)):
    for column, column_weight in ((left, left + 1 - x), (left + 1, x - left)):
      weight = row_weight * column_weight
      is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
      # Clipped as floats, because a float beyond the range of integers has no defined index.
      index = [jnp.clip(pixel, 0, size - 1).astype(jnp.int32) for pixel, size in ((row, height), (column, width))]
      result = result + jnp.where(is_inside, weight, 0.0)[..., None] * picture[tuple(index)]
  return result


def _centres(size: int) -> Float[Array, ' size']:
  return (2 * jnp.arange(size) + 1) / size - 1


class Transform(NamedTuple):
  """A row of TRANSFORMS.

  Attributes:
    fn: parameters [P] -> θ [2, 3].
    identity: parameters that read the whole picture.
    description: the formula of θ, with its equation in the paper.
  """

  fn: Callable[[Float[Array, ' P']], Float[Array, '2 3']]
  identity: tuple[float, ...]
  description: str


def affine(params: Float[Array, '6']) -> Float[Array, '2 3']:
  """The six entries of θ, row by row. Jaderberg et al. 2015, equation 1."""
  return params.reshape(2, 3)


def attention(params: Float[Array, '3']) -> Float[Array, '2 3']:
  """θ = [[s, 0, tˣ], [0, s, tʸ]]: an upright window. Jaderberg et al. 2015, equation 2."""
  scale, x, y = params
  zero = jnp.zeros_like(scale)
  return jnp.stack([scale, zero, x, zero, scale, y]).reshape(2, 3)


TRANSFORMS: Mapping[str, Transform] = {
  'affine': Transform(affine, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), affine.__doc__),
  'attention': Transform(attention, (1.0, 0.0, 0.0), attention.__doc__),
}
