"""Where a model looked: a row of panels for each picture, with as many glimpses as there were, each where it was."""

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from attention_jax.analysis import glimpse_paths


def test_a_glimpse_shows_what_the_retina_covers():
  picture = np.zeros((16, 16, 1), np.uint8)
  picture[4:8, 8:12] = 255
  axes = Figure().subplots()
  glimpse_paths._glimpse(axes, picture, np.array([6.0, 10.0]), 4, 2)
  shown = axes.images[0].get_array()
  assert shown.shape == (8, 8) and (shown[2:6, 2:6] == 1).all()
  coarse = shown.copy()
  coarse[2:6, 2:6] = 0
  assert not coarse.any() and len(axes.patches) == 1


def test_the_whole_path_lies_on_its_picture():
  axes = Figure().subplots()
  locations = np.array([[0.0, 0.0], [-0.5, 0.5]])
  item = glimpse_paths.GlimpsePath(np.zeros((8, 12, 1), np.uint8), locations, 'one')
  glimpse_paths._whole(axes, item, (locations + 1) / 2 * np.array([8, 12]), 4)
  line = axes.lines[0]
  assert line.get_xdata().tolist() == [6, 9] and line.get_ydata().tolist() == [4, 2]
  assert [text.get_text() for text in axes.texts] == ['1', '2']
  assert [patch.get_xy() for patch in axes.patches] == [(3.5, 1.5), (6.5, -0.5)]


def test_a_row_for_each_picture(tmp_path):
  one = glimpse_paths.GlimpsePath(np.zeros((8, 8, 3), np.uint8), np.zeros((3, 2)))
  sizes = []
  for items in ([one], [one, one._replace(locations=np.zeros((1, 2)))]):
    glimpse_paths.write(items, tmp_path / 'out.png', 4, 1)
    with Image.open(tmp_path / 'out.png') as picture:
      sizes.append(picture.size)
  assert sizes[0][0] == sizes[1][0] and abs(sizes[1][1] - 2 * sizes[0][1]) <= 1
