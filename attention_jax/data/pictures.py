"""Pictures with captions: readers, and their batches as functions of (seed, step)."""

import csv
import functools
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.data.batching import Batch, Order, eval_batch_rows
from attention_jax.data.files import read_arrays, read_lines
from attention_jax.data.text import Corpus, format_count
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.specs import bind
from attention_jax.tokens import EOS, PAD

IMAGE_EXTENSIONS = ('.bmp', '.gif', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')
SPLITS = ('train', 'validation', 'test', 'unseen')
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; the last two lie outside


class Pictures(NamedTuple):
  """One split.

  Attributes:
    pictures: [P, height, width, C]: uint8, or float32 features of a grid.
    names: of each picture.
    captions: rows, of one picture or of several.
    picture_index: the picture of each caption, its number.
    boxes: of each caption the gold box of each word, None for words that have none; None where nobody knows any.
    files: of each picture the image that it is or that features were computed from; None where there are none.
    num_uncaptioned: how many images lie beside these and have no caption.
  """

  pictures: np.ndarray
  names: list[str]
  captions: list[str]
  picture_index: list[int]
  boxes: list[list[Box | None]] | None = None
  files: list[str] | None = None
  num_uncaptioned: int = 0

  @property
  def corpus(self) -> Corpus:
    """Names of pictures and captions, as pairs of texts."""
    return Corpus([self.names[i] for i in self.picture_index], self.captions)


class LazySplits(Mapping):
  """Splits by their names, each made when it is first asked for."""

  def __init__(self, names: Iterable[str], make: Callable[[str], Any]):
    self._names, self._make = list(names), functools.cache(make)

  def __getitem__(self, name: str) -> Any:
    if name not in self._names:
      raise KeyError(name)
    return self._make(name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)


def shapes(folder: str, *, seed: int = 0) -> Mapping[str, Pictures]:
  """Things on a cluttered ground, told from left to right, with gold boxes; generated, nothing is stored."""
  from attention_jax.data.builders import shapes as builder

  def drawn(split: str) -> Pictures:
    pictures, captions, boxes = zip(*builder.generate(split, seed), strict=True)
    names = [f'{split} {i}' for i in range(len(pictures))]
    return Pictures(np.stack(pictures), names, list(captions), list(range(len(names))), list(boxes))

  return LazySplits(SPLITS, drawn)


def captions(
  folder: str,
  *,
  images: str = 'images',
  captions: str = 'captions.csv',
  size: int = 64,
  features: str = '',
  validation: float = 0.1,
  test: float = 0.1,
  lowercase: bool = True,
) -> dict[str, Pictures]:
  """A folder of images and a table of their captions, with the columns image and caption, and split if it has one.

  Args:
    images, captions: paths below the folder.
    size: to which images are scaled, pixels: the middle square of each.
    features: an .npz file with an array [height, width, C] for each image by its name, or [cells, C] of a square grid,
      to be read instead of images.
    validation, test: shares of the images where the table has no splits: those last in the order of their names.
    lowercase: whether captions are read in lower case.

  Raises: UserError naming the file and the row that is not as it should be.
  """
  for name, share in (('validation', validation), ('test', test)):
    if not 0 <= share < 1:
      raise UserError(f'captions: {name}={share}; possible: from 0 to below 1')
  if size < 1:
    raise UserError(f'captions: size={size}; possible: 1 or more')
  path = os.path.join(folder, captions)
  rows = _read_table(path)
  names = sorted({row['image'] for _, row in rows})
  if 'split' not in rows[0][1]:
    held = [round(len(names) * share) for share in (validation, test)]
    edges = len(names) - sum(held), len(names) - held[1]
    share_of = {name: SPLITS[(i >= edges[0]) + (i >= edges[1])] for i, name in enumerate(names)}
    rows = [(number, row | {'split': share_of[row['image']]}) for number, row in rows]
  stored = read_arrays(os.path.join(folder, features)) if features else None
  found, split_of, shape = {}, {}, None
  for split in SPLITS:
    mine = [(number, row) for number, row in rows if row['split'] == split]
    if mine:
      numbers, pictures = {}, []
      for number, row in mine:
        if (name := row['image']) not in numbers:
          numbers[name], where = len(numbers), f'{path}:{number}: '
          if (before := split_of.setdefault(name, split)) != split:
            raise UserError(f'{where}{name} is in split {before} too; possible: one split for each image')
          file = os.path.join(folder, images, name)
          pictures.append(_stored(stored, name, where) if features else read_image(file, size, where))
          shape = shape or pictures[0].shape
          if pictures[-1].shape != shape:
            raise UserError(f'{where}{name} is {list(pictures[-1].shape)}, those before it {list(shape)}')
      texts = [row['caption'].lower() if lowercase else row['caption'] for _, row in mine]
      found[split] = Pictures(
        np.stack(pictures),
        list(numbers),
        texts,
        [numbers[row['image']] for _, row in mine],
        files=[os.path.join(folder, images, name) for name in numbers],
        num_uncaptioned=0
        if features or split != 'train'
        else len(set(list_images(os.path.join(folder, images))) - set(names)),
      )
  if 'train' not in found:
    raise UserError(f'{path}: no row of split train; it has: {", ".join(sorted({row["split"] for _, row in rows}))}')
  return found


PICTURES: Mapping[str, Callable[..., Mapping[str, Pictures]]] = {'captions': captions, 'shapes': shapes}


def load_pictures(config: Mapping[str, Any]) -> Mapping[str, Pictures]:
  """The splits of the task that `config['task']` names, from `config['folder']`; 'train' is always among them."""
  _, row, options = bind(config['task'], PICTURES, 'task')
  return row(os.path.expanduser(config['folder'] or ''), **options)


def _read_table(path: str) -> list[tuple[int, dict[str, str]]]:
  rows = csv.DictReader(io.StringIO('\n'.join(read_lines(path)) + '\n'), strict=True, skipinitialspace=True)
  if missing := [name for name in ('image', 'caption') if name not in (rows.fieldnames or ())]:
    raise UserError(f"{path}:1: no column '{missing[0]}'; it has: {', '.join(rows.fieldnames or ())}")
  found = []
  for row in _each(rows, path):
    if None in row:  # where DictReader keeps what there is beyond the columns
      raise UserError(f'{path}:{rows.line_num}: more fields than columns; a caption with a comma stands in quotes')
    for name in rows.fieldnames:
      if not (row[name] or '').strip():
        raise UserError(f'{path}:{rows.line_num}: {name} is empty')
    if row.get('split', 'train') not in SPLITS:
      raise UserError(f'{path}:{rows.line_num}: split {row["split"]!r}; possible: {", ".join(SPLITS)}')
    found.append((rows.line_num, row))
  if not found:
    raise UserError(f'{path}: no captions')
  return found


def _each(rows: csv.DictReader, path: str) -> Iterator[dict[str, str]]:
  first = 2  # the line on which the next row begins
  try:
    for row in rows:
      yield row
      first = rows.line_num + 1
  except csv.Error as error:
    raise UserError(f'{path}:{first}: not a row of a table ({error})') from error


def list_images(folder: str | os.PathLike) -> list[str]:
  """The names of the images in a folder, sorted. Raises: UserError for a folder that cannot be read."""
  try:
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(IMAGE_EXTENSIONS))
  except OSError as error:
    raise UserError(f'{folder}: cannot be read ({error.strerror})') from error


def read_image(path: str, size: int, where: str = '', max_upscale: float = 4.0) -> np.ndarray:
  """The middle square of an image, [size, size, 3] uint8, before a white ground where it is transparent.

  Args: where, what errors begin with; max_upscale, how many times as large as in the file it may become.
  Raises: UserError for what is no image, and for one that is too small.
  """
  from PIL import Image, ImageOps

  try:
    with Image.open(path) as image:
      if min(image.size) * max_upscale < size:
        possible = f'possible for size={size}: {math.ceil(size / max_upscale)} and more'
        raise UserError(f'{where}{path}: {image.width} x {image.height} pixels; {possible}')
      return np.asarray(ImageOps.fit(_opaque(ImageOps.exif_transpose(image)), (size, size)), np.uint8)
  except UserError:
    raise
  except FileNotFoundError as error:
    raise UserError(f'{where}{path}: no such file') from error
  except Exception as error:  # the readers of formats each raise kinds of their own
    raise UserError(f'{where}{path}: not an image that can be read ({" ".join(str(error).split())})') from error


def _opaque(image):
  """As RGB of 8 bits: PIL would clip grey levels of 16 bits to white, and show colours that nobody is to see."""
  from PIL import Image

  if image.mode.startswith('I'):
    image = image.point(lambda level: level / 256).convert('L')
  if image.has_transparency_data:
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA')).convert('RGB')
  return image.convert('RGB')


def _stored(stored: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray:
  if name not in stored:
    raise UserError(f'{where}the features have no array {name!r}')
  found = stored[name]
  if found.ndim == 2 and (side := math.isqrt(len(found))) ** 2 == len(found):
    found = found.reshape(side, side, -1)
  if found.ndim != 3:
    expected = '[height, width, features], or [cells, features] of a square'
    raise UserError(f'{where}features of {name!r} are {list(found.shape)}; expected {expected}')
  if found.dtype.kind not in 'fiu' or not np.isfinite(found).all():
    raise UserError(f'{where}features of {name!r} are not all finite numbers ({found.dtype})')
  return found.astype(np.float32)


class EncodedCaptions(NamedTuple):
  """A split as ids: captions with EOS, all after one another, and what each shows."""

  pictures: np.ndarray
  picture_index: np.ndarray
  target: np.ndarray
  offsets: np.ndarray

  @property
  def lengths(self) -> np.ndarray:
    return np.diff(self.offsets)


def encode_captions(split: Pictures, vocabulary: Vocabulary) -> EncodedCaptions:
  """The ids of the captions of a split."""
  rows = [np.array([*vocabulary.encode(caption), EOS], np.int32) for caption in split.captions]
  offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
  return EncodedCaptions(split.pictures, np.array(split.picture_index), np.concatenate(rows), offsets)


def check_caption_lengths(buckets: Any) -> tuple[int, ...]:
  """Lengths of captions, EOS included, the shortest first. Raises: UserError for anything else."""
  lengths = [buckets] if isinstance(buckets, int) else list(buckets) if isinstance(buckets, tuple | list) else []
  if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
    raise UserError(f'buckets are lengths of captions such as (16, 32), got {buckets!r}')
  return tuple(sorted(set(lengths)))


def assign_lengths(encoded: EncodedCaptions, lengths: Sequence[int]) -> np.ndarray:
  """For each caption the position of the shortest length that holds it; -1 for none."""
  found = np.searchsorted(np.array(lengths), encoded.lengths)
  return np.where(found < len(lengths), found, -1)


class CaptionBatches:
  """The training batches of one split, without end: `batches[step]` for any step >= 0, see batching.Order."""

  shape_names = 'rows, caption'

  def __init__(
    self, encoded: EncodedCaptions, lengths: Sequence[int], size: int, seed: int = 0, shard: int = 0, shards: int = 1
  ):
    buckets = [(length,) for length in lengths]
    self._order = Order(assign_lengths(encoded, lengths), buckets, size, seed=seed, shard=shard, shards=shards)
    self._encoded = encoded

  def __len__(self) -> int:
    """Batches in an epoch."""
    return len(self._order)

  @property
  def shapes(self) -> list[tuple[int, int]]:
    """The (rows, caption) that occur."""
    return self._order.shapes

  def __getitem__(self, step: int) -> Batch:
    _, rows, (length,) = self._order[step]
    return gather_captions(self._encoded, rows, length)


def eval_caption_batches(encoded: EncodedCaptions, lengths: Sequence[int], size: int) -> Iterator[Batch]:
  """Batches for evaluation: every caption that fits once."""
  buckets = [(length,) for length in lengths]
  for rows, (length,) in eval_batch_rows(assign_lengths(encoded, lengths), buckets, encoded.lengths, size):
    yield gather_captions(encoded, rows, length)


def gather_captions(encoded: EncodedCaptions, rows: np.ndarray, length: int) -> Batch:
  """The given rows (-1 = a filler row), with a picture [height, width, C] for each as the source, of one part."""
  real = rows >= 0
  starts = encoded.offsets[rows]
  lengths = np.where(real, encoded.offsets[rows + 1] - starts, 0)
  mask = np.arange(length) < lengths[:, None]
  ids = encoded.target[np.where(mask, starts[:, None] + np.arange(length), 0)]
  target = np.where(mask, ids, PAD).astype(np.int32)
  return Batch(encoded.pictures[encoded.picture_index[rows]], real[:, None], target, mask, rows.astype(np.int32), None)


def describe_captions(name: str, split: Pictures, encoded: EncodedCaptions, lengths: Sequence[int]) -> str:
  """A line on a split: how many pictures and captions, and how many are longer than every bucket."""
  shape = ' x '.join(map(str, split.pictures.shape[1:]))
  long = int(np.sum(assign_lengths(encoded, lengths) < 0))
  left = f'; {format_count(long, "caption")} longer than {lengths[-1]} tokens left out' if long else ''
  left += (
    f'; {format_count(split.num_uncaptioned, "image")} beside them without a caption' if split.num_uncaptioned else ''
  )
  return f'{name}: {format_count(len(split.names), "picture")} ({shape}), {format_count(len(split.captions), "caption")}{left}'
