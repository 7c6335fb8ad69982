"""Features of images: every image by its name, nothing half written, and a captioner's reader takes them."""

import types

import numpy as np
import pytest
from PIL import Image

from attention_jax.data.features import of_tokens, trained_size, write_features
from attention_jax.data.pictures import images_of, load_pictures
from attention_jax.errors import UserError

COLOURS = {'a.png': 0, 'b.JPG': 100, 'c.png': 200}


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'images').mkdir()
  for name, red in COLOURS.items():
    Image.new('RGB', (12, 8), (red, 0, 0)).save(tmp_path / 'images' / name)
  (tmp_path / 'images' / 'notes.txt').write_text('no image')
  rows = ''.join(f'{name},a picture,train\n' for name in COLOURS)
  (tmp_path / 'captions.csv').write_text(f'image,caption,split\n{rows}')
  return tmp_path


def network(pictures):
  """The mean colour of each quarter."""
  return pictures.reshape(len(pictures), 2, 4, 2, 4, 3).mean((2, 4))


def test_a_captioner_reads_what_is_written(folder):
  names, counts = images_of(folder / 'images'), []
  assert names == sorted(COLOURS)
  shape = write_features(
    folder / 'grid.npz', folder / 'images', names, network, size=8, batch=2, done=counts.append
  )  # fmt: skip
  assert shape == (2, 2, 3) and counts == [2, 1]
  task = "captions(images='images', captions='captions.csv', features='grid.npz')"
  pictures = load_pictures({'task': task, 'folder': str(folder)})['train']
  assert pictures.pictures.shape == (3, 2, 2, 3) and pictures.pictures.dtype == np.float32
  for name, grid, file in zip(pictures.names, pictures.pictures, pictures.files, strict=True):
    np.testing.assert_allclose(grid[..., 0], COLOURS[name], atol=2)
    assert file == str(folder / 'images' / name)


def test_nothing_is_half_written(folder):
  (folder / 'images' / 'd.png').write_bytes(b'no image')
  with pytest.raises(UserError, match=r'd\.png: not an image that can be read'):
    write_features(folder / 'grid.npz', folder / 'images', images_of(folder / 'images'), network, size=8, batch=1)
  with pytest.raises(UserError, match=r'the network gives \[1\]; expected \[1, rows, columns, features\]'):
    write_features(folder / 'grid.npz', folder / 'images', ['a.png'], lambda x: x[:, 0, 0, 0], size=8)
  assert not list(folder.glob('grid*'))
  (folder / 'none').mkdir()
  with pytest.raises(UserError, match='none: no images in it'):
    write_features(folder / 'grid.npz', folder / 'none', images_of(folder / 'none'), network, size=8)


def test_pictures_are_as_large_as_in_training():
  told = lambda **sizes: types.SimpleNamespace(**sizes)
  assert trained_size(told(crop_size={'height': 224, 'width': 224}, size={'shortest_edge': 256})) == 224
  assert trained_size(told(crop_size=None, size={'height': 384, 'width': 384})) == 384
  assert trained_size(told(size={'shortest_edge': 288})) == 288


@pytest.mark.parametrize('others', [0, 1, 5])
def test_tokens_of_patches_are_the_grid(others):
  grid = np.arange(2 * 9 * 4.0).reshape(2, 3, 3, 4)
  tokens = np.concatenate([np.full((2, others, 4), -1.0), grid.reshape(2, 9, 4)], axis=1)
  assert np.array_equal(of_tokens(tokens), grid)
