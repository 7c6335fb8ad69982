"""Pictures with captions: what is drawn is what is told, wrong files are named, batches are functions of their step."""

import itertools
import random

import numpy as np
import pytest
from PIL import Image

from attention_jax.data import vocab
from attention_jax.data.builders import shapes
from attention_jax.data.pictures import (
  CaptionBatches,
  check_caption_lengths,
  describe_captions,
  encode_captions,
  eval_caption_batches,
  load_pictures,
)
from attention_jax.errors import UserError
from attention_jax.tokens import EOS

SCENES = list(itertools.islice(shapes.generate('train'), 60))


def test_scenes_are_a_function_of_split_and_seed():
  again = list(itertools.islice(shapes.generate('train'), 3))
  for one, other in zip(SCENES, again, strict=False):
    assert np.array_equal(one.picture, other.picture) and one[1:] == other[1:]
  assert next(shapes.generate('train', seed=1)).caption != SCENES[0].caption
  assert SCENES[0].picture.shape == (64, 64, 3) and SCENES[0].picture.dtype == np.uint8


def test_each_thing_has_its_colour_in_its_box():
  seen = 0
  for scene in SCENES:
    words = scene.caption.split()
    assert len(words) == len(scene.boxes)
    for word, box in zip(words, scene.boxes, strict=True):
      assert (box is None) == (word in ('a', 'left', 'of', 'above', 'below'))
      if word in shapes.COLOURS:
        left, top, right, bottom = box
        far = np.abs(scene.picture[top:bottom, left:right].astype(int) - shapes.COLOURS[word]).sum(-1)
        seen += (far < 30).sum() > 8
  assert seen >= 0.98 * sum(word in shapes.COLOURS for scene in SCENES for word in scene.caption.split())


def test_things_cover_parts_of_others():
  square = lambda x, y: shapes.DrawnShape('large', 'red', '', 'square', x, y, 10.0)
  assert shapes.covered_shares([square(20, 20), square(28.8, 20)]) == [pytest.approx(0.5, abs=0.06), 0]
  assert shapes.covered_shares([square(28.8, 20), square(28.8, 28.8), square(20, 20)]) == [
    pytest.approx(0.75, abs=0.06),
    pytest.approx(0.25, abs=0.06),
    0,
  ]
  draw = random.Random(0).random
  most = [max(shapes.covered_shares(shapes._draw_things(draw, unseen=False))) for _ in range(100)]
  assert max(most) <= 0.25 and sum(share >= 0.1 for share in most) > 45


def test_relations_are_those_of_the_boxes():
  middle = lambda box: ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
  for scene in SCENES:
    words = scene.caption.split()
    for i, word in enumerate(words):
      if word in ('left', 'above', 'below'):
        (x, y), (u, v) = middle(scene.boxes[i - 1]), middle(scene.boxes[i + (3 if word == 'left' else 2)])
        assert u > x
        assert {'left': u - x > abs(v - y), 'above': v - y > u - x, 'below': y - v > u - x}[word]


def test_unseen_pairs_stand_in_no_other_split():
  def pairs(scene):
    words = scene.caption.split()
    named = [(w, next(s for s in words[i:] if s in shapes.SHAPES)) for i, w in enumerate(words) if w in shapes.COLOURS]
    return set(named)

  assert not any(pairs(scene) & shapes.UNSEEN_PAIRS for scene in SCENES)
  assert all(pairs(scene) & shapes.UNSEEN_PAIRS for scene in itertools.islice(shapes.generate('unseen'), 20))
  with pytest.raises(UserError, match="unknown split of shapes 'dev'"):
    next(shapes.generate('dev'))


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'images').mkdir()
  for i in range(10):
    Image.new('RGB', (20, 30), (25 * i, 0, 0)).save(tmp_path / 'images' / f'{i}.png')
  rows = [f'{i}.png,"A thing, number {i} ."\n{i}.png,Red {i} .\n' for i in range(10)]
  (tmp_path / 'captions.csv').write_text('image, caption\n' + ''.join(rows), 'utf-8')
  return tmp_path


def load(folder, **options):
  given = ', '.join(f'{name}={value!r}' for name, value in ({'size': 8} | options).items())
  return load_pictures({'task': f'captions({given})', 'folder': str(folder)})


def test_a_folder_of_images_is_split_by_image(folder):
  found = load(folder)
  assert {split: pictures.names for split, pictures in found.items()} == {
    'train': [f'{i}.png' for i in range(8)],
    'validation': ['8.png'],
    'test': ['9.png'],
  }
  train = found['train']
  assert train.pictures.shape == (8, 8, 8, 3) and train.pictures[3, 0, 0].tolist() == [75, 0, 0]
  assert train.captions[:3] == ['a thing , number 0 .'.replace(' ,', ','), 'red 0 .', 'a thing, number 1 .']
  assert train.picture_index == [i // 2 for i in range(16)] and train.corpus.source[2] == '1.png'
  assert load(folder, lowercase=False)['test'].captions[1] == 'Red 9 .'


def test_features_of_others_are_read_instead(folder):
  np.savez(folder / 'grid.npz', **{f'{i}.png': np.full((2, 2, 5), i, np.float16) for i in range(10)})
  found = load(folder, features='grid.npz')['validation']
  assert found.pictures.dtype == np.float32 and found.pictures.shape == (1, 2, 2, 5) and found.pictures.max() == 8
  np.savez(folder / 'grid.npz', **{'0.png': np.zeros((2, 2, 5))})
  with pytest.raises(UserError, match=r"captions\.csv:4: the features have no array '1\.png'"):
    load(folder, features='grid.npz')
  np.savez(folder / 'grid.npz', **{f'{i}.png': np.arange(18.0).reshape(9, 2) for i in range(10)})
  assert load(folder, features='grid.npz')['test'].pictures[0, 1, 2].tolist() == [10, 11]


def test_wrong_features_are_named(folder):
  path, whole = folder / 'grid.npz', {f'{i}.png': np.zeros((2, 2, 5)) for i in range(10)}
  for wrong, said in [
    (np.zeros((6, 5)), r"captions\.csv:6: features of '2\.png' are \[6, 5\]; expected \[height, width, features\]"),
    (np.zeros((2, 3, 5)), r'captions\.csv:6: 2\.png is \[2, 3, 5\], those before it \[2, 2, 5\]'),
    (np.full((2, 2, 5), np.nan), r"captions\.csv:6: features of '2\.png' are not all finite numbers"),
    (np.full((2, 2, 5), 'a'), r"captions\.csv:6: features of '2\.png' are not all finite numbers"),
    (np.full((2, 2, 5), None), r'grid\.npz: not an \.npz file of numbers that can be read'),
  ]:
    np.savez(path, **whole | {'2.png': wrong})
    with pytest.raises(UserError, match=said):
      load(folder, features='grid.npz')
  path.write_bytes(path.read_bytes()[:300])
  with pytest.raises(UserError, match=r'grid\.npz: not an \.npz file of numbers that can be read'):
    load(folder, features='grid.npz')
  for option in ({'validation': -0.1}, {'size': 0}):
    with pytest.raises(UserError, match=f'captions: {next(iter(option))}='):
      load(folder, **option)


def test_grey_levels_of_sixteen_bits_and_turned_photographs(folder):
  Image.fromarray(np.full((30, 30), 128 << 8, np.uint16)).save(folder / 'images' / '0.png')
  sides = Image.fromarray(np.repeat([[0, 200]], 20, 0).repeat(10, 1).astype(np.uint8))
  exif = sides.getexif()
  exif[0x0112] = 6  # to be turned by a quarter, clockwise
  sides.save(folder / 'images' / '1.png', exif=exif)
  found = load(folder)['train'].pictures
  assert found[0, 4, 4].tolist() == [128] * 3
  assert found[1, 0].max() < 20 and found[1, 7].min() > 180


def test_what_is_transparent_is_white(folder):
  Image.fromarray(np.full((9, 9, 4), (10, 20, 30, 0), np.uint8)).save(folder / 'images' / '0.png')
  colours = Image.new('P', (9, 9), 1)
  colours.putpalette([9, 9, 9, 50, 60, 70])
  colours.save(folder / 'images' / '1.png', transparency=1)
  found = load(folder)['train'].pictures
  assert (found[:2] == 255).all() and found[2, 0, 0].tolist() == [50, 0, 0]


def test_images_without_a_caption_are_counted(folder):
  (folder / 'images' / 'notes.txt').write_text('no image')
  assert load(folder)['train'].num_uncaptioned == 0
  Image.new('RGB', (9, 9)).save(folder / 'images' / 'more.jpg')
  train = load(folder)['train']
  encoded = encode_captions(train, vocab.train('word', train.captions))
  assert describe_captions('train', train, encoded, (9,)).endswith('; 1 image beside them without a caption')


@pytest.mark.parametrize(
  ('row', 'said'),
  [
    ('nowhere.png,a', r'captions\.csv:22: .*nowhere\.png: no such file'),
    ('3.png,', r'captions\.csv:22: caption is empty'),
    (',a', r'captions\.csv:22: image is empty'),
    ('strip.png,a', r'captions\.csv:22: .*strip\.png: 30 x 1 pixels; possible for size=8: 2 and more'),
    ('bad.png,a', r'captions\.csv:22: .*bad\.png: not an image that can be read'),
    ('chunk.png,a', r'captions\.csv:22: .*chunk\.png: not an image that can be read \(broken PNG'),
    ('3.png,red, and large', r'captions\.csv:22: more fields than columns; a caption with a comma stands in quotes'),
    ('3.png,"red\n4.png,blue', r'captions\.csv:22: not a row of a table \(unexpected end of data\)'),
  ],
)
def test_wrong_rows_are_named(folder, row, said):
  (folder / 'images' / 'bad.png').write_bytes(b'GIF89a nothing')
  Image.new('RGB', (30, 1)).save(folder / 'images' / 'strip.png')
  whole = (folder / 'images' / '3.png').read_bytes()
  at = whole.index(b'IDAT')  # of which there are fewer bytes than it says
  (folder / 'images' / 'chunk.png').write_bytes(whole[: at - 4] + b'\0\0\0\2' + whole[at:])
  with (folder / 'captions.csv').open('a') as file:
    file.write(row + '\n')
  with pytest.raises(UserError, match=said):
    load(folder)


def test_wrong_tables_are_named(folder):
  path = folder / 'captions.csv'
  path.write_text('picture,caption\na,b\n')
  with pytest.raises(UserError, match=r"captions\.csv:1: no column 'image'; it has: picture, caption"):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,dev\n')
  with pytest.raises(UserError, match=r"captions\.csv:2: split 'dev'; possible: train, validation"):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,test\n')
  with pytest.raises(UserError, match='no row of split train; it has: test'):
    load(folder)
  path.write_text('image,caption,split\n1.png,b,train\n2.png,b,test\n1.png,c,test\n')
  with pytest.raises(UserError, match=r'captions\.csv:4: 1\.png is in split train too'):
    load(folder)
  path.write_text('image,caption\n')
  with pytest.raises(UserError, match='no captions'):
    load(folder)


def test_batches_show_each_caption_its_picture(folder):
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
def test_wrong_lengths_are_refused(buckets):
  with pytest.raises(UserError, match='buckets are lengths of captions'):
    check_caption_lengths(buckets)
