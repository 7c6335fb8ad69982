"""Data behind URLs of the memory file system of fsspec, and URLs that cannot be read."""

import gzip

import fsspec
import numpy as np
import pytest
from PIL import Image

from attention_jax.data import tasks
from attention_jax.data.files import read_arrays, read_lines
from attention_jax.errors import UserError
from attention_jax.systems.captioning.images import list_images, read_image


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
  corpora = tasks.load_corpora(tasks.TranslationDataConfig(spec, folder))
  assert corpora['train'].source == ['eins zwei', 'drei']
  assert corpora['validation'].target == ['one two', 'three']
  spec = f"text(train=('{folder}/train.de', '{folder}/train.en.gz'))"
  assert tasks.load_corpora(tasks.TranslationDataConfig(spec, 'data'))['train'].target == ['one two', 'three']


def test_arrays_and_images_are_read_from_urls(folder):
  arrays = {'x_train': np.arange(6).reshape(2, 3)}
  with fsspec.open(f'{folder}/a.npz', 'wb') as file:
    np.savez(file, **arrays)
  with fsspec.open(f'{folder}/a.png', 'wb') as file:
    Image.new('RGB', (4, 4), 'red').save(file, 'PNG')
  np.testing.assert_array_equal(read_arrays(f'{folder}/a.npz')['x_train'], arrays['x_train'])
  assert (read_image(f'{folder}/a.png', 2) == [255, 0, 0]).all()
  assert list_images(folder) == ['a.png']
  with pytest.raises(UserError, match=r'^memory://corpus/b.npz: no such file$'):
    read_arrays(f'{folder}/b.npz')
  with pytest.raises(UserError, match=r'^row 1: memory://corpus/b.png: no such file$'):
    read_image(f'{folder}/b.png', 2, 'row 1: ')


@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('memory://corpus/missing.txt', r'^memory://corpus/missing.txt: no such file$'),
    ('nowhere://corpus/a.txt', r'^nowhere://corpus/a.txt: cannot be read \(.*nowhere.*\)$'),
    ('http://127.0.0.1:1/a.txt', r'^http://127.0.0.1:1/a.txt: cannot be read \(.*\)$'),  # no server listens there
    ('memory://corpus/a.txt.gz', r'^memory://corpus/a.txt.gz: not a whole gzip file \(.*\)$'),
  ],
)
def test_urls_that_cannot_be_read_are_reported_in_one_line(path, message, folder):
  write(f'{folder}/a.txt.gz', b'no gzip')
  with pytest.raises(UserError, match=message):
    read_lines(path)
