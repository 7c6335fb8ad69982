"""Digests of files: changed and missing files are reported together, and a file that is being written has no digest."""

import pytest

from attention_jax.errors import UserError
from attention_jax.training.digests import (
  FILE_DIGESTS,
  add_file_digests,
  check_file_digests,
  drop_file_digests,
)


@pytest.fixture
def folder(tmp_path):
  for name in 'abc':
    (tmp_path / name).write_text(name)
  add_file_digests(tmp_path, 'ab')  # the files a and b
  add_file_digests(tmp_path, 'c')
  return tmp_path


def test_unchanged_files_and_folders_without_digests_are_no_errors(folder):
  check_file_digests(folder)
  check_file_digests(folder / 'none')
  check_file_digests(folder / 'a')


def test_all_changes_are_named(folder):
  (folder / 'a').write_text('x')
  (folder / 'b').unlink()
  (folder / 'c').unlink()
  (folder / 'c').mkdir()
  message = r'a has changed, b is missing, c cannot be read \(Is a directory\); restore .* or delete .*digests\.json'
  with pytest.raises(UserError, match=message):
    check_file_digests(folder)
  (folder / FILE_DIGESTS).unlink()
  check_file_digests(folder)


def test_files_that_are_being_written_are_not_checked(folder):
  drop_file_digests(folder, ['a', 'not yet'])
  (folder / 'a').write_text('x')
  check_file_digests(folder)
  add_file_digests(folder, ['a'])
  (folder / 'a').write_text('y')
  with pytest.raises(UserError, match=r'stored it: a has changed;'):
    check_file_digests(folder)
  drop_file_digests(folder)
  (folder / 'b').unlink()
  check_file_digests(folder)


@pytest.mark.parametrize('content', ['', '[1]', '{"a": 1', '\udcff'])
def test_damaged_digests_are_an_error(folder, content):
  (folder / FILE_DIGESTS).write_bytes(content.encode('utf-8', 'surrogateescape'))
  with pytest.raises(UserError, match=r'cannot read .*digests\.json: .*; delete it to skip the check'):
    check_file_digests(folder)
