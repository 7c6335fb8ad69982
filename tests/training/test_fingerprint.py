"""What a run began with is told from everything else."""

import numpy as np
import pytest

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.errors import UserError
from attention_jax.training.fingerprint import check_digests, compute_digests, store_digests

SPLIT = EncodedCorpus(*(np.arange(n, dtype=np.int32) for n in (6, 3, 4, 3)))
OTHERS = {
  'a number': SPLIT._replace(target=np.array([0, 1, 2, 4], np.int32)),
  'another order': SPLIT._replace(source=SPLIT.source[::-1]),
  'a type': SPLIT._replace(source=SPLIT.source.astype(np.int64)),
  'a shape': SPLIT._replace(source=SPLIT.source.reshape(2, 3)),
  'nothing there': SPLIT._replace(source=SPLIT.source[:0]),
}


def test_the_same_is_the_same(tmp_path):
  check_digests(tmp_path, compute_digests({'train': SPLIT}))  # of a run that stored none yet
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  check_digests(tmp_path, compute_digests({'test': SPLIT, 'train': SPLIT._replace(source=SPLIT.source.copy())}))


@pytest.mark.parametrize('what', OTHERS)
def test_what_differs_is_named(what, tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  with pytest.raises(UserError, match=r'begun with other data: test \(or the vocabulary\) changed since; possible: '):
    check_digests(tmp_path, compute_digests({'train': SPLIT, 'test': OTHERS[what]}))


def test_splits_that_come_and_go(tmp_path):
  store_digests(tmp_path, compute_digests({'train': SPLIT, 'test': SPLIT}))
  with pytest.raises(UserError, match='other data: test, unseen '):
    check_digests(tmp_path, compute_digests({'train': SPLIT, 'unseen': SPLIT}))


@pytest.mark.parametrize('content', ['', '[1]', '{"train": '])
def test_a_file_that_cannot_be_read(content, tmp_path):
  (tmp_path / 'data.json').write_text(content)
  with pytest.raises(UserError, match=r'cannot read .*data\.json'):
    check_digests(tmp_path, compute_digests({'train': SPLIT}))
