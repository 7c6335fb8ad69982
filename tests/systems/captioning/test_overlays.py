"""Pictures of captions: a panel and a frame for every word, references and gold boxes, and brightness by weights."""

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image

from attention_jax.analysis import fonts
from attention_jax.systems.captioning import overlays as image_overlays

GREY = np.full((8, 8, 3), 200, np.uint8)


def test_every_word_has_a_frame_and_a_panel_and_an_empty_caption_has_one_frame(tmp_path):
  captioned = image_overlays.CaptionOverlay(GREY, ['a', 'cat'], np.eye(4).reshape(4, 2, 2)[:2])
  empty = image_overlays.CaptionOverlay(GREY, [], np.zeros((0, 2, 2)), cell_centres=(np.array([0.3, 0.8]),) * 2)
  for items, frames in (([captioned], 2), ([empty], 1), ([captioned, empty], 3)):
    image_overlays.write(items, tmp_path / 'out.png')
    with Image.open(tmp_path / 'out.gif') as film:
      assert film.n_frames == frames
  with Image.open(tmp_path / 'out.png') as panels:
    assert panels.width > panels.height
  figure = Figure()
  image_overlays._draw_item(figure, captioned, 1)
  assert [axes.get_title() for axes in figure.axes if axes.images] == ['', 'a', 'cat']


def test_references_add_height_and_gold_boxes_are_drawn(tmp_path):
  gold_colour = np.array([0xE8, 0x59, 0x0C])
  item = image_overlays.CaptionOverlay(GREY, ['a'], np.ones((1, 2, 2)))

  def measure(item):
    """The height of the picture, and the number of pixels in the colour of references and boxes."""
    image_overlays.write([item], tmp_path / 'out.png')
    with Image.open(tmp_path / 'out.png') as panels:
      pixels = np.asarray(panels.convert('RGB')).astype(int)
    return pixels.shape[0], int((np.abs(pixels - gold_colour).sum(-1) < 9).sum())

  height, gold_pixels = measure(item)
  assert gold_pixels == 0
  height_with_references, gold_pixels = measure(item._replace(references=['a thing', 'another', 'a third']))
  assert gold_pixels > 0
  assert height_with_references > height
  assert measure(item._replace(gold=[(1, 1, 6, 6)]))[1] > 50
  assert measure(item._replace(boxes=[(1, 1, 6, 6)]))[1] > 50


@pytest.mark.long
@pytest.mark.parametrize(('height', 'width'), [(20, 80), (80, 20)])
def test_frames_keep_the_shape_of_the_picture_and_boxes_their_place(tmp_path, height, width):
  picture = np.zeros((height, width, 3), np.uint8)
  picture[10:20, 10:20] = [0, 0, 255]
  item = image_overlays.CaptionOverlay(picture, ['a'], np.ones((1, 2, 2)))
  square = image_overlays.CaptionOverlay(GREY, ['b'], np.ones((1, 2, 2)))

  def draw(items):
    image_overlays.write(items, tmp_path / 'out.png')
    with Image.open(tmp_path / 'out.gif') as film:
      return np.asarray(film.convert('RGB')).astype(int)[: image_overlays.FRAME_SIDE]

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
  gold = extent(np.abs(boxed - [0xE8, 0x59, 0x0C]).sum(-1) < 60)
  np.testing.assert_allclose(gold, blue, atol=1)


def test_fonts_of_frames_cover_latin_cyrillic_and_japanese_words():
  for word in ('Grün', 'Жук', '木', 'あ'):
    covered = font_manager.get_font(fonts.font_file(word)).get_charmap()
    assert all(ord(letter) in covered for letter in word)


def test_image_is_bright_where_weights_are_large():
  lit = image_overlays.blend_weights(GREY, np.array([[0.0, 1.0], [0.0, 0.0]]))
  assert lit[0, 7].mean() > 2 * lit[7, 0].mean() > 0


def test_image_is_brightest_at_the_centre_of_the_cell():
  weights = np.array([[0.0, 1.0], [0.0, 0.0]])
  centres = np.array([0.4375, 0.9]), np.array([0.1, 0.6875])
  lit = image_overlays.blend_weights(GREY, weights, centres)
  assert np.unravel_index(lit[..., 0].argmax(), (8, 8)) == (0, 5)
  assert lit[3, 5, 0] == lit.max() > lit[4, 5, 0]


@pytest.mark.parametrize(
  ('text', 'length', 'expected'), [('abcdef', 6, 'abcdef'), ('abcdefg', 5, 'ab…fg'), ('abc', 2, 'a…')]
)
def test_titles_are_cut_in_the_middle(text, length, expected):
  assert image_overlays.abbreviate(text, length) == expected


@pytest.mark.parametrize(
  ('words', 'length', 'expected'),
  [
    (['red', 'circle', 'left', 'of'], 18, 'red circle left of'),
    (['red', 'circle', 'left', 'of'], 17, '… circle left of'),
    (['red', 'circle', 'left', 'of'], 15, '… left of'),
    (['incomprehensible'], 5, 'incomprehensible'),
    ([], 5, ''),
  ],
)
def test_captions_are_cut_between_words(words, length, expected):
  assert image_overlays.last_words(words, length) == expected
