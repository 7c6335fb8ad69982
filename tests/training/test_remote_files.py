"""File systems behind URLs that cannot be used are reported in one line."""

import pytest
from attention_jax.training.remote_files import RemoteFiles
from attention_jax.training.remote_lock import LOCK

from attention_jax.errors import UserError


@pytest.mark.parametrize(
  ('url', 'message'),
  [
    ('unknown://a/b', r'unknown://a/b: Protocol not known: unknown'),
    ('gs://bucket/run', r'gs://bucket/run: Please install gcsfs'),
    ('gs://', r"'gs://' names no folder; expected a URL such as gs://bucket/run"),
    ('file:///', r"'file:///' names no folder"),
  ],
)
def test_file_systems_that_cannot_be_used_are_errors(url, message):
  with pytest.raises(UserError, match=message) as error:
    RemoteFiles(url)
  assert '\n' not in str(error.value)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / 'file').write_text('')
  files = RemoteFiles(f'file://{tmp_path}/file')
  with pytest.raises(
    UserError, match=rf'^cannot write file://{tmp_path}/file/lock.json: .*(File exists|Not a directory)'
  ):
    files.write_json(LOCK, {})
