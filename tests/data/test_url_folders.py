"""Copies in the cache of data sets behind URLs: only new and changed files are downloaded."""

import uuid
from pathlib import Path

import fsspec
import pytest

from attention_jax.data import url_folders
from attention_jax.data.url_folders import local_copy
from attention_jax.errors import UserError


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """A file system in memory and the URL of a folder with two files."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  root = f'/{uuid.uuid4().hex}/set'
  system = fsspec.filesystem('memory')
  system.pipe({f'{root}/one': b'1', f'{root}/below/two': b'2'})
  return system, root, f'memory:/{root}'


def read(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in Path(folder).rglob('*')
    if path.is_file() and not path.name.startswith('.')
  }


def test_a_path_is_its_own_copy(tmp_path):
  assert local_copy(str(tmp_path)) == str(tmp_path) and local_copy('') == ''


def test_only_changes_are_downloaded(bucket, capfd):
  system, root, url = bucket
  copy = local_copy(url)
  assert read(copy) == {'one': b'1', 'below/two': b'2'} and 'downloading 2 files of ' in capfd.readouterr().err
  assert local_copy(f'{url}/') == copy and not capfd.readouterr().err
  system.pipe({f'{root}/below/two': b'new', f'{root}/three': b'3'})
  system.rm_file(f'{root}/one')
  assert read(local_copy(url)) == {'below/two': b'new', 'three': b'3'}
  assert 'downloading 2 files of ' in capfd.readouterr().err
  Path(copy, 'three').unlink()
  assert read(local_copy(url)) == {'below/two': b'new', 'three': b'3'}
  assert 'downloading 1 file of ' in capfd.readouterr().err


def test_folders_that_are_removed_leave_no_empty_copy(bucket):
  """tfds would take an empty folder for a version of a data set."""
  system, root, url = bucket
  copy = Path(local_copy(url))
  system.rm(f'{root}/below', recursive=True)
  system.pipe({f'{root}/above/two': b'2'})
  local_copy(url)
  assert not (copy / 'below').exists()
  system.rm(f'{root}/above', recursive=True)
  system.pipe({f'{root}/above': b'now a file'})
  assert read(local_copy(url)) == {'one': b'1', 'above': b'now a file'}


def test_a_part_is_downloaded_alone(bucket):
  *_, url = bucket
  assert read(local_copy(url, 'below')) == {'below/two': b'2'}


def test_a_download_continues_after_the_last_copied_file(bucket, monkeypatch, capfd):
  system, _, url = bucket
  get_file = system.get_file

  def fail_at_two(path, target):
    if path.endswith('two'):
      raise OSError('no network')
    get_file(path, target)

  with monkeypatch.context() as patch, pytest.raises(UserError, match=r'cannot copy memory://.*: no network'):
    patch.setattr(system, 'get_file', fail_at_two)
    patch.setattr(system, 'find', lambda root: [f'{root}/one', f'{root}/below/two'])
    local_copy(url)
  capfd.readouterr()
  assert read(local_copy(url)) == {'one': b'1', 'below/two': b'2'}
  assert 'downloading 1 file of ' in capfd.readouterr().err


@pytest.mark.parametrize(
  ('url', 'message'),
  [('memory://none/set', 'holds no files; expected a data set'), ('nonsense://x/y', 'cannot copy nonsense://x/y')],
)
def test_folders_that_cannot_be_read_are_reported(url, message, bucket):
  with pytest.raises(UserError, match=message):
    local_copy(url)


def test_a_full_disk_is_reported_in_one_line(bucket, monkeypatch):
  def fail(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(url_folders, 'write_text', fail)
  with pytest.raises(UserError, match=r'cannot copy memory://.*: No space left on device$'):
    local_copy(bucket[2])
