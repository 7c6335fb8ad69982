"""Sentences are split by spaCy, and cached."""

import gzip

from attention_jax.data import sentences


def test_sentences_of_large_texts_are_cached(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'MIN_CACHED_CHARACTERS', 10)
  texts = ['One. Two.', 'Three, four?']
  expected = [['one .', 'two .'], ['three , four ?']]
  assert sentences.split(texts) == expected
  (path,) = (tmp_path / 'attention_jax' / 'sentences').iterdir()
  monkeypatch.setattr(sentences, '_split', None)
  assert sentences.split(texts) == expected
  monkeypatch.undo()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(sentences, 'MIN_CACHED_CHARACTERS', 10)
  path.write_bytes(gzip.compress(b'[')[:9])  # truncated: split again
  assert sentences.split(texts) == expected and sentences.split(texts, whole=True)[0] == ['one . two .']
