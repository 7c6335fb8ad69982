"""Images are read as squares of RGB pixels; errors are one line that names the file."""

import numpy as np
import pytest
from PIL import Image

from attention_jax.errors import UserError
from attention_jax.systems.captioning.images import list_images, read_image


def test_names_are_sorted_and_other_files_are_left_out(tmp_path):
  for name in ('b.png', 'a.JPG', 'notes.txt'):
    (tmp_path / name).touch()
  assert list_images(tmp_path) == ['a.JPG', 'b.png']
  with pytest.raises(UserError, match=r'none: cannot be read \(No such file or directory\)'):
    list_images(tmp_path / 'none')


def test_the_central_square_is_scaled(tmp_path):
  pixels = np.zeros([4, 8, 3], np.uint8)
  pixels[:, 1:7] = [255, 0, 0]  # more than the central square, as scaling blends neighbours
  Image.fromarray(pixels).save(tmp_path / 'a.png')
  image = read_image(str(tmp_path / 'a.png'), 2)
  assert image.shape == (2, 2, 3) and image.dtype == np.uint8 and (image == [255, 0, 0]).all()


@pytest.mark.parametrize(('transparent', 'expected'), [(None, [78, 19]), (20000, [255, 19]), (20001, [78, 19])])
def test_grey_levels_of_16_bits_become_8_bits_and_transparent_ones_white(tmp_path, transparent, expected):
  levels = np.array([[20000, 5000]] * 2, np.uint16)
  Image.fromarray(levels).save(tmp_path / 'a.png', transparency=transparent)
  image = read_image(str(tmp_path / 'a.png'), 2)
  np.testing.assert_array_equal(image, np.broadcast_to(np.array(expected)[None, :, None], (2, 2, 3)))


def test_small_and_damaged_images_are_reported(tmp_path):
  Image.new('RGB', (3, 9)).save(tmp_path / 'small.png')
  with pytest.raises(
    UserError, match=r'^row 2: .*small.png: each side must be at least 4 pixels for size=16, got 3 x 9$'
  ):
    read_image(str(tmp_path / 'small.png'), 16, 'row 2: ')
  (tmp_path / 'text.png').write_text('no image')
  with pytest.raises(UserError, match=r'text.png: cannot be read as an image \('):
    read_image(str(tmp_path / 'text.png'), 2)
  with pytest.raises(UserError, match=r'none.png: no such file$'):
    read_image(str(tmp_path / 'none.png'), 2)
  with pytest.raises(UserError, match=r'cannot be read as an image .*null'):
    read_image('a\0.png', 2)
  Image.fromarray(np.ones([4, 4], np.float32)).save(tmp_path / 'float.tif')
  with pytest.raises(UserError, match=r'^row 3: .*float.tif: pixels must be whole numbers, got floats$'):
    read_image(str(tmp_path / 'float.tif'), 2, 'row 3: ')
