"""Features of images: every image by its name, nothing half written, and a captioner's reader takes them."""

import contextlib
import sys
import types

import numpy as np
import pytest
from PIL import Image

from attention_jax.data.features import input_size, load_pretrained, patch_grid, write_features
from attention_jax.data.pictures import list_images, load_pictures
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
  names, counts = list_images(folder / 'images'), []
  assert names == sorted(COLOURS)
  shape = write_features(
    folder / 'grid.npz', folder / 'images', names, network, size=8, batch=2, on_batch=counts.append
  )
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
    write_features(folder / 'grid.npz', folder / 'images', list_images(folder / 'images'), network, size=8, batch=1)
  with pytest.raises(UserError, match=r'the network gives \[1\]; expected \[1, rows, columns, features\]'):
    write_features(folder / 'grid.npz', folder / 'images', ['a.png'], lambda x: x[:, 0, 0, 0], size=8)
  assert not list(folder.glob('grid*'))
  (folder / 'none').mkdir()
  with pytest.raises(UserError, match='none: no images in it'):
    write_features(folder / 'grid.npz', folder / 'none', list_images(folder / 'none'), network, size=8)


def test_pictures_are_as_large_as_in_training():
  told = lambda **sizes: types.SimpleNamespace(**sizes)
  assert input_size(told(crop_size={'height': 224, 'width': 224}, size={'shortest_edge': 256})) == 224
  assert input_size(told(crop_size=None, size={'height': 384, 'width': 384})) == 384
  assert input_size(told(size={'shortest_edge': 288})) == 288


@pytest.mark.parametrize('others', [0, 1, 5])
def test_tokens_of_patches_are_the_grid(others):
  grid = np.arange(2 * 9 * 4.0).reshape(2, 3, 3, 4)
  tokens = np.concatenate([np.full((2, others, 4), -1.0), grid.reshape(2, 9, 4)], axis=1)
  assert np.array_equal(patch_grid(tokens), grid)


class Network:
  """As transformers gives one: channels first, in the units of its training."""

  def __init__(self, of_patches: bool):
    self.of_patches = of_patches

  def eval(self):
    return self

  def __call__(self, pixel_values):
    if pixel_values.shape[-1] != 4:
      raise ValueError("Input image size (8*8) doesn't\nmatch model (4*4).")
    found = pixel_values.reshape(len(pixel_values), 3, 2, 2, 2, 2).mean((3, 5))  # [B, 3, rows, columns]
    if self.of_patches:
      tokens = found.reshape(len(found), 3, 4).transpose(0, 2, 1)
      found = np.concatenate([np.full_like(tokens[:, :1], 9.0), tokens], axis=1)  # the class token comes first
    return types.SimpleNamespace(last_hidden_state=types.SimpleNamespace(numpy=lambda: found))


@pytest.mark.parametrize('of_patches', [False, True])
def test_a_network_of_transformers_gives_grids(of_patches, monkeypatch):
  told = types.SimpleNamespace(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.25, 0.5], size={'height': 4, 'width': 4})

  def model(name):
    if name != 'here':
      raise OSError(f'{name} is not\na folder')
    return Network(of_patches)

  loads = lambda made: types.SimpleNamespace(from_pretrained=made)
  fake = types.SimpleNamespace(AutoModel=loads(model), AutoImageProcessor=loads(lambda name: told))
  torch = types.SimpleNamespace(inference_mode=contextlib.nullcontext, from_numpy=lambda x: x)
  monkeypatch.setitem(sys.modules, 'transformers', fake)
  monkeypatch.setitem(sys.modules, 'torch', torch)
  network, size = load_pretrained('here')
  pictures = np.zeros((2, 4, 4, 3), np.uint8)
  pictures[1, :2, 2:] = [255, 0, 51]
  found = network(pictures)
  assert size == 4 and found.shape == (2, 2, 2, 3)
  np.testing.assert_allclose(found[1, 0, 1], [1, -2, -0.6], atol=1e-6)
  np.testing.assert_allclose(found[1, 1], [[-1, -2, -1]] * 2, atol=1e-6)
  with pytest.raises(UserError, match=r'here: does not take pictures of \(8, 8\) pixels \(Input image size'):
    network(np.zeros((1, 8, 8, 3), np.uint8))
  with pytest.raises(UserError, match=r'there: no network of images that transformers has \(there is not a folder\)'):
    load_pretrained('there')
  monkeypatch.setitem(sys.modules, 'transformers', None)
  with pytest.raises(UserError, match='transformers is not installed; possible: pip install torch transformers'):
    load_pretrained('here')
