"""Pages with embedded pictures."""

import base64

import numpy as np
from matplotlib.image import imsave

from attention_jax.analysis.picture_page import write_picture_page
from tests.analysis.test_reading_page import HOSTILE, Page


def test_pictures_are_embedded_and_text_is_escaped(tmp_path):
  picture = tmp_path / 'a.png'
  imsave(picture, np.zeros((2, 3, 3)))
  write_picture_page([picture], tmp_path / 'page.html', HOSTILE, 'Words')
  page = Page((tmp_path / 'page.html').read_text('utf-8'))
  images = [attributes for tag, attributes in page.tags if tag == 'img']
  assert [image['alt'] for image in images] == ['Words']
  assert base64.b64decode(images[0]['src'].removeprefix('data:image/png;base64,')) == picture.read_bytes()
  assert 'script' not in {tag for tag, _ in page.tags}
