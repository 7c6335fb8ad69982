"""Pictures of glimpse paths: a row of panels for each image, with the patches of the retina and their path."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from attention_jax.systems.glimpsing import paths as glimpse_paths
from attention_jax.systems.glimpsing.glimpses import retina


def test_glimpse_shows_what_the_retina_covers():
  picture = np.zeros((16, 16, 1), np.uint8)
  picture[4:8, 8:12] = 255
  axes = Figure().subplots()
  (patch,) = glimpse_paths._patches(glimpse_paths.GlimpsePath(picture, np.array([[-0.25, 0.25]])), 4, 2)
  glimpse_paths._draw_patch(axes, patch, 4, range(1))
  np.testing.assert_array_equal(axes.images[0].get_array(), np.pad(np.ones((4, 4)), 2))
  assert len(axes.patches) == 1


@pytest.mark.long
def test_patches_of_an_odd_side_are_where_the_retina_reads_them():
  picture = np.random.default_rng(0).integers(0, 256, (16, 16, 1)).astype(np.uint8)
  location = np.array([-0.25, 0.25])  # pixel (6, 10): the patches begin 1 and 3 pixels before it
  (glimpse,) = glimpse_paths._patches(glimpse_paths.GlimpsePath(picture, location[None]), 3, 2)
  finest, widest = retina(picture.astype(np.float32), location, 3, 2)
  np.testing.assert_array_equal(finest, picture[5:8, 9:12])
  np.testing.assert_array_equal(glimpse[2:5, 2:5], finest)
  np.testing.assert_allclose(glimpse[::5, ::5], widest[::2, ::2], rtol=1e-6)  # the corners
  axes = Figure().subplots()
  glimpse_paths._draw_patch(axes, glimpse, 3, range(1))
  assert axes.patches[0].get_xy() == (1.5, 1.5)


def test_path_is_drawn_on_its_image():
  axes = Figure().subplots()
  locations = np.array([[0.0, 0.0], [-0.5, 0.5]])
  item = glimpse_paths.GlimpsePath(np.zeros((8, 12, 1), np.uint8), locations, 'one')
  glimpse_paths._draw_path(axes, item, (locations + 1) / 2 * np.array([8, 12]), 4)
  line = axes.lines[0]
  assert line.get_xdata().tolist() == [5.5, 8.5]
  assert line.get_ydata().tolist() == [3.5, 1.5]
  assert [text.get_text() for text in axes.texts] == ['1', '2']
  assert [text.xy for text in axes.texts] == [(5.5, 3.5), (8.5, 1.5)]
  assert [patch.get_xy() for patch in axes.patches] == [(3.5, 1.5), (6.5, -0.5)]


@pytest.mark.long
def test_the_picture_has_a_row_for_each_image(tmp_path):
  item = glimpse_paths.GlimpsePath(np.zeros((8, 8, 3), np.uint8), np.zeros((3, 2)))
  sizes = []
  for items in ([item], [item, item._replace(locations=np.zeros((1, 2)))]):
    glimpse_paths.write(items, tmp_path / 'out.png', 4, 1)
    with Image.open(tmp_path / 'out.png') as picture:
      sizes.append(picture.size)
  (width, height), (width_of_two, height_of_two) = sizes
  assert width == width_of_two and abs(height_of_two - 2 * height) <= 1


def test_regions_of_transforms_are_outlined_and_resampled(tmp_path):
  picture = np.zeros((8, 12, 1), np.uint8)
  picture[2:6, 6:12] = 255
  theta = np.array([[[0.5, 0.0, 0.5], [0.0, 0.5, 0.0]]])
  item = glimpse_paths.GlimpsePath(picture, np.array([[0.0, 0.5]]), 'one', theta)
  axes = Figure().subplots()
  glimpse_paths._draw_path(axes, item, np.array([[4.0, 9.0]]), 4)
  (outline,) = axes.patches
  assert outline.get_xy()[:4].tolist() == [[5.5, 1.5], [11.5, 1.5], [11.5, 5.5], [5.5, 5.5]]
  (region,) = glimpse_paths._patches(item, 4, 1)
  np.testing.assert_allclose(region, 255)
  np.testing.assert_allclose(glimpse_paths._to_example(item, 4, 1).boxes, [[(0.5, 0.25, 1.0, 0.75)]] * 2)
  for name in ('out.png', 'out.html'):
    glimpse_paths.write([item], tmp_path / name, 4, 1)
    assert (tmp_path / name).exists()
