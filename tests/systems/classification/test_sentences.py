"""Texts are split into sentences by spaCy; the sentences of large texts are cached."""

import gzip
import sys

import pytest

from attention_jax.errors import UserError
from attention_jax.systems.classification import sentences


def test_sentences_of_large_texts_are_cached(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'MIN_CACHED_CHARACTERS', 10)
  texts = ['One. Two.', 'Three, four?']
  expected = [['one .', 'two .'], ['three , four ?']]
  assert sentences.split(texts) == expected
  (path,) = (tmp_path / 'attention_jax' / 'sentences').iterdir()
  with monkeypatch.context() as patch:
    patch.setattr(sentences, '_split', None)
    assert sentences.split(texts) == expected
  path.write_bytes(gzip.compress(b'[')[:9])  # truncated: split again
  assert sentences.split(texts) == expected and sentences.split(texts, whole=True)[0] == ['one . two .']


def test_unknown_languages_and_missing_tokenizers_are_reported(monkeypatch):
  with pytest.raises(UserError, match=r"^unknown language 'qq' of spaCy; expected a code such as en"):
    sentences.split(['One.'], language='qq')
  monkeypatch.setitem(sys.modules, 'pythainlp', None)
  with pytest.raises(UserError, match=r"^language 'th' of spaCy needs a package that is not installed: .*PyThaiNLP"):
    sentences.split(['One.'], language='th')
