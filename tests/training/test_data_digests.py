"""Digests of the data: any change is found and named, and equal data are equal."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.errors import UserError
from attention_jax.training.digests import check_digests, compute_digests, store_digests

SPLIT = EncodedCorpus(*(np.arange(n, dtype=np.int32) for n in (6, 3, 4, 3)))
CHANGED = {
  'value': SPLIT._replace(target=np.array([0, 1, 2, 4], np.int32)),
  'order': SPLIT._replace(source=SPLIT.source[::-1]),
  'type': SPLIT._replace(source=SPLIT.source.astype(np.int64)),
  'shape': SPLIT._replace(source=SPLIT.source.reshape(2, 3)),
  'empty': SPLIT._replace(source=SPLIT.source[:0]),
}


def test_equal_data_have_equal_digests(tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  check_digests(tmp_path, compute_digests({'test': SPLIT, 'train': SPLIT._replace(source=SPLIT.source.copy())}))
  assert [path.name for path in tmp_path.iterdir()] == ['data.json']


def test_values_of_any_type_are_covered():
  arrays = {'bfloat16': jnp.arange(3, dtype=jnp.bfloat16), 'number': np.float32(1), 'text': np.array(['a', 'b'])}
  digests = compute_digests(arrays | {'changed': jnp.arange(1, 4, dtype=jnp.bfloat16), 'empty': np.zeros((0, 3))})
  assert len(set(digests.values())) == 5
  assert (digests['number'], digests['text']) == ('e8b1e42dc5326c85', 'fd8af547faff1454')  # as in earlier versions


def test_a_run_without_digests_is_logged(tmp_path):
  lines = []
  check_digests(tmp_path, compute_digests({'train': SPLIT}), lines.append)
  assert len(lines) == 1 and 'data.json does not exist: cannot check' in lines[0]


@pytest.mark.parametrize('change', CHANGED)
def test_a_changed_split_is_named(change, tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  message = r'trained on other data: test \(or the vocabulary\) changed since; restore the earlier data, '
  with pytest.raises(UserError, match=message):
    check_digests(tmp_path, compute_digests({'train': SPLIT, 'test': CHANGED[change]}))


def test_missing_and_new_splits_are_named(tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  with pytest.raises(UserError, match='other data: test, unseen '):
    check_digests(tmp_path, compute_digests({'train': SPLIT, 'unseen': SPLIT}))


@pytest.mark.parametrize('content', ['', '[1]', '{"train": '])
def test_an_unreadable_file_is_an_error(content, tmp_path):
  (tmp_path / 'data.json').write_text(content)
  with pytest.raises(UserError, match=r'cannot read .*data\.json'):
    check_digests(tmp_path, compute_digests({'train': SPLIT}))
