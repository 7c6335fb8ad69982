"""The commits that are stored with a run and its results."""

import subprocess

import pytest

from attention_jax.systems.provenance import code_version, read_versions, store_version


@pytest.fixture
def repository(tmp_path):
  """A repository with a commit of a.py."""
  (tmp_path / 'a.py').write_text('1')
  for arguments in ('init', 'add .', '-c user.name=a -c user.email=a@example.org commit -m first'):
    subprocess.run(['git', *arguments.split()], cwd=tmp_path, check=True, capture_output=True)
  yield tmp_path
  code_version.cache_clear()


def test_the_commit_and_uncommitted_changes_are_named(repository):
  command = ['git', 'rev-parse', 'HEAD']
  commit = subprocess.run(command, cwd=repository, capture_output=True, text=True).stdout[:12]
  assert code_version(repository) == commit
  for name, version in (('untracked.txt', commit), ('a.py', f'{commit}+changes')):
    (repository / name).write_text('2')
    code_version.cache_clear()
    assert code_version(repository) == version


def test_files_that_git_cannot_compare_count_as_changed(repository):
  (repository / '.git' / 'index').write_bytes(b'damaged')  # `git status` fails
  assert code_version(repository).endswith('+changes')


def test_the_repository_of_another_project_is_not_named(repository):
  (repository / 'site-packages').mkdir()
  version = code_version(repository / 'site-packages')
  assert version == 'unknown' or version.startswith('version ')


def test_each_version_that_trains_in_a_run_folder_is_stored_once(tmp_path):
  lines = []
  assert read_versions(tmp_path) == []
  for _ in range(2):
    store_version(tmp_path, lines.append)
  assert read_versions(tmp_path) == [code_version()] and not lines
  (tmp_path / 'commits.txt').write_text('0123456789ab\n')
  store_version(tmp_path, lines.append)
  assert read_versions(tmp_path) == ['0123456789ab', code_version()]
  assert lines == [f'the code of this run was 0123456789ab and is now {code_version()}']
