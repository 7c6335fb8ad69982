"""Folders behind URLs: states are committed whole and continued elsewhere, and failed uploads are repeated."""

import os
import shutil
import threading

import fsspec
import pytest
from attention_jax.training.remote_files import RemoteFiles
from attention_jax.training.remote_folder import MANIFEST, NEXT_STATE, STATE, RemoteFolder, Uploader
from attention_jax.training.remote_lock import LostLockError

from attention_jax.errors import UserError
from tests.systems.helpers import read_tree


def write_files(folder, files):
  for name, text in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, 'utf-8')


def read_files(folder):
  return {name: data.decode() for name, data in read_tree(folder).items() if name not in (STATE, NEXT_STATE)}


def names_behind(url):
  filesystem, root = fsspec.url_to_fs(url)
  return {path.removeprefix(root).lstrip('/') for path in filesystem.find(root)}


FIRST = {'metrics.jsonl': 'one\n', 'checkpoints/2/a': 'A', 'checkpoints/2/b': 'B', 'best/2/a': 'A'}
SECOND = {'metrics.jsonl': 'one\ntwo\n', 'checkpoints/4/a': 'C', 'best/2/a': 'A'}


def make_copy(url, folder, files=None):
  """A working copy with these files only."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  write_files(folder, files or {})
  return RemoteFolder(url, folder)


def test_another_machine_continues_from_the_last_state(url, tmp_path):
  first = make_copy(url, tmp_path / 'first', FIRST | {'.lock': '', '.x.1.part': 'unfinished'})
  first.push(first.local)
  assert names_behind(url) == {MANIFEST, 'metrics.jsonl'} | {
    f'objects/{digest}' for digest in first.digests().values()
  }  # equal files are stored once, and checkpoints have no names of their own
  lines = []
  second = make_copy(url, tmp_path / 'second')
  second.pull(lines.append)
  assert read_files(second.local) == FIRST and lines == [f'downloading 4 files of {url} to {second.local}']
  shutil.rmtree(second.local / 'checkpoints')
  write_files(second.local, SECOND)
  second.push(second.local)
  first.pull(lines.append)
  assert read_files(first.local) == SECOND | {'.lock': '', '.x.1.part': 'unfinished'}
  assert names_behind(url) == {MANIFEST, 'metrics.jsonl'} | {f'objects/{x}' for x in second.digests().values()}
  assert RemoteFiles(url).read_json(MANIFEST)['files'] == second.digests()


def test_a_killed_upload_leaves_the_previous_state(url, tmp_path, monkeypatch):
  first = make_copy(url, tmp_path / 'first', FIRST)
  first.push(first.local)
  write_files(first.local, SECOND)
  with monkeypatch.context() as patch:
    patch.setattr(RemoteFiles, 'write_json', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      first.push(first.local)
  second = make_copy(url, tmp_path / 'second')
  second.pull(print)
  assert read_files(second.local) == FIRST
  first.push(first.local)  # the same machine continues
  second.pull(print)
  assert read_files(second.local) == FIRST | SECOND


def test_an_upload_that_was_killed_after_its_commit_is_not_taken_for_that_of_another_machine(
  url, tmp_path, monkeypatch
):
  first = make_copy(url, tmp_path / 'first', FIRST)
  first.push(first.local)
  write_files(first.local, SECOND)
  write_json = RemoteFiles.write_json
  with monkeypatch.context() as patch:
    patch.setattr(RemoteFiles, 'write_json', lambda *args: write_json(*args) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
      first.push(first.local)
  write_files(first.local, {'metrics.jsonl': 'one\ntwo\nthree\n'})  # written after the snapshot
  lines = []
  first.pull(lines.append)
  assert not lines and read_files(first.local)['metrics.jsonl'] == 'one\ntwo\nthree\n'
  first.push(first.local)
  second = make_copy(url, tmp_path / 'second')
  second.pull(print)
  assert read_files(second.local) == read_files(first.local)
  assert names_behind(url) == {MANIFEST, 'metrics.jsonl'} | {f'objects/{x}' for x in second.digests().values()}


def test_what_killed_uploads_have_left_is_removed(url, tmp_path, monkeypatch):
  first = make_copy(url, tmp_path / 'train', FIRST)
  with Uploader(first, lambda: None, print) as upload:
    upload.finish()
  write_files(first.local, SECOND)
  with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
    patch.setattr(RemoteFiles, 'write_json', lambda *_: 1 / 0)
    first.push(first.local)
  for name in ('.train.12', '.train_1.12'):  # the second one of another working copy
    first.snapshot(tmp_path / name)
  second = make_copy(url, tmp_path / 'train')
  second.pull(print)
  assert len(names_behind(url)) > 2 + len(set(second.digests().values()))
  with Uploader(second, lambda: None, print):
    assert names_behind(url) == {MANIFEST, 'metrics.jsonl'} | {f'objects/{x}' for x in second.digests().values()}
  assert sorted(os.listdir(tmp_path)) == ['.train_1.12', 'train']
  assert read_files(second.local) == FIRST


def test_a_killed_download_leaves_no_folder_that_looks_like_a_checkpoint(url, tmp_path):
  first = make_copy(url, tmp_path / 'first', FIRST)
  first.push(first.local)
  reader = make_copy(url, tmp_path / 'reader')
  reader.pull(print, read_only=True)
  write_files(reader.local, {'checkpoints/2/.a.12.part': 'A'})
  shutil.rmtree(first.local / 'checkpoints')
  write_files(first.local, SECOND)
  first.push(first.local)
  reader.pull(print, read_only=True)
  assert os.listdir(reader.local / 'checkpoints') == ['4'] and read_files(reader.local) == SECOND


@pytest.mark.parametrize('method', ['upload', 'remove'])
def test_what_fails_around_a_commit_is_repeated(url, tmp_path, monkeypatch, method):
  folder = make_copy(url, tmp_path / 'first', FIRST)
  folder.push(folder.local)
  shutil.rmtree(folder.local / 'checkpoints')
  write_files(folder.local, SECOND)
  original = getattr(RemoteFiles, method)

  def fail(self, *args):
    if args[-1] == 'metrics.jsonl' or method == 'remove':
      raise UserError('no network')
    original(self, *args)

  with monkeypatch.context() as patch, pytest.raises(UserError, match='no network'):
    patch.setattr(RemoteFiles, method, fail)
    folder.push(folder.local)
  folder.push(folder.local)
  system, root = fsspec.url_to_fs(url)
  assert system.cat_file(f'{root}/metrics.jsonl') == b'one\ntwo\n'
  assert names_behind(url) == {MANIFEST, 'metrics.jsonl'} | {f'objects/{x}' for x in folder.digests().values()}
  lines = []
  folder.pull(lines.append)
  assert not lines and RemoteFiles(url).read_json(MANIFEST)['files'] == folder.digests()


def test_changes_that_were_never_uploaded_are_moved_aside(url, tmp_path):
  first = make_copy(url, tmp_path / 'first', FIRST)
  first.push(first.local)
  second = make_copy(url, tmp_path / 'second')
  second.pull(print)
  write_files(first.local, {'metrics.jsonl': 'lost?\n'})
  first.pull(print)  # no other machine has continued the run: the copy is unchanged
  assert read_files(first.local)['metrics.jsonl'] == 'lost?\n'
  write_files(second.local, SECOND)
  second.push(second.local)
  lines = []
  first.pull(lines.append)
  aside = tmp_path / 'first-aside-1'
  assert lines[0].endswith(f'changes or is an incomplete download; the copy is moved to {aside}')
  assert read_files(aside)['metrics.jsonl'] == 'lost?\n' and read_files(first.local) == FIRST | SECOND

  aside.rename(tmp_path / 'first-aside-2')  # number 1 is free again, and 2 is not
  write_files(first.local, {'metrics.jsonl': 'lost again?\n'})
  write_files(second.local, FIRST)
  second.push(second.local)
  first.pull(print)
  assert read_files(aside)['metrics.jsonl'] == 'lost again?\n'


def test_changed_objects_and_manifests_are_errors(url, tmp_path):
  first = make_copy(url, tmp_path / 'first', FIRST)
  first.push(first.local)
  filesystem, root = fsspec.url_to_fs(url)
  digest = first.digests()['checkpoints/2/b']
  filesystem.pipe_file(f'{root}/objects/{digest}', b'changed')
  second = make_copy(url, tmp_path / 'second')
  with pytest.raises(UserError, match=rf'{digest}, the content of checkpoints/2/b, has changed since'):
    second.pull(print)
  for files in ({'../x': 'a'}, {'/x': 'a'}, {'x': '../a'}, 5):
    RemoteFiles(url).write_json(MANIFEST, {'id': '1', 'files': files})
    with pytest.raises(UserError, match=f'{MANIFEST} is not the list of files of a run'):
      second.pull(print)


def test_programs_that_read_upload_only_new_files(url, tmp_path):
  first = make_copy(url, tmp_path / 'first', FIRST)
  first.push(first.local)
  reader = make_copy(url, tmp_path / 'reader')
  reader.pull(print, read_only=True)
  before = reader.digests()
  write_files(reader.local, {'attention.png': 'picture', 'metrics.jsonl': 'changed'})
  assert reader.push_outputs(before) == ['attention.png'] and reader.push_outputs(reader.digests()) == []
  filesystem, root = fsspec.url_to_fs(url)
  assert (
    filesystem.cat_file(f'{root}/attention.png') == b'picture'
    and filesystem.cat_file(f'{root}/metrics.jsonl') == b'one\n'
  )


def test_uploads_are_snapshots_and_failed_uploads_are_repeated(url, tmp_path, monkeypatch):
  folder = make_copy(url, tmp_path / 'first', FIRST)
  lines = []
  push = RemoteFolder.push
  release = threading.Event()

  def wait_and_push(self, snapshot):
    release.wait()
    if 'fails' in lines:
      raise UserError('no network')
    push(self, snapshot)

  monkeypatch.setattr(RemoteFolder, 'push', wait_and_push)
  with Uploader(folder, lambda: None, lines.append) as upload:
    upload()
    write_files(folder.local, {'metrics.jsonl': 'later\n'})  # while the snapshot is uploaded
    release.set()
    upload._wait()
    filesystem, root = fsspec.url_to_fs(url)
    assert filesystem.cat_file(f'{root}/metrics.jsonl') == b'one\n'
    lines.append('fails')
    upload()
    upload._wait()
    assert lines[1:] == ['no network; uploading again after the next checkpoint']
    lines.clear()
    upload.finish()
  assert filesystem.cat_file(f'{root}/metrics.jsonl') == b'later\n' and os.listdir(tmp_path) == ['first']
  lines.append('fails')
  message = r'no network; .*first has all files of the run; rerun the same command'
  with pytest.raises(UserError, match=message), Uploader(folder, lambda: None, lines.append) as upload:
    upload.finish()
  assert lines == ['fails']  # the error is raised and not logged


def test_a_lock_that_cannot_be_read_delays_an_upload_and_a_lost_lock_ends_training(url, tmp_path):
  folder = make_copy(url, tmp_path / 'first', FIRST)
  lines = []
  errors = [UserError('cannot read lock.json'), None, UserError('cannot read lock.json')]

  def check():
    if error := errors.pop(0):
      raise error

  message = r'^cannot read lock\.json; .*first has all files of the run; rerun the same command to upload them$'
  with pytest.raises(UserError, match=message), Uploader(folder, check, lines.append) as upload:
    upload()
    assert lines == ['cannot read lock.json; uploading again after the next checkpoint'] and not names_behind(url)
    upload()
    upload._wait()
    assert MANIFEST in names_behind(url)
    upload.finish()
  errors += [LostLockError('another process trains in it')] * 2
  with pytest.raises(LostLockError, match=r'^another process trains in it$'), Uploader(folder, check, print) as upload:
    upload()


def test_the_state_at_an_error_is_uploaded(url, tmp_path):
  folder = make_copy(url, tmp_path / 'first', FIRST)
  with pytest.raises(UserError, match='not finite'), Uploader(folder, lambda: None, print):
    write_files(folder.local, {'metrics.jsonl': 'later\n'})
    raise UserError('the loss is not finite')
  filesystem, root = fsspec.url_to_fs(url)
  assert filesystem.cat_file(f'{root}/metrics.jsonl') == b'later\n'
