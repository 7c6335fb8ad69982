"""Lines and arrays are read from files as they were written; errors are one line with the path."""

import gzip
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.files import read_arrays, read_lines
from attention_jax.errors import UserError
from tests.data.helpers import LINE, error_message


@pytest.mark.parametrize('read', [read_lines, read_arrays])
def test_pipes_and_devices_are_not_read(read, tmp_path):
  os.mkfifo(tmp_path / 'pipe')
  for path in (tmp_path / 'pipe', '/dev/zero'):
    with pytest.raises(UserError, match=f'{path}: is a pipe or a device, expected a file'):
      read(str(path))


@given(st.lists(LINE, min_size=1).filter(any), st.sampled_from(['\n', '\r\n']), st.booleans(), st.booleans())
def test_read_lines_returns_the_written_lines(tmp_path_factory, lines, end, has_bom, compress):
  path = tmp_path_factory.mktemp('text') / ('a.gz' if compress else 'a')
  data = (('\ufeff' if has_bom else '') + end.join(lines) + end).encode()
  path.write_bytes(gzip.compress(data) if compress else data)
  assert read_lines(str(path)) == lines


def test_the_last_line_end_is_optional(write):
  assert read_lines(write('a', 'x\ny')) == read_lines(write('b', 'x\ny\n')) == ['x', 'y']


def test_missing_file_is_reported(write, tmp_path, monkeypatch):
  write('train.en', 'x\n')
  assert error_message(read_lines, 'trian.en') == "trian.en: no such file (did you mean 'train.en'?)"
  monkeypatch.setenv('HOME', str(tmp_path))
  assert error_message(read_lines, '~/trian.en') == "~/trian.en: no such file (did you mean '~/train.en'?)"
  assert error_message(read_lines, 'nowhere/a') == "nowhere/a: no such file (there is no folder 'nowhere')"


def test_a_missing_file_of_a_folder_that_cannot_be_listed_is_reported(write, monkeypatch):
  def deny(folder):
    raise PermissionError(13, 'Permission denied')

  write('train.en', 'x\n')
  monkeypatch.setattr('os.listdir', deny)
  assert error_message(read_lines, 'trian.en') == 'trian.en: no such file'
  assert error_message(read_arrays, 'trian.npz') == 'trian.npz: no such file'


def test_a_tilde_stands_for_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'lines').write_text('x\n')
  np.savez(tmp_path / 'arrays.npz', a=np.arange(3))
  assert read_lines('~/lines') == ['x'] and read_arrays('~/arrays.npz')['a'].tolist() == [0, 1, 2]


def test_unreadable_file_is_reported(write, monkeypatch):
  def deny(path, mode):
    raise PermissionError(13, 'Permission denied')

  write('a', 'x\n')
  monkeypatch.setattr('builtins.open', deny)
  assert error_message(read_lines, 'a') == "'a': cannot be read (Permission denied)"


# name, content -> the begin of the message
DAMAGED = [
  ('a', b'', 'a: the file is empty'),
  ('b', '\ufeff'.encode(), 'b: the file is empty'),
  ('c', b'good\nsch\xf6n\n', 'c:2: not UTF-8 (byte 0xf6, number 4 of the line); convert the file to UTF-8'),
  ('d', b'\xff\xfea', 'd:1: not UTF-8 (byte 0xff, number 1 of the line)'),
  ('e.gz', gzip.compress(b'some text\n' * 99)[:-9], 'e.gz: not a whole gzip file ('),
  ('f.gz', b'plain text', 'f.gz: not a whole gzip file ('),
]


def test_damaged_files_are_reported(write, tmp_path):
  assert error_message(read_lines, str(tmp_path)) == f'{tmp_path}: is a directory, expected a file'
  for name, content, message in DAMAGED:
    assert error_message(read_lines, write(name, content)).startswith(message)
