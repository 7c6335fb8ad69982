"""Features of images: files that the captions task reads, atomic writes, and networks of transformers."""

import contextlib
import sys
import types

import numpy as np
import pytest
from PIL import Image

from attention_jax.errors import UserError
from attention_jax.systems.captioning import features
from attention_jax.systems.captioning.config import CaptioningDataConfig
from attention_jax.systems.captioning.data import load_pictures
from attention_jax.systems.captioning.images import list_images

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


def write(folder, names=None, network=network, **options):
  """Writes the features of images of a folder, by default of all images."""
  names = list_images(folder / 'images') if names is None else names
  return features.write_features(folder / 'grid.npz', folder / 'images', names, network, size=8, **options)


def test_written_features_are_read_by_the_captions_task(folder):
  batch_sizes = []
  assert list_images(folder / 'images') == sorted(COLOURS)
  assert write(folder, batch=2, on_batch=batch_sizes.append) == (2, 2, 3) and batch_sizes == [2, 1]
  task = "captions(images='images', captions='captions.csv', features='grid.npz')"
  pictures = load_pictures(CaptioningDataConfig(task, str(folder)))['train']
  assert pictures.pictures.shape == (3, 2, 2, 3) and pictures.pictures.dtype == np.float32
  for name, grid, file in zip(pictures.names, pictures.pictures, pictures.files, strict=True):
    np.testing.assert_allclose(grid[..., 0], COLOURS[name], atol=2)
    assert file == str(folder / 'images' / name)


def test_the_home_folder_is_expanded(folder, monkeypatch):
  monkeypatch.setenv('HOME', str(folder))
  names = list_images('~/images')
  assert features.write_features(folder / 'grid.npz', '~/images', names, network, size=8) == (2, 2, 3)


def test_a_failed_write_leaves_no_file(folder):
  (folder / 'images' / 'd.png').write_bytes(b'no image')
  sizes = iter((2, 3))

  def constant(value):
    return lambda x: np.full((len(x), 1, 1, 2), value)

  for names, fn, message in [
    (None, network, r'd\.png: cannot be read as an image'),
    (['a.png'], lambda x: x[:, 0, 0, 0], r'the network must return \[1, rows, columns, features\], got \[1\]'),
    (
      ['a.png'] * 2,
      lambda x: np.zeros((len(x), next(sizes), 2, 3)),
      r'must have the shape \[2, 2, 3\] of the first, got \[3, 2, 3\]',
    ),
    (['a.png'], constant(7e4), r'a\.png: features must be finite numbers .* to 65504, got 70000 to 70000'),
    (['a.png'], constant(np.nan), r'a\.png: features must be finite numbers .* to 65504, got nan to nan'),
    ([], network, r'images: no images; expected files that end with one of: \.bmp'),
  ]:
    with pytest.raises(UserError, match=message):
      write(folder, names, fn, batch=1)
  assert not [path for path in folder.iterdir() if 'grid' in path.name]


def test_input_size_is_that_of_the_crop_else_of_resizing():
  square = {'height': 224, 'width': 224}
  for fields in ({'crop_size': square, 'size': {'shortest_edge': 256}}, {'crop_size': None, 'size': square}):
    assert features.input_size(types.SimpleNamespace(**fields)) == 224
  assert features.input_size(types.SimpleNamespace(size={'shortest_edge': 288})) == 288


@pytest.mark.parametrize('num_extra_tokens', [0, 1, 5])
def test_patch_grid_removes_leading_tokens(num_extra_tokens):
  grid = np.arange(2 * 9 * 4.0).reshape(2, 3, 3, 4)
  tokens = np.concatenate([np.full((2, num_extra_tokens, 4), -1.0), grid.reshape(2, 9, 4)], axis=1)
  assert np.array_equal(features.patch_grid(tokens), grid)


class FakeModel:
  """A model with the interface of transformers: channels first, normalised inputs, stored in 16 bits."""

  def __init__(self, has_patches: bool):
    self.has_patches = has_patches
    self.is_float32 = False

  def float(self):
    self.is_float32 = True
    return self

  def eval(self):
    return self

  def __call__(self, pixel_values):
    if not self.is_float32:
      raise RuntimeError('Input type (float) and bias type (c10::BFloat16) should be the same')
    if pixel_values.shape[-1] != 4:
      raise ValueError("Input image size (8*8) doesn't\nmatch model (4*4).")
    outputs = pixel_values.reshape(len(pixel_values), 3, 2, 2, 2, 2).mean((3, 5))  # [B, 3, rows, columns]
    if self.has_patches:
      tokens = outputs.reshape(len(outputs), 3, 4).transpose(0, 2, 1)
      outputs = np.concatenate([np.full_like(tokens[:, :1], 9.0), tokens], axis=1)  # the class token comes first
    return types.SimpleNamespace(last_hidden_state=types.SimpleNamespace(numpy=lambda: outputs))


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({'do_normalize': True, 'image_mean': [0.5, 0.5, 0.5], 'image_std': [0.5, 0.25, 0.5]}, [1, -2, -0.6]),
    ({'do_normalize': False, 'image_mean': [0.5, 0.5, 0.5], 'image_std': [0.5, 0.25, 0.5]}, [1, 0, 0.2]),
    ({'do_flip_channel_order': True}, [0.2, 0, 1]),  # MobileViT, which has no means
  ],
)
def test_pixels_are_scaled_as_the_processor_of_the_network_does(options, expected):
  pixel = np.array([255, 0, 51], np.uint8).reshape(1, 1, 1, 3)
  scaled = features.scale_pixels(pixel, types.SimpleNamespace(**options))
  np.testing.assert_allclose(scaled.ravel(), expected, atol=1e-6)


@pytest.mark.parametrize('has_patches', [False, True])
def test_load_pretrained_returns_grids_and_reports_errors(has_patches, monkeypatch):
  fields = {'image_mean': [0.5, 0.5, 0.5], 'image_std': [0.5, 0.25, 0.5]}
  processor = types.SimpleNamespace(**fields, size={'height': 4, 'width': 4})

  def load_model(name):
    if name == 'damaged':
      raise Exception('Error while deserializing header')
    if name not in ('known', '/home/someone/known'):
      raise OSError(f'{name} is not\na folder')
    return FakeModel(has_patches)

  transformers = types.SimpleNamespace(
    AutoModel=types.SimpleNamespace(from_pretrained=load_model),
    AutoImageProcessor=types.SimpleNamespace(from_pretrained=lambda name: processor),
  )
  torch = types.SimpleNamespace(inference_mode=contextlib.nullcontext, from_numpy=lambda x: x)
  monkeypatch.setitem(sys.modules, 'transformers', transformers)
  monkeypatch.setitem(sys.modules, 'torch', torch)
  monkeypatch.setenv('HOME', '/home/someone')
  assert features.load_pretrained('~/known')[1] == 4
  network, size = features.load_pretrained('known')
  pictures = np.zeros((2, 4, 4, 3), np.uint8)
  pictures[1, :2, 2:] = [255, 0, 51]
  grids = network(pictures)
  assert size == 4 and grids.shape == (2, 2, 2, 3)
  np.testing.assert_allclose(grids[1, 0, 1], [1, -2, -0.6], atol=1e-6)
  np.testing.assert_allclose(grids[1, 1], [[-1, -2, -1]] * 2, atol=1e-6)
  with pytest.raises(UserError, match=r'known: cannot process pictures of \(8, 8\) pixels \(Input image size'):
    network(np.zeros((1, 8, 8, 3), np.uint8))
  for name, reason in (('missing', 'missing is not a folder'), ('damaged', 'Error while deserializing header')):
    message = rf'{name}: cannot be loaded as an image model of transformers \({reason}\)'
    with pytest.raises(UserError, match=message):
      features.load_pretrained(name)
  monkeypatch.setitem(sys.modules, 'transformers', None)
  with pytest.raises(UserError, match='transformers is not installed; run pip install torch transformers'):
    features.load_pretrained('known')
