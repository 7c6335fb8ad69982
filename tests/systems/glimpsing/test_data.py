"""Digits on canvases: positions, clutter, batches, and errors of files and options."""

import io

import numpy as np
import pytest
from PIL import Image

from attention_jax.errors import UserError
from attention_jax.systems.glimpsing.config import GlimpsingDataConfig
from attention_jax.systems.glimpsing.data import DigitBatches, eval_digit_batches, load_digit_splits, render_digit
from tests.data.helpers import write_tfds_set

RNG = np.random.default_rng


@pytest.fixture
def folder(tmp_path):
  """A folder with digits.npz, in which each pixel of picture i is i + 1."""
  write_digits(tmp_path, np.arange(1, 13, dtype=np.uint8)[:, None, None] * np.ones((12, 4, 4), np.uint8))
  return tmp_path


def write_digits(folder, pictures, classes=10, **arrays):
  """Writes digits.npz with 12 pictures for training, of which the first three are those of the test split too."""
  labels = np.arange(12) % classes
  digits = {'x_train': pictures, 'y_train': labels, 'x_test': pictures[:3], 'y_test': labels[:3]}
  np.savez(folder / 'digits.npz', **digits | arrays)


def load(folder, **options):
  options = {'path': 'digits.npz', 'validation': 4} | options
  arguments = ', '.join(f'{name}={value!r}' for name, value in options.items())
  return load_digit_splits(GlimpsingDataConfig(f'npz({arguments})', str(folder)))


def test_splits_are_parts_of_the_file(folder):
  labels = {split: digits.labels.tolist() for split, digits in load(folder).items()}
  assert labels == {'train': [*range(8)], 'validation': [8, 9, 0, 1], 'test': [0, 1, 2]}
  assert load_digit_splits(GlimpsingDataConfig('digits', ''))['test'].pictures.shape == (250, 8, 8, 1)


def test_a_digit_is_placed_at_random_on_its_canvas(folder):
  train = load(folder, canvas=9, piece=2)['train']
  positions = set()
  for i in range(60):
    picture = render_digit(train, 5, RNG(i))
    rows, columns, _ = np.nonzero(picture)
    assert picture.shape == (9, 9, 1) and (picture > 0).sum() == 16 and picture.max() == 6
    positions.add((rows.min(), columns.min()))
  assert positions <= {(r, c) for r in range(6) for c in range(6)} and len(positions) > 20
  cluttered = render_digit(load(folder, canvas=30, clutter=3, piece=2)['train'], 5, RNG(0))
  assert 16 + 2 <= (cluttered > 0).sum() <= 16 + 3 * 4


def test_several_objects_do_not_overlap_and_have_labels_from_left_to_right(folder):
  train = load(folder, canvas=12, objects=3)['train']
  (batch,) = eval_digit_batches(train, 9)  # the last row is a filler row
  assert batch.label.shape == (9, 3) and batch.index.tolist() == [*range(8), -1]
  # The label of each of these rows is its index.
  assert all(row in labels for row, labels in zip(batch.index[:-1], batch.label, strict=False))
  for picture, labels in zip(batch.picture[:-1], batch.label, strict=False):
    assert (picture > 0).sum() == 3 * 16
    left = [np.nonzero((picture == label + 1).any((0, 2)))[0].min() for label in labels]  # pixels are labels + 1
    assert left == sorted(left) or len(set(labels)) < 3
  assert not batch.label[-1].any()


def test_batches_are_a_function_of_seed_and_step(folder):
  train = load(folder, canvas=9)['train']
  batches, same, other = (DigitBatches(train, 3, seed) for seed in (0, 0, 1))
  assert batches.shapes == [(3, 9, 9)] and len(batches) == 3
  for step in (0, 2, 7):
    assert all(np.array_equal(x, y) for x, y in zip(batches[step], same[step], strict=True))
  assert any(not np.array_equal(batches[s].picture, other[s].picture) for s in range(3))
  epochs = [
    {int(i): p for b in (batches[s] for s in steps) for i, p in zip(b.index, b.picture, strict=True)}
    for steps in (range(3), range(3, 6))
  ]
  assert set(epochs[0]) == {-1, *range(8)}
  assert any(not np.array_equal(epochs[0][i], epochs[1][i]) for i in range(8))  # positions change with the epoch
  evaluations = [np.concatenate([b.picture for b in eval_digit_batches(train, 3)]) for _ in range(2)]
  assert np.array_equal(*evaluations)


def encode_png(pixels):
  out = io.BytesIO()
  Image.fromarray(pixels.squeeze()).save(out, 'png')
  return io.BytesIO(out.getvalue())


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """A folder with tfds sets of images of one channel, of three channels, of any size, and of 16 bits."""
  folder = tmp_path_factory.mktemp('tfds')

  def make_rows(count, channels):
    return [{'image': encode_png(np.full((4, 4, channels), 9 + i, np.uint8)), 'label': i % 10} for i in range(count)]

  sets = (('grey', 4, 1, np.uint8), ('colour', 4, 3, np.uint8), ('any', None, 3, np.uint8), ('deep', 4, 1, np.uint16))
  for name, declared_size, channels, dtype in sets:

    def features(tfds, size=declared_size, channels=channels, dtype=dtype):
      image = tfds.features.Image(shape=(size, size, channels), dtype=dtype)
      return tfds.features.FeaturesDict({'image': image, 'label': tfds.features.ClassLabel(num_classes=10)})

    write_tfds_set(folder, features, {'train': make_rows(12, channels), 'test': make_rows(3, channels)}, name)
  return folder


def load_tfds(folder, name, options=''):
  return load_digit_splits(
    GlimpsingDataConfig(f"tfds(name='tiny/{name}', validation='train[-4:]'{options})", str(folder))
  )


def test_grey_images_of_a_tfds_set_are_split(prepared):
  splits = load_tfds(prepared, 'grey', ', canvas=9')
  assert {split: len(digits.labels) for split, digits in splits.items()} == {'train': 8, 'validation': 4, 'test': 3}
  for digits in splits.values():
    assert digits.canvas == 9 and digits.pictures.dtype == np.uint8
    assert np.array_equal(digits.pictures[:, 1, 2, 0] % 10, (digits.labels + 9) % 10)
  levels = {int(p[0, 0, 0]) for split in ('train', 'validation') for p in splits[split].pictures}
  assert levels == set(range(9, 21))


def test_tfds_images_may_have_colours_but_not_several_sizes_or_16_bits(prepared):
  splits = load_tfds(prepared, 'colour')
  assert splits['train'].pictures.shape == (8, 4, 4, 3) and splits['test'].classes == 10
  with pytest.raises(UserError, match=r"'tiny/any': images must have one size \[.*, C\], got \[None, None, 3\]"):
    load_tfds(prepared, 'any')
  with pytest.raises(UserError, match="'tiny/deep': images must be uint8, got uint16"):
    load_tfds(prepared, 'deep')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'path': 'no.npz'}, r'no\.npz: no such file'),
    ({'validation': 12}, 'validation must be from 1 to 11 of the 12 pictures, got 12'),
    ({'canvas': 3}, 'canvas=3 is smaller than the pictures; expected 0 or at least 4'),
    ({'clutter': 2}, 'clutter=2 needs a canvas of at least 4 pixels, got canvas=0'),
    ({'objects': 3, 'canvas': 9}, 'objects=3 needs a canvas of at least 12 pixels, got canvas=9'),
    ({'canvas': 9, 'clutter': 1, 'piece': 5}, 'piece must be from 1 to 4, the shorter side of the pictures, got 5'),
  ],
)
def test_invalid_options_are_reported(folder, options, message):
  with pytest.raises(UserError, match=message):
    load(folder, **options)


def test_pictures_may_have_colours_and_three_labels(folder):
  pictures = RNG(0).integers(1, 255, (12, 4, 4, 3)).astype(np.uint8)
  write_digits(folder, pictures, classes=3)
  train = load(folder, canvas=9)['train']
  picture = render_digit(train, 5, RNG(0))
  top, left = (axis.min() for axis in np.nonzero(picture)[:2])
  assert train.classes == 3 and np.array_equal(picture[top : top + 4, left : left + 4], pictures[5])
  cluttered = render_digit(load(folder, canvas=30, clutter=3, piece=2)['train'], 5, RNG(0))
  assert cluttered.shape == (30, 30, 3) and 16 + 4 <= (cluttered > 0).all(-1).sum() <= 16 + 3 * 4
  assert DigitBatches(train, 3)[0].picture.shape == (3, 9, 9, 3)


def test_a_piece_fits_in_pictures_that_are_not_square(folder):
  write_digits(folder, RNG(0).integers(1, 255, (12, 3, 5)).astype(np.uint8))
  assert render_digit(load(folder, canvas=9, clutter=2, piece=3)['train'], 5, RNG(0)).any()
  with pytest.raises(UserError, match='piece must be from 1 to 3, the shorter side of the pictures, got 4'):
    load(folder, canvas=9, clutter=2, piece=4)


@pytest.mark.parametrize(
  ('arrays', 'message'),
  [
    ({'x_test': np.zeros((3, 5, 5), np.uint8)}, r'x_test must be uint8 \[P, 4, 4\], got uint8 \[3, 5, 5\]'),
    ({'y_train': np.eye(12)}, r'y_train must be whole numbers \[12\], got float64 \[12, 12\]'),
    ({'y_test': np.array(list('abc'))}, r'y_test must be whole numbers \[3\], got <U1 \[3\]'),
    ({'y_train': np.arange(12) - 1}, r'y_train\[0\] must be from 0 to 10, got -1'),
    ({'y_test': np.array([0, 10, 1])}, r'y_test\[1\] must be from 0 to 9, as in training, got 10'),
    ({'x_test': np.zeros((0, 4, 4), np.uint8), 'y_test': np.arange(0)}, r'x_test must have .*, got \[0, 4, 4\]'),
  ],
)
def test_invalid_arrays_are_reported(folder, arrays, message):
  write_digits(folder, np.zeros((12, 4, 4), np.uint8), **arrays)
  with pytest.raises(UserError, match=message):
    load(folder)


def test_missing_arrays_are_reported(folder):
  np.savez(folder / 'digits.npz', x_train=np.zeros((3, 4)))
  with pytest.raises(UserError, match="no array 'y_train'; it has: x_train"):
    load(folder)
