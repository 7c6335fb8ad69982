"""Small pictures with labels, such as handwritten digits, put anywhere on a larger canvas, among pieces of others."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.data.batching import Order, eval_batch_rows
from attention_jax.data.files import read_arrays
from attention_jax.data.tfds_sets import open_tfds_set, tfds_split_parts
from attention_jax.errors import UserError, choose
from attention_jax.specs import bind


class Digits(NamedTuple):
  """One split.

  Attributes:
    pictures: uint8 [P, height, width, C], as they were written.
    labels: int32 [P], from 0.
    classes: how many labels there are.
    canvas: the height and width that they are put on; 0 leaves them as they are.
    clutter: how many pieces of other pictures are put there too.
    piece: how many pixels high and wide they are.
  """

  pictures: np.ndarray
  labels: np.ndarray
  classes: int
  canvas: int = 0
  clutter: int = 0
  piece: int = 8


class DigitBatch(NamedTuple):
  """B pictures of one shape.

  Attributes:
    picture: uint8 [B, height, width, C].
    label: int32 [B].
    index: int32 [B], the row in its split; -1 = a filler row.
  """

  picture: np.ndarray
  label: np.ndarray
  index: np.ndarray


def digits(folder: str, *, canvas: int = 0, clutter: int = 0, piece: int = 4) -> dict[str, Digits]:
  """The 1797 digits of 8 x 8 pixels that scikit-learn brings along."""
  from sklearn.datasets import load_digits

  found = load_digits()
  pictures = np.clip(found.images * 16, 0, 255).astype(np.uint8)
  order = np.random.default_rng(0).permutation(len(pictures))
  parts = {'train': order[:1297], 'validation': order[1297:1547], 'test': order[1547:]}
  own = {split: (pictures[rows], found.target[rows]) for split, rows in parts.items()}
  return _on_canvas(own, 10, canvas, clutter, piece)


def npz(
  folder: str, *, path: str = 'mnist.npz', validation: int = 5000, canvas: int = 0, clutter: int = 0, piece: int = 8
) -> dict[str, Digits]:
  """An .npz file as MNIST is often kept: x_train and x_test, uint8 [P, height, width] or [P, height, width, C], and
  y_train and y_test, whole numbers from 0; the last of training validate."""
  path = os.path.join(folder, os.path.expanduser(path))
  found = read_arrays(path)
  missing = [name for name in ('x_train', 'y_train', 'x_test', 'y_test') if name not in found]
  if missing:
    raise UserError(f'{path}: no array {missing[0]!r}; it has: {", ".join(found)}')
  x, y, x_test, y_test = (found[name] for name in ('x_train', 'y_train', 'x_test', 'y_test'))
  for name, pictures, labels in (('train', x, y), ('test', x_test, y_test)):
    if pictures.ndim not in (3, 4) or pictures.dtype != np.uint8 or pictures.shape[1:] != x.shape[1:]:
      sizes = x.shape[1:] if x.ndim in (3, 4) else ('height', 'width')
      expected = f'uint8 [P, {", ".join(map(str, sizes))}]'
      raise UserError(f'{path}: x_{name} is {pictures.dtype} {list(pictures.shape)}; expected {expected}')
    if labels.shape != pictures.shape[:1] or labels.dtype.kind not in 'iu':
      expected = f'whole numbers [{len(pictures)}]'
      raise UserError(f'{path}: y_{name} is {labels.dtype} {list(labels.shape)}; expected {expected}')
    classes = int(y.max(initial=0)) + 1
    _check_labels(labels, classes, f'{path}: y_{name}')
  if not 0 < validation < len(x):
    raise UserError(f'{path}: validation={validation} of {len(x)} pictures; possible: from 1 to {len(x) - 1}')
  parts = {'train': (x[:-validation], y[:-validation]), 'validation': (x[-validation:], y[-validation:])}
  parts['test'] = (x_test, y_test)
  return _on_canvas(parts, classes, canvas, clutter, piece)


def tfds(
  folder: str,
  *,
  name: str = 'mnist',
  validation: str = 'train[-5000:]',
  canvas: int = 0,
  clutter: int = 0,
  piece: int = 8,
) -> dict[str, Digits]:
  """A tfds set of images of one size with labels under `folder`, such as 'mnist' or 'svhn_cropped'.

  Args: validation, as for tfds_sets.tfds_split_parts.
  """
  builder, found = open_tfds_set(folder, name), {}
  for feature in ('image', 'label'):
    choose(feature, builder.info.features, f"feature of tfds set '{name}':")
  shape = builder.info.features['image'].shape
  if len(shape) != 3 or None in shape:
    raise UserError(f"tfds set '{name}': images are {list(shape)}; possible: of one size, [height, width, C]")
  for split, part in tfds_split_parts(builder, name, validation).items():
    rows = list(builder.as_data_source(split=part))
    found[split] = np.stack([row['image'] for row in rows]), np.array([row['label'] for row in rows])
  # Of plain numbers nobody says how many there are.
  classes = getattr(builder.info.features['label'], 'num_classes', None) or int(found['train'][1].max()) + 1
  for split, (_, labels) in found.items():
    _check_labels(labels, classes, f"tfds set '{name}', {split}: label")
  return _on_canvas(found, classes, canvas, clutter, piece)


DIGITS: Mapping[str, Callable[..., dict[str, Digits]]] = {'digits': digits, 'npz': npz, 'tfds': tfds}


def load_digit_splits(config: Mapping[str, Any]) -> dict[str, Digits]:
  """The splits of the task that `config['task']` names, from `config['folder']`."""
  _, row, options = bind(config['task'], DIGITS, 'task')
  return row(os.path.expanduser(config['folder'] or ''), **options)


def _check_labels(labels: np.ndarray, classes: int, name: str) -> None:
  for row in np.flatnonzero((labels < 0) | (labels >= classes))[:1]:
    raise UserError(f'{name}[{row}] is {labels[row]}; possible: 0 to {classes - 1}, as in training')


def _on_canvas(parts: Mapping[str, tuple], classes: int, canvas: int, clutter: int, piece: int) -> dict[str, Digits]:
  """Splits of pictures, with an axis of channels or without, and labels."""
  size = max(parts['train'][0].shape[1:3])
  if canvas and canvas < size:
    raise UserError(f'canvas={canvas} is smaller than the pictures; possible: 0, or {size} and more')
  if clutter and not canvas:
    raise UserError(f'clutter={clutter} needs a canvas; possible: canvas=60')
  if clutter < 0 or (clutter and not 1 <= piece <= size):
    raise UserError(f'piece={piece}, clutter={clutter}; possible: pieces of 1 to {size} pixels, clutter of 0 or more')
  with_channels = lambda pictures: pictures.reshape(*pictures.shape[:3], -1)
  return {
    split: Digits(with_channels(pictures), labels.astype(np.int32), classes, canvas, clutter, piece)
    for split, (pictures, labels) in parts.items()
  }


def render_digit(split: Digits, row: int, draw: np.random.Generator) -> np.ndarray:
  """The picture of a row as it is shown: [height, width, C] uint8. Mnih et al. 2014, sections 4.1.2 and 4.1.3."""
  if not split.canvas:
    return split.pictures[row]
  shown = np.zeros((split.canvas, split.canvas, split.pictures.shape[-1]), np.uint8)
  _put(shown, split.pictures[row], draw)
  for _ in range(split.clutter):
    other = split.pictures[draw.integers(len(split.pictures))]
    top, left = (draw.integers(size - split.piece + 1) for size in other.shape[:2])
    _put(shown, other[top : top + split.piece, left : left + split.piece], draw)
  return shown


def _put(shown: np.ndarray, what: np.ndarray, draw: np.random.Generator) -> None:
  top, left = (draw.integers(whole - part + 1) for whole, part in zip(shown.shape[:2], what.shape[:2], strict=True))
  place = shown[top : top + what.shape[0], left : left + what.shape[1]]
  np.maximum(place, what, out=place)


class DigitBatches:
  """The training batches of one split, without end, see batching.Order: in each epoch every digit is put elsewhere."""

  shape_names = 'rows, height, width'

  def __init__(self, split: Digits, size: int, seed: int = 0, shard: int = 0, shards: int = 1):
    shape = render_digit(split, 0, np.random.default_rng(0)).shape[:2]
    self._order = Order(np.zeros(len(split.labels), int), [shape], size, seed=seed, shard=shard, shards=shards)
    self._split, self._seed = split, seed

  def __len__(self) -> int:
    """Batches in an epoch."""
    return len(self._order)

  @property
  def shapes(self) -> list[tuple[int, int, int]]:
    """The (rows, height, width) that occur: one."""
    return self._order.shapes

  def __getitem__(self, step: int) -> DigitBatch:
    epoch, rows, _ = self._order[step]
    return gather_digits(self._split, rows, (self._seed, epoch))


def eval_digit_batches(split: Digits, size: int) -> list[DigitBatch]:
  """Batches for evaluation: every digit once, put where it always is."""
  chosen = np.zeros(len(split.labels), int)
  return [gather_digits(split, rows, (0,)) for rows, _ in eval_batch_rows(chosen, [()], chosen, size)]


def gather_digits(split: Digits, rows: np.ndarray, seed: Sequence[int]) -> DigitBatch:
  """The given rows (-1 = a filler row); how each is put is a function of (seed, row)."""
  real = rows >= 0
  shown = [render_digit(split, row, np.random.default_rng((*seed, int(row)))) for row in np.maximum(rows, 0)]
  return DigitBatch(np.stack(shown), np.where(real, split.labels[rows], 0).astype(np.int32), rows.astype(np.int32))
