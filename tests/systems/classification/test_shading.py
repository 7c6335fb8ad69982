"""HTML pages of shaded documents: shades by word and sentence weight, heads one by one, and tables of pairs."""

import re

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.classification.shading import ShadedDocument, write

OPACITY = 0.65  # of the darkest blue on a page


def write_page(document, folder):
  """Writes a page; returns its text."""
  path = folder / 'page.html'
  write([document], path)
  return path.read_text('utf-8')


def shades(page):
  return [float(shade) for shade in re.findall(r'rgba\(9,105,218,([0-9.]+)\)', page)]


def test_words_are_paler_in_sentences_of_small_weight(tmp_path):
  words = [np.array([[0.2, 0.8]]), np.array([[0.5, 0.5], [0.0, 0.0]])]  # the second hop is all zero
  document = ShadedDocument('one', 'a', {'a': 0.9, 'b': 0.1}, [['<x>', 'y'], ['z', 'w']], words, np.array([[0.8, 0.2]]))
  page = write_page(document, tmp_path)
  np.testing.assert_allclose(shades(page), OPACITY * np.array([0.25, 1, 0.5, 0.5]), atol=1e-3)
  assert '&lt;x&gt;' in page


def test_several_hops_are_shown_one_by_one(tmp_path):
  words = [np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])]
  page = write_page(ShadedDocument('one', '', {'a': 1.0}, [['x', 'y']], words, np.ones((1, 1))), tmp_path)
  np.testing.assert_allclose(shades(page), OPACITY * np.array([1, 1, 1, 0, 0, 1]), atol=1e-3)
  assert '<summary>weights 2 of 2</summary>' in page
  assert page.count('<details>') == 2


def test_text_has_its_own_direction(tmp_path):
  """Otherwise the full stop of a Hebrew sentence is on its right."""
  words = [['שלום', '.'], ['hello', '.']]
  weights = [np.full((1, 2), 0.5)] * 2
  page = write_page(ShadedDocument('שלום.', '', {'a': 1.0}, words, weights, np.full((1, 2), 0.5)), tmp_path)
  assert page.count('<span dir="auto"><span class="word"') == 2 and '<h2 dir="auto">' in page


def test_pairs_show_which_word_attends_to_which(tmp_path):
  first = np.array([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0], [0.0, 0.0]])  # by c, d, e and a filler word
  second = np.array([[0.1, 0.2, 0.7], [0.6, 0.4, 0.0]])  # by a and b
  tokens = [['a', 'b'], ['c', 'd', 'e']]
  page = write_page(ShadedDocument('pair', '', {'yes': 1.0}, tokens, [first, second], np.ones((1, 2)), True), tmp_path)
  np.testing.assert_allclose(shades(page), OPACITY * np.concatenate([second.ravel(), first[:3].ravel()]), atol=1e-3)
  assert page.index('<th>a</th><td') < page.index('<th>b</th><td') < page.index('<th>c</th><td')


def test_unwritable_path_raises(tmp_path):
  with pytest.raises(UserError, match=r'missing/page\.html: cannot be written \(No such file or directory\)'):
    write([], tmp_path / 'missing' / 'page.html')
