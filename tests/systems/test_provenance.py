"""The commits that are stored with a run and its results."""

import subprocess

from attention_jax.systems.provenance import code_version, read_versions, store_version


def git(folder, *arguments):
  identity = ['-c', 'user.name=a', '-c', 'user.email=a@example.org']
  subprocess.run(['git', *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit_and_uncommitted_changes_are_named(tmp_path):
  git(tmp_path, 'init')
  (tmp_path / 'a.py').write_text('1')
  git(tmp_path, 'add', '.')
  git(tmp_path, 'commit', '-m', 'first')
  commit = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
  assert code_version(tmp_path) == commit[:12]
  code_version.cache_clear()
  (tmp_path / 'untracked.txt').write_text('x')
  assert code_version(tmp_path) == commit[:12]
  code_version.cache_clear()
  (tmp_path / 'a.py').write_text('2')
  assert code_version(tmp_path) == f'{commit[:12]}+changes'
  code_version.cache_clear()


def test_files_that_git_cannot_compare_count_as_changed(tmp_path):
  git(tmp_path, 'init')
  (tmp_path / 'a.py').write_text('1')
  git(tmp_path, 'add', '.')
  git(tmp_path, 'commit', '-m', 'first')
  (tmp_path / '.git' / 'index').write_bytes(b'damaged')  # `git status` fails
  assert code_version(tmp_path).endswith('+changes')
  code_version.cache_clear()


def test_the_repository_of_another_project_is_not_named(tmp_path):
  git(tmp_path, 'init')
  git(tmp_path, 'commit', '--allow-empty', '-m', 'first')
  (tmp_path / 'site-packages').mkdir()
  version = code_version(tmp_path / 'site-packages')
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
