"""Every reader of a hostile file ends in a result or in a UserError of one line; `make chaos` reads 2000 others."""

import numpy as np
import pytest

from attention_jax.data.files import read_arrays
from attention_jax.errors import UserError
from tests import fuzz


@pytest.mark.parametrize('name', fuzz.READERS)
@pytest.mark.filterwarnings('ignore')
def test_hostile_files_are_read_or_reported(name):
  fuzz.fuzz(name, 3)


def test_no_code_in_arrays_runs(tmp_path):
  path = tmp_path / 'a.npz'
  path.write_bytes(fuzz._pickled(str(tmp_path / 'executed')))
  with pytest.raises(UserError, match=r'cannot be read as an \.npz file'):
    read_arrays(str(path))
  assert not (tmp_path / 'executed').exists()
  np.load(path, allow_pickle=True)['images']
  assert (tmp_path / 'executed').exists()  # the payload works
