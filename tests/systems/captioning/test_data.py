"""Pictures with captions: images and features of a folder, errors of files, and batches."""

import numpy as np
import pytest
from PIL import Image

from attention_jax.data import vocab
from attention_jax.errors import UserError
from attention_jax.systems.captioning.config import CaptioningDataConfig
from attention_jax.systems.captioning.data import (
  CaptionBatches,
  check_caption_buckets,
  describe_captions,
  encode_captions,
  eval_caption_batches,
  load_pictures,
)
from attention_jax.tokens import EOS


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'images').mkdir()
  for i in range(10):
    Image.new('RGB', (20, 30), (25 * i, 0, 0)).save(tmp_path / 'images' / f'{i}.png')
  rows = [f'{i}.png,"A thing, number {i} ."\n{i}.png,Red {i} .\n' for i in range(10)]
  (tmp_path / 'captions.csv').write_text('image, caption\n' + ''.join(rows), 'utf-8')
  return tmp_path


def load(folder, **options):
  arguments = ', '.join(f'{name}={value!r}' for name, value in ({'size': 8} | options).items())
  return load_pictures(CaptioningDataConfig(f'captions({arguments})', str(folder)))


def test_a_folder_of_images_is_split_by_image(folder):
  splits = load(folder)
  assert {split: pictures.names for split, pictures in splits.items()} == {
    'train': [f'{i}.png' for i in range(8)],
    'validation': ['8.png'],
    'test': ['9.png'],
  }
  train = splits['train']
  assert train.pictures.shape == (8, 8, 8, 3) and train.pictures[3, 0, 0].tolist() == [75, 0, 0]
  assert train.captions[:3] == ['a thing, number 0 .', 'red 0 .', 'a thing, number 1 .']
  assert train.picture_index == [i // 2 for i in range(16)] and train.corpus.source[2] == '1.png'
  assert load(folder, lowercase=False)['test'].captions[1] == 'Red 9 .'


def test_features_are_read_instead_of_images(folder):
  np.savez(folder / 'grid.npz', **{f'{i}.png': np.full((2, 2, 5), i, np.float16) for i in range(10)})
  pictures = load(folder, features='grid.npz')['validation'].pictures
  assert pictures.dtype == np.float32 and pictures.shape == (1, 2, 2, 5) and pictures.max() == 8
  np.savez(folder / 'grid.npz', **{'0.png': np.zeros((2, 2, 5))})
  with pytest.raises(UserError, match=r"captions\.csv:4: the features have no array '1\.png'"):
    load(folder, features='grid.npz')
  np.savez(folder / 'grid.npz', **{f'{i}.png': np.arange(18.0).reshape(9, 2) for i in range(10)})
  assert load(folder, features='grid.npz')['test'].pictures[0, 1, 2].tolist() == [10, 11]


def test_paths_may_begin_with_the_home_folder(folder, monkeypatch):
  monkeypatch.setenv('HOME', str(folder))
  np.savez(folder / 'grid.npz', **{f'{i}.png': np.full((2, 2, 5), i, np.float16) for i in range(10)})
  paths = {'images': '~/images', 'captions': '~/captions.csv'}
  for options in (paths, paths | {'features': '~/grid.npz'}):
    splits = load(folder / 'elsewhere', **options)
    assert splits['test'].files == [str(folder / 'images' / '9.png')]


def test_invalid_features_and_options_are_reported(folder):
  path = folder / 'grid.npz'
  grids = {f'{i}.png': np.zeros((2, 2, 5)) for i in range(10)}
  for invalid, message in [
    (np.zeros((6, 5)), r"captions\.csv:6: features of '2\.png' must be \[height, width, features\].*, got \[6, 5\]"),
    (
      np.zeros((2, 3, 5)),
      r'captions\.csv:6: 2\.png must have the shape of the pictures read before it \[2, 2, 5\], got \[2, 3, 5\]',
    ),
    (np.full((2, 2, 5), np.nan), r"captions\.csv:6: features of '2\.png' must be finite numbers of float32, got nan"),
    (np.zeros((0, 5)), r"captions\.csv:6: features of '2\.png' must be .*, and not empty, got \[0, 5\]"),
    (np.zeros((0, 2, 5)), r"captions\.csv:6: features of '2\.png' must be .*, and not empty, got \[0, 2, 5\]"),
    (
      np.full((2, 2, 5), 1e300),
      r"captions\.csv:6: features of '2\.png' must be finite numbers of float32, got 1e\+300",
    ),
    (np.full((2, 2, 5), 'a'), r"captions\.csv:6: features of '2\.png' must be finite numbers of float32, got <U1"),
    (np.full((2, 2, 5), None), r'grid\.npz: cannot be read as an \.npz file of numbers'),
  ]:
    np.savez(path, **grids | {'2.png': invalid})
    with pytest.raises(UserError, match=message):
      load(folder, features='grid.npz')
  path.write_bytes(path.read_bytes()[:300])
  with pytest.raises(UserError, match=r'grid\.npz: cannot be read as an \.npz file of numbers'):
    load(folder, features='grid.npz')
  with pytest.raises(UserError, match=r'option validation must be at least 0 and less than 1, got -0\.1'):
    load(folder, validation=-0.1)
  with pytest.raises(UserError, match='option size must be at least 1, got 0'):
    load(folder, size=0)


def test_16_bit_images_become_8_bits_and_exif_rotation_is_applied(folder):
  Image.fromarray(np.full((30, 30), 128 << 8, np.uint16)).save(folder / 'images' / '0.png')
  sides = Image.fromarray(np.repeat([[0, 200]], 20, 0).repeat(10, 1).astype(np.uint8))
  exif = sides.getexif()
  exif[0x0112] = 6  # orientation: rotate by 90 degrees clockwise
  sides.save(folder / 'images' / '1.png', exif=exif)
  pictures = load(folder)['train'].pictures
  assert pictures[0, 4, 4].tolist() == [128] * 3
  assert pictures[1, 0].max() < 20 and pictures[1, 7].min() > 180


def test_transparent_pixels_become_white(folder):
  Image.fromarray(np.full((9, 9, 4), (10, 20, 30, 0), np.uint8)).save(folder / 'images' / '0.png')
  colours = Image.new('P', (9, 9), 1)
  colours.putpalette([9, 9, 9, 50, 60, 70])
  colours.save(folder / 'images' / '1.png', transparency=1)
  pictures = load(folder)['train'].pictures
  assert (pictures[:2] == 255).all() and pictures[2, 0, 0].tolist() == [50, 0, 0]


def test_images_without_a_caption_are_counted(folder):
  (folder / 'images' / 'notes.txt').write_text('no image')
  assert load(folder)['train'].num_uncaptioned == 0
  Image.new('RGB', (9, 9)).save(folder / 'images' / 'more.jpg')
  train = load(folder)['train']
  encoded = encode_captions(train, vocab.train('word', train.captions))
  assert describe_captions('train', train, encoded, (9,)).endswith('; 1 image without a caption')


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    ('nowhere.png,a', r'captions\.csv:22: .*nowhere\.png: no such file'),
    ('3.png,', r'captions\.csv:22: caption is empty'),
    (',a', r'captions\.csv:22: image is empty'),
    ('strip.png,a', r'captions\.csv:22: .*strip\.png: each side must be at least 2 pixels for size=8, got 30 x 1'),
    ('bad.png,a', r'captions\.csv:22: .*bad\.png: cannot be read as an image'),
    ('chunk.png,a', r'captions\.csv:22: .*chunk\.png: cannot be read as an image \(broken PNG'),
    ('3.png,red, and large', r'captions\.csv:22: more fields than columns; a caption with a comma needs quotes'),
    ('3.png,"red\n4.png,blue', r'captions\.csv:22: not a row of a table \(unexpected end of data\)'),
  ],
)
def test_invalid_rows_are_reported(folder, row, message):
  (folder / 'images' / 'bad.png').write_bytes(b'GIF89a nothing')
  Image.new('RGB', (30, 1)).save(folder / 'images' / 'strip.png')
  png = (folder / 'images' / '3.png').read_bytes()
  chunk = png.index(b'IDAT')
  wrong_length = b'\0\0\0\2'
  (folder / 'images' / 'chunk.png').write_bytes(png[: chunk - 4] + wrong_length + png[chunk:])
  with (folder / 'captions.csv').open('a') as file:
    file.write(row + '\n')
  with pytest.raises(UserError, match=message):
    load(folder)


def test_other_columns_may_be_empty(folder):
  (folder / 'captions.csv').write_text('image,caption,comment\n1.png,red,\n2.png,blue\n')
  assert load(folder, validation=0.0, test=0.0)['train'].captions == ['red', 'blue']


def test_invalid_tables_are_reported(folder):
  path = folder / 'captions.csv'
  path.write_text('picture,caption\na,b\n')
  with pytest.raises(UserError, match=r"captions\.csv:1: no column 'image'; it has: picture, caption"):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,dev\n')
  with pytest.raises(UserError, match=r"captions\.csv:2: unknown split 'dev'; expected one of: train, validation"):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,\n')
  with pytest.raises(UserError, match=r'captions\.csv:2: split is empty'):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,test\n')
  with pytest.raises(UserError, match='no row of split train, only of: test; expected at least one'):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,train\n2.png,b,test\n1.png,c,test\n')
  with pytest.raises(UserError, match=r'captions\.csv:4: 1\.png is in split train too'):
    load(folder)
  path.write_text('image,caption\n')
  with pytest.raises(UserError, match='no captions'):
    load(folder)


def test_batches_pair_each_caption_with_its_picture(folder):
  split = load(folder)['train']
  words = vocab.train('word', split.captions)
  encoded = encode_captions(split, words)
  batches = CaptionBatches(encoded, (4, 6), 4, seed=3)
  epoch = [batches[step] for step in range(len(batches))]
  assert batches.shapes == [(4, 4), (4, 6)] and sorted(i for b in epoch for i in b.index if i >= 0) == list(range(16))
  for batch in (*epoch, *eval_caption_batches(encoded, (4, 6), 5)):
    for row, index in enumerate(batch.index):
      assert batch.source_mask[row].tolist() == [index >= 0]
      if index >= 0:
        length = batch.target_mask[row].sum()
        assert batch.target[row, length - 1] == EOS and batch.source[row, 0, 0, 0] == 25 * split.picture_index[index]
        assert words.decode(batch.target[row].tolist()) == split.captions[index]
  assert describe_captions('train', split, encoded, (4,)) == (
    'train: 8 pictures (8 x 8 x 3), 16 captions; 8 captions longer than 4 tokens left out'
  )


@pytest.mark.parametrize('buckets', [(), 'ab', ((1, 2),), (0,), None])
def test_invalid_lengths_are_reported(buckets):
  with pytest.raises(UserError, match='buckets must be lengths of captions'):
    check_caption_buckets(buckets)
