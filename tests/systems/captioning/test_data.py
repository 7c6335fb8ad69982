"""Pictures with captions: images and features of a folder, errors of files, and batches."""

import numpy as np
import pytest
from PIL import Image

from attention_jax.data import vocab
from attention_jax.errors import UserError
from attention_jax.systems.captioning import data as captions
from attention_jax.systems.captioning.config import CaptioningDataConfig
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
  return captions.load_pictures(CaptioningDataConfig(f'captions({arguments})', str(folder)))


def test_a_folder_of_images_is_split_by_image(folder):
  splits = load(folder)
  names = {split: pictures.names for split, pictures in splits.items()}
  assert names == {'train': [f'{i}.png' for i in range(8)], 'validation': ['8.png'], 'test': ['9.png']}
  train = splits['train']
  assert train.pictures.shape == (8, 8, 8, 3) and train.pictures[3, 0, 0].tolist() == [75, 0, 0]
  assert train.captions[:3] == ['a thing, number 0 .', 'red 0 .', 'a thing, number 1 .']
  assert train.picture_index == [i // 2 for i in range(16)] and train.corpus.source[2] == '1.png'
  assert load(folder, lowercase=False)['test'].captions[1] == 'Red 9 .'


GRIDS = {f'{i}.png': np.full((2, 2, 5), i, np.float16) for i in range(10)}


def test_features_are_read_instead_of_images(folder):
  np.savez(folder / 'grid.npz', **GRIDS)
  pictures = load(folder, features='grid.npz')['validation'].pictures
  assert pictures.dtype == np.float32 and pictures.shape == (1, 2, 2, 5) and pictures.max() == 8
  np.savez(folder / 'grid.npz', **{name: np.arange(18.0).reshape(9, 2) for name in GRIDS})
  assert load(folder, features='grid.npz')['test'].pictures[0, 1, 2].tolist() == [10, 11]


def test_paths_may_begin_with_the_home_folder(folder, monkeypatch):
  monkeypatch.setenv('HOME', str(folder))
  np.savez(folder / 'grid.npz', **GRIDS)
  paths = {'images': '~/images', 'captions': '~/captions.csv'}
  for options in (paths, paths | {'features': '~/grid.npz'}):
    splits = load(folder / 'elsewhere', **options)
    assert splits['test'].files == [str(folder / 'images' / '9.png')]


@pytest.mark.parametrize(
  ('grids', 'message'),
  [
    ({'2.png': np.zeros((6, 5))}, r":6: features of '2\.png' must be \[height, width, features\].*, got \[6, 5\]"),
    ({'2.png': np.zeros((0, 2, 5))}, r":6: features of '2\.png' must be .*, and not empty, got \[0, 2, 5\]"),
    ({'2.png': np.full((2, 2, 5), np.nan)}, r":6: features of '2\.png' must be finite numbers of float32, got nan"),
    ({'2.png': np.full((2, 2, 5), 1e300)}, r':6: .* must be finite numbers of float32, got 1e\+300'),
    ({'2.png': np.full((2, 2, 5), 'a')}, r':6: .* must be finite numbers of float32, got <U1'),
    ({'2.png': np.zeros((2, 3, 5))}, r':6: 2\.png .* shape of the pictures .* \[2, 2, 5\], got \[2, 3, 5\]'),
    ({'2.png': np.full((2, 2, 5), None)}, r'^.*grid\.npz: cannot be read as an \.npz file of numbers'),
    ({'1.png': None}, r":4: the features have no array '1\.png'"),
  ],
)
def test_invalid_features_are_reported(folder, grids, message):
  np.savez(folder / 'grid.npz', **{name: grid for name, grid in (GRIDS | grids).items() if grid is not None})
  with pytest.raises(UserError, match=message if message.startswith('^') else rf'captions\.csv{message}'):
    load(folder, features='grid.npz')


def test_damaged_features_are_reported(folder):
  np.savez(folder / 'grid.npz', **GRIDS)
  (folder / 'damaged.npz').write_bytes((folder / 'grid.npz').read_bytes()[:300])
  with pytest.raises(UserError, match=r'damaged\.npz: cannot be read as an \.npz file of numbers'):
    load(folder, features='damaged.npz')


def test_images_without_a_caption_are_counted(folder):
  (folder / 'images' / 'notes.txt').write_text('no image')
  assert load(folder)['train'].num_uncaptioned == 0
  Image.new('RGB', (9, 9)).save(folder / 'images' / 'more.jpg')
  train = load(folder)['train']
  encoded = captions.encode_captions(train, vocab.train('word', train.captions))
  assert captions.describe_captions('train', train, encoded, (9,)).endswith('; 1 image without a caption')


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    ('nowhere.png,a', r'.*nowhere\.png: no such file'),
    ('3.png,', r'caption is empty'),
    (',a', r'image is empty'),
    ('strip.png,a', r'.*strip\.png: each side must be at least 2 pixels for size=8, got 30 x 1'),
    ('bad.png,a', r'.*bad\.png: cannot be read as an image'),
    ('chunk.png,a', r'.*chunk\.png: cannot be read as an image \(broken PNG'),
    ('3.png,red, and large', r'more fields than columns; a caption with a comma needs quotes'),
    ('3.png,"red\n4.png,blue', r'not a row of a table \(unexpected end of data\)'),
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
  with pytest.raises(UserError, match=rf'captions\.csv:22: {message}'):
    load(folder)


def test_other_columns_may_be_empty(folder):
  (folder / 'captions.csv').write_text('image,caption,comment\n1.png,red,\n2.png,blue\n')
  assert load(folder, validation=0.0, test=0.0)['train'].captions == ['red', 'blue']


@pytest.mark.parametrize(
  ('table', 'message'),
  [
    ('picture,caption\na,b\n', r"captions\.csv:1: no column 'image'; it has: picture, caption"),
    ('image,caption,split\n1.png,b,dev\n', r"captions\.csv:2: unknown split 'dev'; expected one of: train, validation"),
    ('image,caption,split\n1.png,b,\n', r'captions\.csv:2: split is empty'),
    ('image,caption,split\n1.png,b,test\n', 'no row of split train, only of: test; expected at least one'),
    (
      'image,caption,split\n1.png,b,train\n2.png,b,test\n1.png,c,test\n',
      r'captions\.csv:4: 1\.png is in split train too',
    ),
    ('image,caption\n', 'no captions'),
  ],
)
def test_invalid_tables_are_reported(folder, table, message):
  (folder / 'captions.csv').write_text(table)
  with pytest.raises(UserError, match=message):
    load(folder)


def test_batches_pair_each_caption_with_its_picture(folder):
  split = load(folder)['train']
  words = vocab.train('word', split.captions)
  encoded = captions.encode_captions(split, words)
  batches = captions.CaptionBatches(encoded, (4, 6), 4, seed=3)
  epoch = [batches[step] for step in range(len(batches))]
  assert batches.shapes == [(4, 4), (4, 6)] and sorted(i for b in epoch for i in b.index if i >= 0) == list(range(16))
  for batch in (*epoch, *captions.eval_caption_batches(encoded, (4, 6), 5)):
    for row, index in enumerate(batch.index):
      assert batch.source_mask[row].tolist() == [index >= 0]
      if index >= 0:
        length = batch.target_mask[row].sum()
        assert batch.target[row, length - 1] == EOS and batch.source[row, 0, 0, 0] == 25 * split.picture_index[index]
        assert words.decode(batch.target[row].tolist()) == split.captions[index]
  assert captions.describe_captions('train', split, encoded, (4,)) == (
    'train: 8 pictures (8 x 8 x 3), 16 captions; 8 captions longer than 4 tokens left out'
  )


@pytest.mark.parametrize('buckets', [(), 'ab', ((1, 2),), (0,), None])
def test_invalid_lengths_are_reported(buckets):
  with pytest.raises(UserError, match='buckets must be lengths of captions'):
    captions.check_caption_buckets(buckets)
