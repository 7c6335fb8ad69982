"""Data behind URLs, in the file system of fsspec that is in memory."""

import gzip

import fsspec
import pytest

from attention_jax.data import tasks
from attention_jax.data.files import read_lines
from attention_jax.errors import UserError


@pytest.fixture
def folder():
  """The URL of an empty folder."""
  system = fsspec.filesystem('memory')
  yield 'memory://corpus'
  system.rm('/corpus', recursive=True)


def write(path, data):
  with fsspec.open(path, 'wb') as file:
    file.write(data)


def test_a_task_is_read_from_a_folder_behind_a_url(folder):
  for split in ('train', 'dev'):
    write(f'{folder}/{split}.de', b'eins zwei\ndrei\n')
    write(f'{folder}/{split}.en.gz', gzip.compress(b'one two\nthree\n'))
  spec = "text(source='de', target='en', train='train', validation='dev')"
  corpora = tasks.load_corpora({'task': spec, 'folder': folder})
  assert corpora['train'].source == ['eins zwei', 'drei']
  assert corpora['validation'].target == ['one two', 'three']


@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('memory://corpus/missing.txt', r'^memory://corpus/missing.txt: no such file$'),
    ('nowhere://corpus/a.txt', r'^nowhere://corpus/a.txt: cannot be read \(.*nowhere.*\)$'),
    ('memory://corpus/a.txt.gz', r'^memory://corpus/a.txt.gz: not a whole gzip file'),
  ],
)
def test_what_cannot_be_read_is_one_line(path, message, folder):
  write(f'{folder}/a.txt.gz', b'no gzip')
  with pytest.raises(UserError, match=message):
    read_lines(path)
