"""Pictures of captions: a panel and a frame for every word, references and gold boxes, and brightness by weights."""

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image

from attention_jax.analysis import fonts
from attention_jax.systems.captioning import overlays as image_overlays

GREY = np.full((8, 8, 3), 200, np.uint8)
GOLD_COLOUR = np.array([0xE8, 0x59, 0x0C])


def read_pixels(items, path, suffix='.png'):
  """Writes captioned pictures; returns the pixels of the picture, or of the first frame of the film."""
  image_overlays.write(items, path)
  with Image.open(path.with_suffix(suffix)) as picture:
    return np.asarray(picture.convert('RGB')).astype(int)


def test_every_word_has_a_frame_and_a_panel_and_an_empty_caption_has_one_frame(tmp_path):
  captioned = image_overlays.CaptionOverlay(GREY, ['a', 'cat'], np.eye(4).reshape(4, 2, 2)[:2])
  empty = image_overlays.CaptionOverlay(GREY, [], np.zeros((0, 2, 2)), cell_centres=(np.array([0.3, 0.8]),) * 2)
  for items, frames in (([captioned], 2), ([empty], 1), ([captioned, empty], 3)):
    height, width, _ = read_pixels(items, tmp_path / 'out.png').shape
    with Image.open(tmp_path / 'out.gif') as film:
      assert film.n_frames == frames
  assert width > height
  figure = Figure()
  image_overlays._draw_item(figure, captioned, 1)
  assert [axes.get_title() for axes in figure.axes if axes.images] == ['', 'a', 'cat']


def test_references_add_height_and_gold_boxes_are_drawn(tmp_path):
  item = image_overlays.CaptionOverlay(GREY, ['a'], np.ones((1, 2, 2)))

  def measure(item):
    """The height of the picture, and the number of pixels in the colour of references and boxes."""
    pixels = read_pixels([item], tmp_path / 'out.png')
    return pixels.shape[0], int((np.abs(pixels - GOLD_COLOUR).sum(-1) < 9).sum())

  height, gold_pixels = measure(item)
  assert gold_pixels == 0
  height_with_references, gold_pixels = measure(item._replace(references=['a thing', 'another', 'a third']))
  assert gold_pixels > 0 and height_with_references > height
  for boxes in ('gold', 'boxes'):
    assert measure(item._replace(**{boxes: [(1, 1, 6, 6)]}))[1] > 50


@pytest.mark.long
@pytest.mark.parametrize(('height', 'width'), [(20, 80), (80, 20)])
def test_frames_keep_the_shape_of_the_picture_and_boxes_their_place(tmp_path, height, width):
  picture = np.zeros((height, width, 3), np.uint8)
  picture[10:20, 10:20] = [0, 0, 255]
  item = image_overlays.CaptionOverlay(picture, ['a'], np.ones((1, 2, 2)))
  square = image_overlays.CaptionOverlay(GREY, ['b'], np.ones((1, 2, 2)))

  def draw(items):
    return read_pixels(items, tmp_path / 'out.png', '.gif')[: image_overlays.FRAME_SIDE]

  def extent(mask):
    """First and last row, first and last column."""
    rows, columns = np.nonzero(mask)
    return np.array([rows.min(), rows.max(), columns.min(), columns.max()])

  frame = draw([item, square])
  is_white = (frame > 250).all(-1)
  assert is_white.mean() == 0.75  # beside the picture
  blue = extent((frame[..., 2] > 128) & ~is_white)
  assert np.ptp(blue[:2]) == np.ptp(blue[2:]) == 39
  boxed = draw([item._replace(boxes=[(10, 10, 20, 20)])])
  np.testing.assert_allclose(extent(np.abs(boxed - GOLD_COLOUR).sum(-1) < 60), blue, atol=1)


def test_fonts_of_frames_cover_latin_cyrillic_and_japanese_words():
  for word in ('Grün', 'Жук', '木', 'あ'):
    covered = font_manager.get_font(fonts.font_file(word)).get_charmap()
    assert all(ord(letter) in covered for letter in word)


def test_image_is_bright_where_weights_are_large_and_brightest_at_the_centre_of_the_cell():
  weights = np.array([[0.0, 1.0], [0.0, 0.0]])
  lit = image_overlays.blend_weights(GREY, weights)
  assert lit[0, 7].mean() > 2 * lit[7, 0].mean() > 0
  lit = image_overlays.blend_weights(GREY, weights, (np.array([0.4375, 0.9]), np.array([0.1, 0.6875])))
  assert np.unravel_index(lit[..., 0].argmax(), (8, 8)) == (0, 5)
  assert lit[3, 5, 0] == lit.max() > lit[4, 5, 0]


def test_titles_are_cut_in_the_middle():
  assert [image_overlays.abbreviate('abcdef', length) for length in (6, 5, 2)] == ['abcdef', 'ab…ef', 'a…']


def test_captions_are_cut_between_words():
  words = ['red', 'circle', 'left', 'of']
  cut = [image_overlays.last_words(words, length) for length in (18, 17, 15)]
  assert cut == ['red circle left of', '… circle left of', '… left of']
  assert [image_overlays.last_words(words, 5) for words in (['incomprehensible'], [])] == ['incomprehensible', '']
