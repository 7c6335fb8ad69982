"""Pictures with captions: readers, and their batches as functions of (seed, step)."""

import csv
import functools
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention_jax.data import preparing, vocab
from attention_jax.data.batching import (
  WHOLE_BATCH,
  Batch,
  BatchOrder,
  OrderedBatches,
  Share,
  eval_batch_rows,
  gather_padded,
)
from attention_jax.data.files import ArrayFile, join_path, read_lines
from attention_jax.data.prepared import IDS, TEXT, PreparedField, PreparedTable, Schema, open_prepared
from attention_jax.data.splits import SPLITS
from attention_jax.data.text import Corpus, format_count
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.specs import Fraction, Size, bind
from attention_jax.systems.captioning.config import CaptioningDataConfig
from attention_jax.systems.captioning.images import list_images, read_image
from attention_jax.tokens import EOS

CAPTION_TABLE = Schema({'target': IDS, 'caption': TEXT, 'boxes': TEXT}, ('length', 'picture', 'row'))
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are exclusive


class ImageFiles:
  """Pictures [P, height, width, C] of image files, or their features, which are read when they are used.

  Args:
    names: the name of each picture.
    places: the prefix of error messages about each picture.
    read: (name, prefix of error messages) -> the picture.
    reference: pictures whose shape these must have; None for that of the first one of these.
  """

  def __init__(
    self,
    names: Sequence[str],
    places: Sequence[str],
    read: Callable[[str, str], np.ndarray],
    reference: 'ImageFiles | None' = None,
  ):
    self._names = names
    self._places = places
    self._read = read
    self._reference = reference or self

  @functools.cached_property
  def _first(self) -> np.ndarray:
    return self._read(self._names[0], self._places[0])

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of all pictures."""
    return (len(self._names), *self._reference._first.shape)

  @property
  def dtype(self) -> np.dtype:
    """The dtype of all pictures."""
    return self._reference._first.dtype

  def __getitem__(self, rows: slice | Sequence[int]) -> np.ndarray:
    rows = np.arange(len(self._names))[rows]
    pictures = np.empty((len(rows), *self.shape[1:]), self.dtype)
    for i, row in enumerate(rows.tolist()):
      picture = self._read(self._names[row], self._places[row])
      if picture.shape != self.shape[1:]:
        expected = f'the shape of the pictures read before it {list(self.shape[1:])}'
        raise UserError(f'{self._places[row]}{self._names[row]} must have {expected}, got {list(picture.shape)}')
      pictures[i] = picture
    return pictures


class PreparedPictures:
  """Pictures [P, height, width, C] on disk, which are read when they are used."""

  def __init__(self, table: PreparedTable, shape: Sequence[int], dtype: str):
    self.shape = (table.rows, *shape)
    self.dtype = np.dtype(dtype)
    self.identity = table.identity
    self._table = table

  def __getitem__(self, rows: int | slice | Sequence[int]) -> np.ndarray:
    numbers = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows
    distinct, inverse = np.unique(numbers, return_inverse=True)  # captions may share a picture
    (pictures,) = self._table.read(distinct, 'picture')
    return np.array(pictures, self.dtype).reshape(-1, *self.shape[1:])[inverse]


class Pictures(NamedTuple):
  """One split.

  Attributes:
    pictures: [P, height, width, C]: uint8, or float32 features of a grid; an array, ImageFiles or PreparedPictures.
    names: the name of each picture.
    captions: the captions; a picture may have several.
    picture_index: the number of the picture of each caption.
    boxes: the gold box of each word of each caption, None for words that have none; None without gold boxes.
    files: the path of the image of each picture, which need not exist if `pictures` are precomputed features; None for
      generated pictures.
    num_uncaptioned: number of images in the folder that have no caption; 0 for splits other than 'train' and for
      features.
    prepared: the table of the captions, if they are on disk.
  """

  pictures: np.ndarray | ImageFiles | PreparedPictures
  names: Sequence[str]
  captions: Sequence[str]
  picture_index: Sequence[int]
  boxes: Sequence[list[Box | None]] | None = None
  files: Sequence[str] | None = None
  num_uncaptioned: int = 0
  prepared: PreparedTable | None = None

  @property
  def corpus(self) -> Corpus:
    """Names of pictures and captions, as pairs of texts."""
    names = list(self.names)
    return Corpus([names[i] for i in self.picture_index], self.captions)


class LazySplits(Mapping):
  """Splits by name, each made on first access."""

  def __init__(self, names: Iterable[str], make: Callable[[str], Any]):
    """Stores the names, and the function that makes the split of a name."""
    self._names = list(names)
    self._make = functools.cache(make)

  def __getitem__(self, name: str) -> Any:
    if name not in self._names:
      raise KeyError(name)
    return self._make(name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)


def shapes(folder: str, *, seed: int = 0) -> Mapping[str, Pictures]:
  """Coloured shapes on a cluttered background, described from left to right, with gold boxes; generated, not stored."""
  from attention_jax.systems.captioning import shapes as builder

  def generate_split(split: str) -> Pictures:
    pictures, captions, boxes = zip(*builder.generate(split, seed), strict=True)
    names = [f'{split} {i}' for i in range(len(pictures))]
    return Pictures(np.stack(pictures), names, list(captions), list(range(len(names))), list(boxes))

  return LazySplits(SPLITS, generate_split)


def captions(
  folder: str,
  *,
  images: str = 'images',
  captions: str = 'captions.csv',
  size: Size = 64,
  features: str = '',
  validation: Fraction = 0.1,
  test: Fraction = 0.1,
  lowercase: bool = True,
) -> dict[str, Pictures]:
  """A folder of images and a table of captions with the columns image and caption, and optionally split.

  Args:
    folder: the folder that the other paths start from.
    images: the folder of the images.
    captions: the table.
    size: height and width to which the central square of each image is scaled, pixels.
    features: an .npz file with an array [height, width, C] for each image by its name, or [cells, C] of a square grid,
      to read instead of the images.
    validation, test: shares of the images in these splits if the table has no column split. Sorted by name, the last
      images are those of test, and the ones before them those of validation.
    lowercase: whether captions are converted to lower case.

  Raises:
    UserError: for a mistake in the table, an image or the features. The message names the table and, where there is
      one, the line; for a file of features or a folder of images that cannot be read, it names that.
  """
  path = join_path(folder, captions)
  image_folder = join_path(folder, images)
  rows = _read_table(path)
  names = sorted({row.image for row in rows})
  has_splits = bool(rows[0].split)
  if not has_splits:
    split_of_name = _split_names(names, validation, test)
    rows = [row._replace(split=split_of_name[row.image]) for row in rows]
  _check_one_split_per_image(rows, path)
  if not any(row.split == 'train' for row in rows):
    expected = 'at least one' if has_splits else f'smaller shares than validation={validation} and test={test}'
    names_of_splits = ', '.join(sorted({row.split for row in rows}))
    raise UserError(f'{path}: no row of split train, only of: {names_of_splits}; expected {expected}')
  features_by_name = ArrayFile(join_path(folder, features)) if features else None

  def read_picture(name: str, where: str) -> np.ndarray:
    if features_by_name is not None:
      return _select_features(features_by_name, name, where)
    return read_image(os.path.join(image_folder, name), size, where)

  splits = {}
  for split in SPLITS:
    split_rows = [row for row in rows if row.split == split]
    if not split_rows:
      continue
    places: dict[str, str] = {}
    for row in split_rows:
      places.setdefault(row.image, f'{path}:{row.line}: ')
    picture_numbers = {name: i for i, name in enumerate(places)}
    pictures = ImageFiles([*places], [*places.values()], read_picture, splits['train'].pictures if splits else None)
    num_uncaptioned = 0
    if split == 'train' and not features:
      num_uncaptioned = len(set(list_images(image_folder)) - set(names))
    splits[split] = Pictures(
      pictures,
      list(places),
      [row.caption.lower() if lowercase else row.caption for row in split_rows],
      [picture_numbers[row.image] for row in split_rows],
      files=[os.path.join(image_folder, name) for name in places],
      num_uncaptioned=num_uncaptioned,
    )
  return splits


def prepared(folder: str) -> dict[str, Pictures]:
  """A data set that `experiments.prepare` wrote to `folder`: pictures and captions stay on disk."""
  with open_prepared(folder, 'captioning') as (path, manifest):
    splits = {}
    for split, fields in manifest['pictures'].items():
      captions = PreparedTable(path, manifest, split, CAPTION_TABLE)
      table = PreparedTable(path, manifest, f'{split}_pictures', _picture_table(fields['dtype']))
      splits[split] = Pictures(
        PreparedPictures(table, fields['shape'], fields['dtype']),
        PreparedField(table, 'name'),
        PreparedField(captions, 'caption'),
        captions.column('picture'),
        PreparedField(captions, 'boxes', _parse_boxes) if fields['boxes'] else None,
        PreparedField(table, 'file') if fields['files'] else None,
        fields['num_uncaptioned'],
        captions,
      )
    return splits


def _picture_table(dtype: str) -> Schema:
  return Schema({'picture': dtype, 'name': TEXT, 'file': TEXT}, ('row',))


def _parse_boxes(text: str) -> list[Box | None]:
  return [box and tuple(box) for box in json.loads(text)]


PICTURES: Mapping[str, Callable[..., Mapping[str, Pictures]]] = {
  'captions': captions,
  'shapes': shapes,
  'prepared': prepared,
}


def open_pictures(config: CaptioningDataConfig) -> Mapping[str, Pictures]:
  """Returns the splits of the task `config.task` from `config.folder`, without reading image files or features.

  Raises:
    UserError: for an unknown task or an invalid option, and as the task does.
  """
  _, row, options = bind(config.task, PICTURES, 'task')
  return row(os.path.expanduser(config.folder or ''), **options)


def load_pictures(config: CaptioningDataConfig) -> Mapping[str, Pictures]:
  """Returns the splits as `open_pictures` does, with image files and features in memory; 'train' is always among them.

  Raises:
    UserError: as `open_pictures` does, for a mistake in an image or the features, and for a data set that was prepared
      with other settings.
  """
  splits = open_pictures(config)
  if isinstance(splits, LazySplits):
    return splits
  if (train := splits['train']).prepared is not None:
    train.prepared.check_settings(_settings(config))
  return {
    name: split._replace(pictures=split.pictures[:]) if isinstance(split.pictures, ImageFiles) else split
    for name, split in splits.items()
  }


def prepare_captions(config: CaptioningDataConfig) -> preparing.Preparation:
  """Returns the pictures and captions of a config as a data set to write; all splits are stored as tables.

  Image files that change during the preparation are not detected.

  Raises:
    UserError: for mistakes in the config or the data.
  """
  splits = open_pictures(config)
  if splits['train'].prepared is not None:
    raise UserError(f'{config.folder or "."} is prepared already; expected a task other than {config.task!r}')
  fields = {
    name: {
      'shape': split.pictures.shape[1:],
      'dtype': np.dtype(split.pictures.dtype).str,
      'boxes': split.boxes is not None,
      'files': split.files is not None,
      'num_uncaptioned': split.num_uncaptioned,
    }
    for name, split in splits.items()
  }
  texts = json.dumps([[split.names, split.captions, split.picture_index] for split in splits.values()])
  digest = hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()
  request = {'system': 'captioning', 'task': config.task, 'name': config.folder or '.', 'texts': digest}

  def open_tables(folder: Path, log: preparing.Log) -> Iterator[preparing.RecordTable]:
    preparing.store_vocabulary(config.vocabulary, 'target', splits['train'].captions, folder, log)
    vocabulary = vocab.load_stored(config.vocabulary, str(folder), 'target')
    return [table for name, split in splits.items() for table in _tables(name, split, vocabulary)]

  return preparing.Preparation(request | {'pictures': fields} | _settings(config), {}, open_tables)


def _tables(name: str, split: Pictures, vocabulary: Vocabulary) -> list[preparing.RecordTable]:
  """The tables of the pictures and of the captions of a split."""

  def encode_pictures(chunk: Sequence[preparing.NumberedExample]) -> preparing.EncodedRows:
    rows = (numbered.example for numbered in chunk)
    files = split.files or [''] * len(split.names)
    return preparing.EncodedRows((split.pictures[[row]], split.names[row], files[row]) for row in rows)

  def encode(chunk: Sequence[preparing.NumberedExample]) -> preparing.EncodedRows:
    rows = [numbered.example for numbered in chunk]
    ids = [_encode_caption(split.captions[row], vocabulary) for row in rows]
    boxes = ['' if split.boxes is None else json.dumps(split.boxes[row]) for row in rows]
    columns = np.array([*map(len, ids)]), np.array([split.picture_index[row] for row in rows])
    return preparing.EncodedRows(zip(ids, [split.captions[row] for row in rows], boxes, strict=True), columns)

  def examples(count: int) -> Iterator[tuple[int, float]]:
    return ((row, (row + 1) / count) for row in range(count))

  return [
    preparing.RecordTable(
      f'{name}_pictures', 'picture', functools.partial(examples, len(split.names)), encode_pictures, _row_number
    ),
    preparing.RecordTable(name, 'caption', functools.partial(examples, len(split.captions)), encode, _row_number),
  ]


def _row_number(numbers: np.ndarray) -> np.ndarray:
  return numbers - 1


def _settings(config: CaptioningDataConfig) -> dict[str, Any]:
  """What the ids of a prepared data set depend on."""
  return {'config.data.vocabulary': config.vocabulary}


class _CaptionRow(NamedTuple):
  """A row of a table of captions; `split` is '' if the table has no such column."""

  line: int
  image: str
  caption: str
  split: str


def _read_table(path: str) -> list[_CaptionRow]:
  reader = csv.DictReader(io.StringIO('\n'.join(read_lines(path)) + '\n'), strict=True, skipinitialspace=True)
  try:
    columns = reader.fieldnames or ()
  except csv.Error as error:
    raise UserError(f'{path}:1: not a row of a table ({error})') from error
  required = ('image', 'caption')
  for name in required:
    if name not in columns:
      raise UserError(f"{path}:1: no column '{name}'; it has: {', '.join(columns)}")
  rows = []
  for row in _iter_rows(reader, path):
    where = f'{path}:{reader.line_num}'
    if None in row:  # the key of fields beyond the columns
      raise UserError(f'{where}: more fields than columns; a caption with a comma needs quotes')
    for name in (*required, 'split') if 'split' in row else required:  # other columns are not read
      if not (row[name] or '').strip():
        raise UserError(f'{where}: {name} is empty')
    if 'split' in row and row['split'] not in SPLITS:
      raise UserError(f'{where}: unknown split {row["split"]!r}; expected one of: {", ".join(SPLITS)}')
    rows.append(_CaptionRow(reader.line_num, row['image'], row['caption'], row.get('split', '')))
  if not rows:
    raise UserError(f'{path}: no captions; expected at least one row below the header')
  return rows


def _iter_rows(reader: csv.DictReader, path: str) -> Iterator[dict[str, str]]:
  """The rows. Raises UserError, with the line on which the row begins, for one that cannot be parsed."""
  first_line = 2
  try:
    for row in reader:
      yield row
      first_line = reader.line_num + 1
  except csv.Error as error:
    raise UserError(f'{path}:{first_line}: not a row of a table ({error})') from error


def _split_names(names: Sequence[str], validation: float, test: float) -> dict[str, str]:
  """Assigns sorted names to splits: the last ones to test, those before them to validation."""
  num_validation = round(len(names) * validation)
  num_test = round(len(names) * test)
  first_test = len(names) - num_test
  first_validation = len(names) - (num_validation + num_test)
  return {name: SPLITS[(i >= first_validation) + (i >= first_test)] for i, name in enumerate(names)}


def _check_one_split_per_image(rows: Sequence[_CaptionRow], path: str) -> None:
  """Raises UserError for an image that has captions in several splits."""
  split_of_image: dict[str, str] = {}
  for row in sorted(rows, key=lambda row: SPLITS.index(row.split)):
    split = split_of_image.setdefault(row.image, row.split)
    if split != row.split:
      raise UserError(f'{path}:{row.line}: {row.image} is in split {split} too; expected one split for each image')


def _select_features(features_by_name: Mapping[str, np.ndarray], name: str, where: str) -> np.ndarray:
  """The features of an image as float32 [height, width, C].

  Raises UserError if they are missing, not finite, or neither [height, width, C] nor [cells, C] of a square grid.
  """
  if name not in features_by_name:
    raise UserError(f'{where}the features have no array {name!r}; expected one for each image of the table')
  features = features_by_name[name]
  if features.ndim == 2 and features.size:
    side = math.isqrt(len(features))
    if side**2 == len(features):
      features = features.reshape(side, side, -1)
  if features.ndim != 3 or not features.size:
    expected = '[height, width, features], or [cells, features] of a square, and not empty'
    raise UserError(f'{where}features of {name!r} must be {expected}, got {list(features.shape)}')
  with np.errstate(over='ignore'):  # float64 may exceed the range of float32
    numbers = features.astype(np.float32) if features.dtype.kind in 'fiu' else None
  is_finite = numbers is not None and np.isfinite(numbers)
  if not np.all(is_finite):
    invalid = features.dtype if numbers is None else features[~is_finite][0]
    raise UserError(f'{where}features of {name!r} must be finite numbers of float32, got {invalid}')
  return numbers


class EncodedCaptions(NamedTuple):
  """A split as ids.

  Attributes:
    pictures: [P, height, width, C], see Pictures.
    picture_index: [captions], the number of the picture of each caption.
    target: int32, all captions, each with EOS, concatenated.
    offsets: int64 [captions + 1].
  """

  pictures: np.ndarray
  picture_index: np.ndarray
  target: np.ndarray
  offsets: np.ndarray

  @property
  def lengths(self) -> np.ndarray:
    """Lengths of the captions, EOS included."""
    return np.diff(self.offsets)

  @property
  def identity(self) -> 'EncodedCaptions':
    """All arrays, from which digests of the split are computed."""
    return self

  def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids that contain those of the rows, their offsets, and the positions of the rows in these."""
    return self.target, self.offsets, rows


class PreparedCaptions:
  """A split on disk, used as EncodedCaptions are. In memory is only the index.

  Args:
    split: the split, of which pictures and captions are on disk.
  """

  def __init__(self, split: Pictures):
    self._table = split.prepared
    self.pictures = split.pictures
    self.picture_index = split.picture_index
    self.lengths = split.prepared.column('length')
    self.identity = split.pictures.identity, split.prepared.identity

  def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ids of the rows, their offsets, and the positions of the rows in these; -1 for filler rows."""
    ((ids, offsets),), positions = self._table.read_flat(rows, 'target')
    return ids, offsets, positions


CaptionSplit = EncodedCaptions | PreparedCaptions


def encode_captions(split: Pictures, vocabulary: Vocabulary) -> CaptionSplit:
  """Returns the ids of the captions of a split: those on disk if it was prepared."""
  if split.prepared is not None:
    return PreparedCaptions(split)
  rows = [_encode_caption(caption, vocabulary) for caption in split.captions]
  offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
  return EncodedCaptions(split.pictures, np.array(split.picture_index), np.concatenate(rows), offsets)


def _encode_caption(caption: str, vocabulary: Vocabulary) -> np.ndarray:
  return np.array([*vocabulary.encode(caption), EOS], np.int32)


def check_caption_buckets(buckets: Any) -> tuple[int, ...]:
  """Returns distinct lengths of captions, EOS included, the shortest first.

  Raises:
    UserError: for anything but positive whole numbers.
  """
  lengths = (buckets,) if isinstance(buckets, int) else buckets
  if not isinstance(lengths, tuple | list):
    lengths = ()
  if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
    raise UserError(f'buckets must be lengths of captions, each at least 1, such as (16, 32), got {buckets!r}')
  return tuple(sorted(set(lengths)))


def assign_captions(encoded: CaptionSplit, buckets: Sequence[int]) -> np.ndarray:
  """Returns for each caption the position of the first bucket that holds it, -1 if none does.

  Args:
    encoded: the split.
    buckets: lengths of captions, EOS included, the shortest first.
  """
  bucket_index = np.searchsorted(np.array(buckets), encoded.lengths)
  return np.where(bucket_index < len(buckets), bucket_index, -1)


class CaptionBatches(OrderedBatches):
  """Endless training batches of one split: `batches[step]` for any step >= 0, see batching.BatchOrder."""

  shape_names = 'rows, caption'
  min_row_positions = sum  # (caption,) -> the tokens of a caption, without pixels; see systems.base.BatchSequence

  def __init__(
    self,
    encoded: CaptionSplit,
    buckets: Sequence[int],
    size: int,
    seed: int = 0,
    share: Share = WHOLE_BATCH,
  ):
    """Assigns captions to batches; for buckets see `assign_captions`, for size, seed and share batching.BatchOrder."""
    bucket_index = assign_captions(encoded, buckets)
    self._order = BatchOrder(bucket_index, [(length,) for length in buckets], size, seed=seed, share=share)
    self._encoded = encoded

  def __getitem__(self, step: int) -> Batch:
    _, rows, (length,) = self._order[step]
    return gather_captions(self._encoded, rows, length)


def eval_caption_batches(encoded: CaptionSplit, buckets: Sequence[int], size: int) -> Iterator[Batch]:
  """Yields batches of `size` rows for evaluation; every caption that fits a bucket occurs once.

  Args:
    encoded: the split.
    buckets: lengths of captions that batches are padded to, EOS included, the shortest first; a caption that is longer
      than the last one is in no batch.
    size: rows of a batch, with filler rows in the last batch of a bucket.
  """
  bucket_index = assign_captions(encoded, buckets)
  for rows, (length,) in eval_batch_rows(bucket_index, [(length,) for length in buckets], encoded.lengths, size):
    yield gather_captions(encoded, rows, length)


def gather_captions(encoded: CaptionSplit, rows: np.ndarray, length: int) -> Batch:
  """Returns captions as one batch: `source` has their pictures, and `source_mask` [B, 1] is True for real rows.

  Args:
    encoded: the split.
    rows: indices of captions; -1 = a filler row.
    length: at least the length of every caption.
  """
  is_real = rows >= 0
  target, mask = gather_padded(*encoded.read(rows), length)
  source = np.zeros((len(rows), *encoded.pictures.shape[1:]), encoded.pictures.dtype)
  source[is_real] = encoded.pictures[encoded.picture_index[rows[is_real]]]
  return Batch(source, is_real[:, None], target, mask, rows.astype(np.int32), None)


def describe_captions(name: str, split: Pictures, encoded: CaptionSplit, buckets: Sequence[int]) -> str:
  """Returns a line with counts of pictures, captions, captions that fit no bucket, and images without a caption.

  Args:
    name: name of the split.
    split: the split, with captions as text.
    encoded: the split, with captions as ids.
    buckets: lengths of captions, EOS included, the shortest first.
  """
  shape = ' x '.join(map(str, split.pictures.shape[1:]))
  pictures = format_count(len(split.names), 'picture')
  line = f'{name}: {pictures} ({shape}), {format_count(len(split.captions), "caption")}'
  num_too_long = int(np.sum(assign_captions(encoded, buckets) < 0))
  if num_too_long:
    line += f'; {format_count(num_too_long, "caption")} longer than {buckets[-1]} tokens left out'
  if split.num_uncaptioned:
    line += f'; {format_count(split.num_uncaptioned, "image")} without a caption'
  return line
