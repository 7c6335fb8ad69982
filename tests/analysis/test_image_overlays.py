"""What a captioner looked at: a panel for every word, a frame for every word, and both where nothing was said."""

import numpy as np
from matplotlib import font_manager
from PIL import Image

from attention_jax.analysis import fonts, image_overlays


def test_every_word_has_a_frame_and_no_word_the_bare_picture(tmp_path):
  picture = np.full((8, 8, 3), 200, np.uint8)
  said = image_overlays.CaptionOverlay(picture, ['a', 'cat'], np.eye(4).reshape(4, 2, 2)[:2])
  silent = image_overlays.CaptionOverlay(picture, [], np.zeros((0, 2, 2)), cell_centres=(np.array([0.3, 0.8]),) * 2)
  for items, frames in (([said], 2), ([silent], 1), ([said, silent], 3)):
    image_overlays.write(items, tmp_path / 'out.png')
    with Image.open(tmp_path / 'out.gif') as film:
      assert film.n_frames == frames
  with Image.open(tmp_path / 'out.png') as panels:
    assert panels.width > panels.height


def test_what_others_said_stands_above_and_its_boxes_in_the_picture(tmp_path):
  picture, colour = np.full((8, 8, 3), 200, np.uint8), np.array([0xE8, 0x59, 0x0C])
  item = image_overlays.CaptionOverlay(picture, ['a'], np.ones((1, 2, 2)))

  def pixels(item):
    image_overlays.write([item], tmp_path / 'out.png')
    with Image.open(tmp_path / 'out.png') as panels:
      found = np.asarray(panels.convert('RGB')).astype(int)
    return found.shape[0], int((np.abs(found - colour).sum(-1) < 9).sum())

  height, none = pixels(item)
  higher, some = pixels(item._replace(references=['a thing', 'another', 'a third']))
  assert none == 0 and some > 0 and higher > height
  assert pixels(item._replace(gold=[(1, 1, 6, 6)]))[1] > 50
  assert pixels(item._replace(boxes=[(1, 1, 6, 6)]))[1] > 50


def test_films_have_letters_of_every_script():
  for word in ('Grün', 'Жук', '木', 'あ'):
    covered = font_manager.get_font(fonts.font_file(word)).get_charmap()
    assert all(ord(letter) in covered for letter in word)


def test_light_falls_where_the_weights_are():
  lit = image_overlays.blend_weights(np.full((8, 8, 3), 200, np.uint8), np.array([[0.0, 1.0], [0.0, 0.0]]))
  assert lit[0, 7].mean() > 2 * lit[7, 0].mean() > 0


def test_light_falls_on_the_middles_of_cells():
  weights = np.array([[0.0, 1.0], [0.0, 0.0]])
  lit = image_overlays.blend_weights(
    np.full((8, 8, 3), 200, np.uint8), weights, (np.array([0.4375, 0.9]), np.array([0.1, 0.6875]))
  )
  assert np.unravel_index(lit[..., 0].argmax(), (8, 8)) == (0, 5) and lit[3, 5, 0] == lit.max() > lit[4, 5, 0]


def test_titles_and_captions_are_cut_between_words():
  assert image_overlays.abbreviate('abcdef', 6) == 'abcdef' and image_overlays.abbreviate('abcdefg', 5) == 'ab…fg'
  words = ['red', 'circle', 'left', 'of']
  assert image_overlays.last_words(words, 18) == 'red circle left of'
  assert (
    image_overlays.last_words(words, 17) == '… circle left of' and image_overlays.last_words(words, 15) == '… left of'
  )
  assert (
    image_overlays.last_words(['incomprehensible'], 5) == 'incomprehensible' and image_overlays.last_words([], 5) == ''
  )
