"""Small images with labels, such as handwritten digits: alone, or at random places of a canvas, maybe with clutter."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.data.batching import WHOLE_BATCH, BatchOrder, OrderedBatches, Share, eval_batch_rows
from attention_jax.data.files import join_path, read_arrays
from attention_jax.data.tfds_sets import TfdsRows, open_tfds_set, tfds_split_parts
from attention_jax.errors import UserError, choose
from attention_jax.specs import Count, Size, bind
from attention_jax.systems.glimpsing.config import GlimpsingDataConfig


class Digits(NamedTuple):
  """One split.

  Attributes:
    pictures: uint8 [P, height, width, C], the digits without a canvas.
    labels: int32 [P], from 0.
    classes: number of classes.
    canvas: height and width of the canvas, pixels; 0 for none.
    clutter: number of pieces of random pictures on each canvas.
    piece: height and width of these pieces, pixels.
    objects: number K of pictures on each canvas, whose labels are read from left to right.
  """

  pictures: np.ndarray
  labels: np.ndarray
  classes: int
  canvas: int = 0
  clutter: int = 0
  piece: int = 8
  objects: int = 1


class DigitBatch(NamedTuple):
  """B pictures of one shape.

  Attributes:
    picture: uint8 [B, height, width, C].
    label: int32 [B]; [B, K] with several objects.
    index: int32 [B], the row in its split; -1 = a filler row.
  """

  picture: np.ndarray
  label: np.ndarray
  index: np.ndarray


def digits(
  folder: str, *, canvas: Count = 0, clutter: Count = 0, piece: int = 4, objects: Size = 1
) -> dict[str, Digits]:
  """The 1797 digits of 8 x 8 pixels that are part of scikit-learn.

  Args:
    folder: not used.
    canvas, clutter, piece, objects: see Digits.

  Raises:
    UserError: for options out of range.
  """
  from sklearn.datasets import load_digits

  bunch = load_digits()
  pictures = np.clip(bunch.images * 16, 0, 255).astype(np.uint8)
  order = np.random.default_rng(0).permutation(len(pictures))
  rows_of_split = {'train': order[:1297], 'validation': order[1297:1547], 'test': order[1547:]}
  splits = {split: (pictures[rows], bunch.target[rows]) for split, rows in rows_of_split.items()}
  return _make_splits(splits, 10, CanvasOptions(canvas, clutter, piece, objects))


def npz(
  folder: str,
  *,
  path: str = 'mnist.npz',
  validation: int = 5000,
  canvas: Count = 0,
  clutter: Count = 0,
  piece: int = 8,
  objects: Size = 1,
) -> dict[str, Digits]:
  """An .npz file in the usual layout of MNIST: x_train, y_train, x_test, y_test.

  x_train and x_test are uint8 [P, height, width] or [P, height, width, C], y_train and y_test whole numbers from 0.

  Args:
    folder: the folder that a relative path starts from.
    path: the file.
    validation: number of pictures at the end of the training split that become the validation split.
    canvas, clutter, piece, objects: see Digits.

  Raises:
    UserError: for a file that cannot be read, for arrays that are missing, empty or of another shape, type or range,
      and for options out of range.
  """
  path = join_path(folder, path)
  arrays = read_arrays(path)
  for name in ('x_train', 'y_train', 'x_test', 'y_test'):
    if name not in arrays:
      raise UserError(f'{path}: no array {name!r}; it has: {", ".join(arrays)}')
  x = arrays['x_train']
  y = arrays['y_train']
  x_test = arrays['x_test']
  y_test = arrays['y_test']
  picture_shape = x.shape[1:]
  _check_arrays(x, y, picture_shape, path, 'train')
  classes = int(y.max(initial=0)) + 1
  _check_labels(y, classes, f'{path}: y_train')
  _check_arrays(x_test, y_test, picture_shape, path, 'test')
  _check_labels(y_test, classes, f'{path}: y_test', ', as in training')
  if not 0 < validation < len(x):
    raise UserError(f'{path}: validation must be from 1 to {len(x) - 1} of the {len(x)} pictures, got {validation}')
  splits = {
    'train': (x[:-validation], y[:-validation]),
    'validation': (x[-validation:], y[-validation:]),
    'test': (x_test, y_test),
  }
  return _make_splits(splits, classes, CanvasOptions(canvas, clutter, piece, objects))


def tfds(
  folder: str,
  *,
  name: str = 'mnist',
  validation: str = 'train[-5000:]',
  canvas: Count = 0,
  clutter: Count = 0,
  piece: int = 8,
  objects: Size = 1,
) -> dict[str, Digits]:
  """A tfds set of images of one size with labels, such as 'mnist' or 'svhn_cropped'.

  Args:
    folder: the folder of tfds data sets.
    name: the name of the data set.
    validation: see tfds_sets.tfds_split_parts.
    canvas, clutter, piece, objects: see Digits.

  Raises:
    UserError: for a data set that is not prepared, or without uint8 images of one size and labels, and for labels and
      options out of range.
  """
  builder = open_tfds_set(folder, name)
  for feature in ('image', 'label'):
    choose(feature, builder.info.features, f"feature of tfds set '{name}':")
  image = builder.info.features['image']
  if len(image.shape) != 3 or None in image.shape:
    raise UserError(f"tfds set '{name}': images must have one size [height, width, C], got {list(image.shape)}")
  if image.np_dtype != np.uint8:
    raise UserError(f"tfds set '{name}': images must be uint8, got {np.dtype(image.np_dtype)}")
  splits = {}
  for split, part in tfds_split_parts(builder, name, validation).items():
    rows = list(TfdsRows(builder, part))
    splits[split] = np.stack([row['image'] for row in rows]), np.array([row['label'] for row in rows])
  # Labels that are plain numbers have no declared range.
  classes = getattr(builder.info.features['label'], 'num_classes', None) or int(splits['train'][1].max()) + 1
  for split, (_, labels) in splits.items():
    _check_labels(labels, classes, f"tfds set '{name}', {split}: label")
  return _make_splits(splits, classes, CanvasOptions(canvas, clutter, piece, objects))


DIGITS: Mapping[str, Callable[..., dict[str, Digits]]] = {'digits': digits, 'npz': npz, 'tfds': tfds}


def load_digit_splits(config: GlimpsingDataConfig) -> dict[str, Digits]:
  """Returns the splits of the task `config.task` from `config.folder`.

  Raises:
    UserError: for an unknown task or an invalid option, and as the task does.
  """
  _, row, options = bind(config.task, DIGITS, 'task')
  return row(os.path.expanduser(config.folder or ''), **options)


def _check_arrays(
  pictures: np.ndarray, labels: np.ndarray, picture_shape: tuple[int, ...], path: str, split: str
) -> None:
  """Raises UserError if there are no pictures, or for a wrong shape or type; `picture_shape` is that of training."""
  if pictures.ndim not in (3, 4) or pictures.dtype != np.uint8 or pictures.shape[1:] != picture_shape:
    sizes = picture_shape if len(picture_shape) in (2, 3) else ('height', 'width')
    expected = f'uint8 [P, {", ".join(map(str, sizes))}]'
    raise UserError(f'{path}: x_{split} must be {expected}, got {pictures.dtype} {list(pictures.shape)}')
  if not pictures.size:
    raise UserError(f'{path}: x_{split} must have at least one picture and one pixel, got {list(pictures.shape)}')
  if labels.shape != pictures.shape[:1] or labels.dtype.kind not in 'iu':
    expected = f'whole numbers [{len(pictures)}]'
    raise UserError(f'{path}: y_{split} must be {expected}, got {labels.dtype} {list(labels.shape)}')


def _check_labels(labels: np.ndarray, classes: int, name: str, reason: str = '') -> None:
  """Raises UserError for the first label out of range."""
  for row in np.flatnonzero((labels < 0) | (labels >= classes))[:1]:
    raise UserError(f'{name}[{row}] must be from 0 to {classes - 1}{reason}, got {labels[row]}')


class CanvasOptions(NamedTuple):
  """Options of the canvas, see Digits."""

  canvas: int
  clutter: int
  piece: int
  objects: int


def _make_splits(
  splits: Mapping[str, tuple[np.ndarray, np.ndarray]], classes: int, options: CanvasOptions
) -> dict[str, Digits]:
  """Makes Digits from (pictures, labels); pictures may lack channels. Raises UserError for options out of range."""
  size = max(splits['train'][0].shape[1:3])
  canvas, clutter, piece, objects = options
  if canvas and canvas < size:
    zero = '' if clutter or objects > 1 else '0 or '
    raise UserError(f'canvas={canvas} is smaller than the pictures; expected {zero}at least {objects * size}')
  if clutter and not canvas:
    raise UserError(f'clutter={clutter} needs a canvas of at least {objects * size} pixels, got canvas=0')
  shorter_side = min(splits['train'][0].shape[1:3])
  if clutter and not 1 <= piece <= shorter_side:
    raise UserError(f'piece must be from 1 to {shorter_side}, the shorter side of the pictures, got {piece}')
  if objects > 1 and canvas < objects * size:
    raise UserError(f'objects={objects} needs a canvas of at least {objects * size} pixels, got canvas={canvas}')
  result = {}
  for split, (pictures, labels) in splits.items():
    pictures = pictures.reshape(*pictures.shape[:3], -1)
    result[split] = Digits(pictures, labels.astype(np.int32), classes, *options)
  return result


def render_digit(split: Digits, row: int, rng: np.random.Generator) -> np.ndarray:
  """Returns the picture of `render_example`.

  Arguments: see `render_example`.
  """
  return render_example(split, row, rng)[0]


def render_example(split: Digits, row: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
  """Returns the picture of a row on its canvas, and its labels.

  Mnih et al. 2014, sections 4.1.2 and 4.1.3; Ba et al. 2015.

  With several objects, random pictures of the split are placed on the same canvas, without overlap.

  Args:
    split: the pictures.
    row: the row.
    rng: draws the positions, the other objects and the clutter.

  Returns:
    The canvas, or the picture itself if `split.canvas` is 0, uint8 [height, width, C]; and the labels from left to
    right, [K].
  """
  if not split.canvas:
    return split.pictures[row], split.labels[[row]]
  canvas = np.zeros((split.canvas, split.canvas, split.pictures.shape[-1]), np.uint8)
  rows = np.array([row, *rng.integers(len(split.pictures), size=split.objects - 1)])
  corners = _draw_corners(split, rng)
  for corner, object_row in zip(corners, rows, strict=True):
    _paste(canvas, split.pictures[object_row], corner)
  for _ in range(split.clutter):
    picture = split.pictures[rng.integers(len(split.pictures))]
    top, left = (rng.integers(size - split.piece + 1) for size in picture.shape[:2])
    piece = picture[top : top + split.piece, left : left + split.piece]
    _paste(canvas, piece, _draw_corner(canvas.shape, piece.shape, rng))
  from_left = np.argsort([left for _, left in corners], kind='stable')
  return canvas, split.labels[rows[from_left]]


def _draw_corners(split: Digits, rng: np.random.Generator) -> list[tuple[int, int]]:
  """Draws the upper left corners of all objects until none overlap."""
  shape = split.pictures.shape[1:]
  while True:
    corners = [_draw_corner((split.canvas, split.canvas), shape, rng) for _ in range(split.objects)]
    distances = ((abs(a - c), abs(b - d)) for (a, b), (c, d) in itertools.combinations(corners, 2))
    if all(rows >= shape[0] or columns >= shape[1] for rows, columns in distances):
      return corners


def _draw_corner(whole: Sequence[int], part: Sequence[int], rng: np.random.Generator) -> tuple[int, int]:
  top, left = (int(rng.integers(size - length + 1)) for size, length in zip(whole[:2], part[:2], strict=True))
  return top, left


def _paste(canvas: np.ndarray, picture: np.ndarray, corner: tuple[int, int]) -> None:
  """Adds a picture at a position; the brighter pixel wins."""
  top, left = corner
  region = canvas[top : top + picture.shape[0], left : left + picture.shape[1]]
  np.maximum(region, picture, out=region)


class DigitBatches(OrderedBatches):
  """Endless training batches of one split, see batching.BatchOrder. Canvases are drawn anew in each epoch."""

  shape_names = 'rows, height, width'
  min_row_positions = sum  # (height, width) -> a lower bound of the pixels of a row; see systems.base.BatchSequence

  def __init__(self, split: Digits, size: int, seed: int = 0, share: Share = WHOLE_BATCH):
    """Assigns the rows of a split to batches; for size, seed and share see batching.BatchOrder."""
    shape = render_digit(split, 0, np.random.default_rng(0)).shape[:2]
    self._order = BatchOrder(np.zeros(len(split.labels), int), [shape], size, seed=seed, share=share)
    self._split = split
    self._seed = seed

  def __getitem__(self, step: int) -> DigitBatch:
    epoch, rows, _ = self._order[step]
    return gather_digits(self._split, rows, (self._seed, epoch))


def eval_digit_batches(split: Digits, size: int) -> list[DigitBatch]:
  """Returns batches of `size` rows for evaluation: every row once, on a canvas that depends on the row alone."""
  zeros = np.zeros(len(split.labels), int)  # all pictures are in one bucket, and have equal lengths
  batches = eval_batch_rows(zeros, [()], zeros, size)
  return [gather_digits(split, rows, (0,)) for rows, _ in batches]


def gather_digits(split: Digits, rows: np.ndarray, seed: Sequence[int]) -> DigitBatch:
  """Returns rows of a split as one batch.

  Args:
    split: the pictures.
    rows: indices of rows; -1 = a filler row.
    seed: seeds of the canvases; the canvas of a row is a function of (seed, row).
  """
  examples = [render_example(split, row, np.random.default_rng((*seed, int(row)))) for row in np.maximum(rows, 0)]
  pictures, labels = (np.stack(column) for column in zip(*examples, strict=True))
  labels = np.where(rows[:, None] >= 0, labels, 0).astype(np.int32)
  return DigitBatch(pictures, labels if split.objects > 1 else labels[:, 0], rows.astype(np.int32))
