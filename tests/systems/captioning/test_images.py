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
  for folder, message in ((tmp_path / 'none', r'none: cannot be read \(No such file'), ('a\0', 'cannot be read')):
    with pytest.raises(UserError, match=message):
      list_images(folder)


@pytest.fixture
def read_saved(tmp_path):
  """Returns a function that saves an image and reads it."""

  def read(image, size=2, **options):
    image.save(tmp_path / 'a.png', **options)
    return read_image(str(tmp_path / 'a.png'), size)

  return read


def test_the_central_square_is_scaled(read_saved):
  pixels = np.zeros([4, 8, 3], np.uint8)
  pixels[:, 1:7] = [255, 0, 0]  # more than the central square, as scaling blends neighbours
  image = read_saved(Image.fromarray(pixels))
  assert image.shape == (2, 2, 3) and image.dtype == np.uint8 and (image == [255, 0, 0]).all()


def test_exif_rotation_is_applied_and_transparent_pixels_become_white(read_saved):
  sides = Image.fromarray(np.repeat([[0, 200]], 20, 0).repeat(10, 1).astype(np.uint8))
  exif = sides.getexif()
  exif[0x0112] = 6  # orientation: rotate by 90 degrees clockwise
  image = read_saved(sides, 8, exif=exif)
  assert image[0].max() < 20 and image[7].min() > 180
  colours = Image.new('P', (9, 9), 1)
  colours.putpalette([9, 9, 9, 50, 60, 70])
  assert (read_saved(Image.fromarray(np.full((9, 9, 4), (10, 20, 30, 0), np.uint8))) == 255).all()
  assert (read_saved(colours, transparency=1) == 255).all() and read_saved(colours)[0, 0].tolist() == [50, 60, 70]


@pytest.mark.parametrize(('transparent', 'expected'), [(None, [78, 19]), (20000, [255, 19]), (20001, [78, 19])])
def test_grey_levels_of_16_bits_become_8_bits_and_transparent_ones_white(read_saved, transparent, expected):
  levels = np.array([[20000, 5000]] * 2, np.uint16)
  image = read_saved(Image.fromarray(levels), transparency=transparent)
  np.testing.assert_array_equal(image, np.broadcast_to(np.array(expected)[None, :, None], (2, 2, 3)))


@pytest.mark.parametrize(
  ('name', 'size', 'message'),
  [
    ('small.png', 16, r'^row 2: .*small.png: each side must be at least 4 pixels for size=16, got 3 x 9$'),
    ('text.png', 2, r'^row 2: .*text.png: cannot be read as an image \('),
    ('none.png', 2, r'^row 2: .*none.png: no such file$'),
    ('a\0.png', 2, 'cannot be read as an image .*null'),
    ('float.tif', 2, r'^row 2: .*float.tif: pixels must be whole numbers, got floats$'),
  ],
)
def test_small_and_damaged_images_are_reported(tmp_path, name, size, message):
  Image.new('RGB', (3, 9)).save(tmp_path / 'small.png')
  Image.fromarray(np.ones([4, 4], np.float32)).save(tmp_path / 'float.tif')
  (tmp_path / 'text.png').write_text('no image')
  with pytest.raises(UserError, match=message):
    read_image(str(tmp_path / name), size, 'row 2: ')
