"""Spatial transformers against the equations of the paper and scipy.ndimage.map_coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from attention_jax.functional.spatial import TRANSFORMS, affine_grid, attention, bilinear_sample

H, W, C = 5, 7, 3
PICTURE = np.random.default_rng(0).uniform(size=(H, W, C)).astype(np.float32)
THETA = np.array([[0.7, -0.4, 0.3], [0.5, 0.9, -0.2]], np.float32)  # partly outside of the picture


def to_pixels(grid):
  """Pixel coordinates (x, y): -1 and 1 are the outer edges of the first and the last pixel."""
  return (np.asarray(grid, np.float64) + 1) / 2 * np.array([W, H]) - 0.5


def test_the_grid_equals_the_product_for_each_pixel():
  grid = affine_grid(jnp.asarray(THETA), 4, 6)
  assert grid.shape == (4, 6, 2)
  for row in range(4):
    for column in range(6):
      target = [(2 * column + 1) / 6 - 1, (2 * row + 1) / 4 - 1, 1]
      np.testing.assert_allclose(grid[row, column], THETA @ target, rtol=1e-5, atol=1e-6)


def literal_sample(x, y):
  """The value V and its derivatives with respect to x and y. Jaderberg et al. 2015, equations 5 and 7."""
  value, by_x, by_y = np.zeros(C), np.zeros(C), np.zeros(C)
  for n in range(H):
    for m in range(W):
      kernel_x, kernel_y = max(0, 1 - abs(x - m)), max(0, 1 - abs(y - n))
      value += PICTURE[n, m] * kernel_x * kernel_y
      by_x += PICTURE[n, m] * kernel_y * (0 if abs(m - x) >= 1 else 1 if m >= x else -1)
      by_y += PICTURE[n, m] * kernel_x * (0 if abs(n - y) >= 1 else 1 if n >= y else -1)
  return value, by_x, by_y


@pytest.mark.long
def test_samples_and_gradients_equal_the_sum_over_all_pixels():
  grid = affine_grid(jnp.asarray(THETA), 4, 6)
  jacobian = jax.jacfwd(lambda point: bilinear_sample(jnp.asarray(PICTURE), point))
  values, slopes = jax.jit(jax.vmap(lambda p: (bilinear_sample(jnp.asarray(PICTURE), p), jacobian(p))))(
    grid.reshape(-1, 2)
  )
  for (x, y), value, slope in zip(to_pixels(grid).reshape(-1, 2), values, slopes, strict=True):
    expected, by_x, by_y = literal_sample(x, y)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slope, np.stack([by_x * W / 2, by_y * H / 2], -1), rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_samples_equal_those_of_scipy():
  grid = affine_grid(jnp.asarray(THETA), 9, 9)
  assert np.abs(grid).max() > 1
  x, y = np.moveaxis(to_pixels(grid), -1, 0)
  expected = [ndimage.map_coordinates(PICTURE[..., c], [y, x], order=1, mode='grid-constant') for c in range(C)]
  np.testing.assert_allclose(bilinear_sample(jnp.asarray(PICTURE), grid), np.stack(expected, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('name', TRANSFORMS)
def test_the_identity_reads_the_whole_picture(name):
  row = TRANSFORMS[name]
  theta = row.fn(jnp.array(row.identity))
  np.testing.assert_array_equal(theta, [[1, 0, 0], [0, 1, 0]])
  region = bilinear_sample(jnp.asarray(PICTURE), affine_grid(theta, H, W))
  np.testing.assert_allclose(region, PICTURE, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.int32, jnp.bfloat16])
def test_coordinates_are_not_rounded_to_the_dtype_of_the_transform(dtype):
  theta = jnp.asarray([[1, 0, 0], [0, 1, 0]], dtype)
  np.testing.assert_array_equal(affine_grid(theta, H, W), affine_grid(theta.astype(jnp.float32), H, W))
  np.testing.assert_allclose(affine_grid([[1, 0, 0], [0, 1, 0]], 2, 2)[0], [[-0.5, -0.5], [0.5, -0.5]])


def test_attention_is_an_upright_window():
  theta = attention(jnp.array([0.5, 0.2, -0.3]))
  np.testing.assert_allclose(theta, [[0.5, 0, 0.2], [0, 0.5, -0.3]])


@pytest.mark.long
def test_points_far_outside_are_zero_without_gradient():
  value, gradient = jax.value_and_grad(lambda p: bilinear_sample(jnp.asarray(PICTURE), p).sum())(jnp.array([1e30, 0.0]))
  assert value == 0 and not np.any(gradient)
