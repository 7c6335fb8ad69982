"""Pages with shaded words: what counts less is paler, and of pairs each word says where it looks."""

import re

import numpy as np

from attention_jax.analysis.document_shading import ShadedDocument, write


def shades(path):
  return [float(shade) for shade in re.findall(r'rgba\(9,105,218,([0-9.]+)\)', path.read_text('utf-8'))]


def test_words_of_sentences_that_count_less_are_paler(tmp_path):
  words = [np.array([[0.2, 0.8]]), np.array([[0.5, 0.5], [0.0, 0.0]])]  # the second hop looks nowhere
  document = ShadedDocument('one', 'a', {'a': 0.9, 'b': 0.1}, [['<x>', 'y'], ['z', 'w']], words, np.array([[0.8, 0.2]]))
  write([document], tmp_path / 'page.html')
  np.testing.assert_allclose(shades(tmp_path / 'page.html'), [0.65 / 4, 0.65, 0.65 / 2, 0.65 / 2], atol=1e-3)
  assert '&lt;x&gt;' in (tmp_path / 'page.html').read_text('utf-8')


def test_several_hops_are_unfolded_one_by_one(tmp_path):
  words = [np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])]
  write([ShadedDocument('one', '', {'a': 1.0}, [['x', 'y']], words, np.ones((1, 1)))], tmp_path / 'page.html')
  np.testing.assert_allclose(shades(tmp_path / 'page.html'), [0.65, 0.65, 0.65, 0, 0, 0.65], atol=1e-3)
  page = (tmp_path / 'page.html').read_text('utf-8')
  assert '<summary>weights 2 of 2</summary>' in page and page.count('<details>') == 2


def test_pairs_show_which_word_looks_at_which(tmp_path):
  one = np.array([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0], [0.0, 0.0]])
  other = np.array([[0.1, 0.2, 0.7], [0.6, 0.4, 0.0]])
  tokens = [['a', 'b'], ['c', 'd', 'e']]  # of the first text by c, d, e and a filler, of the second by a and b
  write([ShadedDocument('pair', '', {'yes': 1.0}, tokens, [one, other], np.ones((1, 2)), True)], tmp_path / 'page.html')
  found = shades(tmp_path / 'page.html')
  np.testing.assert_allclose(found, 0.65 * np.concatenate([other.ravel(), one[:3].ravel()]), atol=1e-3)
  page = (tmp_path / 'page.html').read_text('utf-8')
  assert page.index('<th>a</th><td') < page.index('<th>b</th><td') < page.index('<th>c</th><td')
