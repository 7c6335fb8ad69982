"""The lexicon of a run folder: made once, remade when the data changed, and not stored in a read-only folder."""

import contextlib
import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from attention_jax.data.encoding import encode
from attention_jax.data.tasks import TranslationData
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import word
from attention_jax.errors import UserError
from attention_jax.systems import lexicons
from attention_jax.systems.lexicons import load_or_make_lexicon
from attention_jax.systems.runs import check_run_files
from attention_jax.systems.translation import TranslationSystem
from attention_jax.training.data_digests import compute_digests, store_digests


@dataclasses.dataclass
class CountedData:
  """Loads the data of a run, and counts how often."""

  target: str = 'x y'
  calls: int = 0

  def __call__(self) -> TranslationData:
    self.calls += 1
    vocabularies = word(['a b']), word(['x y'])
    corpus = Corpus(['a b', 'a'], [self.target, 'x'])
    return TranslationData(*vocabularies, {'train': corpus}, {'train': encode(corpus, *vocabularies)}, [])


def store_digest_of(data: CountedData, folder) -> None:
  store_digests(folder, compute_digests(data().encoded))


def assert_equal(actual, expected):
  for actual_array, expected_array in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(actual_array, expected_array)


def test_a_lexicon_is_made_once(tmp_path):
  store_digest_of(CountedData(), tmp_path)
  data = CountedData()
  made = load_or_make_lexicon(str(tmp_path), data)
  assert_equal(load_or_make_lexicon(str(tmp_path), data), made)
  assert data.calls == 1 and made.digest == compute_digests(data().encoded)['train']
  assert sorted(path.name for path in tmp_path.iterdir()) == ['data.json', 'digests.json', 'lexicon.npz']


def test_threads_that_search_make_one_lexicon(monkeypatch):
  for descriptor in vars(TranslationSystem).values():
    if isinstance(descriptor, functools.cached_property):
      monkeypatch.setattr(descriptor, 'lock', contextlib.nullcontext(), raising=False)  # as since Python 3.12
  data = CountedData()

  def load():
    time.sleep(0.1)
    return data()

  system = TranslationSystem({}, None, None, None, load)
  with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda _: system.lexicon, range(4)))
  assert data.calls == 1


def test_a_deleted_lexicon_is_made_again_and_a_damaged_one_is_an_error(tmp_path):
  store_digest_of(CountedData(), tmp_path)
  made = load_or_make_lexicon(str(tmp_path), CountedData())
  (tmp_path / 'lexicon.npz').unlink()
  check_run_files(tmp_path)
  assert_equal(load_or_make_lexicon(str(tmp_path), CountedData()), made)
  check_run_files(tmp_path)
  (tmp_path / 'lexicon.npz').write_bytes(b'damaged')
  with pytest.raises(UserError, match=r'lexicon\.npz has changed'):
    check_run_files(tmp_path)


def test_a_lexicon_of_other_data_is_made_again(tmp_path):
  changed_data = CountedData('y x x')
  stored = load_or_make_lexicon(str(tmp_path), changed_data)
  store_digest_of(CountedData(), tmp_path)
  new = load_or_make_lexicon(str(tmp_path), CountedData())
  assert new.digest != stored.digest
  (tmp_path / 'lexicon.npz').unlink()
  with pytest.raises(UserError, match='was trained on other data'):
    load_or_make_lexicon(str(tmp_path), changed_data)


def test_a_lexicon_needs_no_folder_and_no_digests(tmp_path):
  data = CountedData()
  expected = load_or_make_lexicon(None, data)
  assert_equal(load_or_make_lexicon(str(tmp_path), data), expected)
  assert_equal(load_or_make_lexicon(str(tmp_path), data), expected)
  assert data.calls == 2


def test_a_lexicon_is_not_stored_in_a_folder_that_is_not_writable(tmp_path, monkeypatch):
  def fail(path, lexicon):
    raise PermissionError(13, 'Permission denied', str(path))

  monkeypatch.setattr(lexicons, 'save_lexicon', fail)
  assert load_or_make_lexicon(str(tmp_path), CountedData()).digest
  assert list(tmp_path.iterdir()) == []


def test_digests_that_cannot_be_read_are_an_error(tmp_path):
  (tmp_path / 'data.json').write_text('[]')
  with pytest.raises(UserError, match=r'cannot read .*data\.json'):
    load_or_make_lexicon(str(tmp_path), CountedData())
