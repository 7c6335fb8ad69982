"""Batches as a pure function of (seed, step), whose static shapes come from a short list of buckets."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.data.encoding import EncodedCorpus, EncodedSplit, assign_buckets, check_buckets
from attention_jax.errors import UserError, choose
from attention_jax.tokens import PAD

FILLER = -1  # index of a row that pads a batch
MIN_EVALUATION_BATCHES = 4  # compiling a search takes as long as about this many batches of it


class Batch(NamedTuple):
  """B rows of one bucket (S, T).

  Attributes:
    source: int32 [B, S], each row ending with EOS, then PAD; for captions, pictures or features [B, height, width, C].
    source_mask: bool [B, S], True = real; for captions [B, 1].
    target: int32 [B, T], each row ending with EOS, then PAD; without BOS.
    target_mask: bool [B, T].
    index: int32 [B], the row in its split, of a packed row that of its first pair; -1 = a filler row, whose masks are
      all False.
    links: bool [B, T, S], True = a gold link between the target token and the source token; all False in rows without
      links and in filler rows. None unless links were requested.
    segments: of packed rows, which hold one pair after the other, the number of the pair of each token, source int32
      [B, S] and target int32 [B, T]: from 1, 0 = padding. None if every row is one pair.
  """

  source: np.ndarray
  source_mask: np.ndarray
  target: np.ndarray
  target_mask: np.ndarray
  index: np.ndarray
  links: np.ndarray | None = None
  segments: tuple[np.ndarray, np.ndarray] | None = None


def dummy_batch(source: int = 2, target: int = 2, packed: bool = False) -> Batch:
  """One pair for tracing.

  Args:
    source, target: the lengths.
    packed: whether the batch has segments.
  """
  return Batch(
    source=np.zeros((1, source), np.int32),
    source_mask=np.ones((1, source), bool),
    target=np.zeros((1, target), np.int32),
    target_mask=np.ones((1, target), bool),
    index=np.zeros(1, np.int32),
    links=np.ones((1, target, source), bool),
    segments=(np.ones((1, source), np.int32), np.ones((1, target), np.int32)) if packed else None,
  )


def _rows_by_sentences(size: int, bucket: tuple[int, int]) -> int:
  return size


def _rows_by_tokens(size: int, bucket: tuple[int, int]) -> int:
  return max(8, size // max(bucket) // 8 * 8)


BATCH_UNITS = {'sentences': _rows_by_sentences, 'tokens': _rows_by_tokens}  # (batch size, bucket) -> rows of a batch


class Share(NamedTuple):
  """The part of each batch that one process reads. The real rows of a batch do not depend on the number of processes.

  Attributes:
    index: index of this share.
    count: number of shares.
    multiple: filler rows are added at the end of a batch, so that it has a multiple of this number of rows.
  """

  index: int = 0
  count: int = 1
  multiple: int = 1

  def pad(self, rows: int) -> int:
    """Returns the number of rows of a batch with its filler rows.

    Raises:
      UserError: if these rows cannot be divided among the shares, or if `index` is not that of a share.
    """
    padded = -(-rows // self.multiple) * self.multiple
    if not 0 <= self.index < self.count:
      raise UserError(f'the index of a share must be at least 0 and less than {self.count}, got {self.index}')
    if padded % self.count:
      raise UserError(f'the {padded} rows of a batch cannot be divided among {self.count} processes')
    return padded

  def select(self, rows: np.ndarray) -> np.ndarray:
    """Returns the rows of this share, from the rows of a whole batch."""
    rows = _pad_rows(rows, self.pad(len(rows)))
    size = len(rows) // self.count
    return rows[self.index * size : (self.index + 1) * size]


WHOLE_BATCH = Share()


class _BucketRows(NamedTuple):
  """The rows of a split that one bucket holds, and how they are divided into batches."""

  bucket: tuple[int, ...]
  rows: np.ndarray
  batch_rows: int  # over all shares, without the filler rows of `Share.pad`

  @property
  def num_batches(self) -> int:
    return -(-len(self.rows) // self.batch_rows)


class BatchOrder:
  """Endless order of the batches of one split: `order[step]` selects the rows of any step >= 0.

  Step `s` lies in epoch `s // len(order)`. Each row that fits a bucket occurs once in each epoch. The order of the rows
  depends on (seed, epoch) alone, and the order of the buckets on the epoch alone. The last batch of each bucket is
  padded with filler rows. Only a cache is kept between steps: the step number is enough to resume a run, and threads
  may share one object.
  """

  def __init__(
    self,
    bucket_index: np.ndarray,
    buckets: Sequence[tuple[int, ...]],
    size: int,
    unit: str = 'sentences',
    seed: int = 0,
    share: Share = WHOLE_BATCH,
  ):
    """Assigns the rows of a split to batches.

    Args:
      bucket_index: position in `buckets` of the bucket of each row, [rows]; -1 for a row that fits none.
      buckets: the lengths of each bucket.
      size: rows of a batch; for the unit 'tokens', the maximum of rows times the longest side of the bucket. The number
        of rows is then a multiple of 8, and at least 8 even if that exceeds the maximum.
      unit: a key of BATCH_UNITS, the unit of `size`.
      seed: seed of the order.
      share: the rows of every batch that this process reads.

    Raises:
      UserError: for an invalid size, unit or seed, if no row fits a bucket, or if the shares cannot divide a batch.
    """
    for name, value, minimum in (('batch_size', size, 1), ('seed', seed, 0)):
      if value < minimum:
        raise UserError(f'{name} must be at least {minimum}, got {value}')
    rows_of_batch = BATCH_UNITS[choose(unit, BATCH_UNITS, 'batch unit')]
    self._parts = []
    for i, bucket in enumerate(buckets):
      rows = np.flatnonzero(bucket_index == i)
      if len(rows):
        self._parts.append(_BucketRows(bucket, rows, rows_of_batch(size, bucket)))
    if not self._parts:
      raise UserError(f'none of the {len(bucket_index)} rows fits a bucket of {buckets}; expected a larger bucket')
    for part in self._parts:
      share.pad(part.batch_rows)
    self._share = share
    self._shuffle = _make_shuffle(self._parts, seed)

  def __len__(self) -> int:
    """Batches in an epoch."""
    return sum(part.num_batches for part in self._parts)

  @property
  def shapes(self) -> list[tuple[int, ...]]:
    """The (rows, *bucket) that occur: at most one for each bucket, each of which is compiled once."""
    return [self._shape(part) for part in self._parts]

  def shape(self, step: int) -> tuple[int, ...]:
    """Returns the (rows of this share, *bucket) of a step."""
    epoch, batch = divmod(step, len(self))
    _, schedule = self._shuffle(epoch)
    return self._shape(self._parts[schedule[batch][0]])

  def _shape(self, part: _BucketRows) -> tuple[int, ...]:
    return self._share.pad(part.batch_rows) // self._share.count, *part.bucket

  def __getitem__(self, step: int) -> tuple[int, np.ndarray, tuple[int, ...]]:
    """Returns the epoch of a step, the rows of its batch in this share (-1 = a filler row), and their bucket."""
    if step < 0:
      raise IndexError(f'step must be at least 0, got {step}')
    epoch, batch = divmod(step, len(self))
    shuffled, schedule = self._shuffle(epoch)
    part_index, chunk = schedule[batch]
    part = self._parts[part_index]
    start = chunk * part.batch_rows
    rows = _pad_rows(shuffled[part_index][start : start + part.batch_rows], part.batch_rows)
    return epoch, self._share.select(rows), part.bucket


def _make_shuffle(parts: Sequence[_BucketRows], seed: int) -> Callable[[int], tuple[list[np.ndarray], np.ndarray]]:
  """Returns a function epoch -> (rows of each part, (part, chunk of its rows) of each batch), both shuffled."""

  @functools.lru_cache(maxsize=2)  # prefetching threads may straddle two epochs
  def shuffle(epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng((seed, epoch))
    shuffled = [rng.permutation(part.rows) for part in parts]
    schedule = [(i, chunk) for i, part in enumerate(parts) for chunk in range(part.num_batches)]
    # Independent of the seed: at any step the batches of all seeds have one shape, and can be trained side by side.
    return shuffled, np.random.default_rng(epoch).permutation(np.array(schedule))

  return shuffle


class OrderedBatches:
  """Endless training batches in the order of `_order`, which a subclass sets, as it does `__getitem__`."""

  _order: BatchOrder

  def __len__(self) -> int:
    """Batches in an epoch."""
    return len(self._order)

  @property
  def shapes(self) -> list[tuple[int, ...]]:
    """The shapes (rows, *lengths) that occur: at most one for each bucket, each of which is compiled once."""
    return self._order.shapes

  def shape(self, step: int) -> tuple[int, ...]:
    """Returns the shape of the batch of a step."""
    return self._order.shape(step)


class Batches(OrderedBatches):
  """Endless training batches of one split of pairs: `batches[step]` for any step >= 0, see BatchOrder."""

  shape_names = 'rows, source, target'
  min_row_positions = sum  # (source, target) -> the tokens of a row; see systems.base.BatchSequence

  def __init__(
    self,
    encoded: EncodedSplit,
    buckets: Iterable[Sequence[int]],
    size: int,
    unit: str = 'sentences',
    seed: int = 0,
    share: Share = WHOLE_BATCH,
    links: bool = False,
    packed: bool = False,
  ):
    """Assigns the rows of a split to batches.

    Args:
      encoded: the split.
      buckets: (source, target) length pairs, EOS included.
      size, unit, seed, share: see BatchOrder.
      links: whether batches have the links of their rows; not with `packed`.
      packed: whether rows of batches hold several pairs, see Packing; their lengths are `packed_bucket`.

    Raises:
      UserError: as `check_buckets` and BatchOrder do, and for links of a split that has none.
    """
    buckets = check_buckets(buckets)
    bucket_index = assign_buckets(encoded, buckets)
    self._packing = None
    if packed and np.any(bucket_index >= 0):
      bucket = packed_bucket(buckets)
      self._packing = Packing(np.flatnonzero(bucket_index >= 0), np.stack(encoded.lengths, -1), bucket, seed)
      bucket_index, buckets = np.zeros(self._packing.rows, np.int32), (bucket,)
    self._order = BatchOrder(bucket_index, buckets, size, unit, seed, share)
    self._encoded = encoded
    self._links = links
    if links and encoded.links is None:
      raise UserError(f'links are required, but the {encoded.rows} pairs have no links between their tokens')

  def __getitem__(self, step: int) -> Batch:
    """Returns the batch of a step, a pure function of (seed, step)."""
    epoch, rows, bucket = self._order[step]
    if self._packing:
      return gather_packed(self._encoded, self._packing.pairs(epoch, rows), bucket)
    return gather(self._encoded, rows, bucket, links=self._links)


class Packing:
  """Rows that hold several pairs: each takes the longest pair left that fits, again and again, until none fits.

  Which lengths share a row depends on the split alone: every epoch and seed has as many rows. Which pairs of these
  lengths share it is drawn for each (seed, epoch). A pair is as long as the longer of its shares of the bucket.

  Attributes:
    rows: number of rows.
  """

  def __init__(self, pairs: np.ndarray, lengths: np.ndarray, bucket: tuple[int, int], seed: int):
    """Fills the rows.

    Args:
      pairs: indices of the pairs to pack.
      lengths: source and target length of every pair of the split, [N, 2].
      bucket: source and target length of a row.
      seed: seed of the order of the pairs of equal lengths.
    """
    kinds, kind, counts = np.unique(lengths[pairs], axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(-(kinds / bucket).max(-1), kind='stable')
    self._pairs = pairs
    self._rank = np.argsort(order)[kind.ravel()]  # of the lengths of each pair
    self._places = _fill_rows(kinds[order], counts[order], bucket)
    self._seed = seed
    self._in_order = functools.lru_cache(maxsize=2)(self._shuffle)  # prefetching threads may straddle two epochs

  @property
  def rows(self) -> int:
    return len(self._places)

  def pairs(self, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the pairs of rows (-1 = a filler row) in an epoch, [B, K], padded with -1."""
    return np.where(rows[:, None] < 0, FILLER, self._in_order(epoch)[self._places[rows]])

  def _shuffle(self, epoch: int) -> np.ndarray:
    """Pairs from the longest to the shortest, those of equal lengths shuffled; then -1, which fills `_places`."""
    order = np.random.default_rng((self._seed, epoch, 1)).permutation(len(self._pairs))
    return np.append(self._pairs[order[np.argsort(self._rank[order], kind='stable')]], FILLER)


def _fill_rows(lengths: np.ndarray, counts: np.ndarray, bucket: tuple[int, int]) -> np.ndarray:
  """Returns the pairs of each row, [rows, K], padded with -1; pairs are numbered in the order of their lengths.

  Args:
    lengths: distinct lengths of pairs in the order in which rows take them, [n, 2].
    counts: number of pairs of each length, [n].
    bucket: the length of a row.
  """
  counts = counts.copy()
  next_pair = np.cumsum(counts) - counts
  blocks = []
  while counts.any():
    free = np.array(bucket)
    left = counts.copy()
    taken: dict[int, int] = {}  # number of pairs of each length in a row
    while (fits := (left > 0) & (lengths <= free).all(-1)).any():
      kind = int(fits.argmax())
      taken[kind] = min(left[kind], *(free // lengths[kind]))
      left[kind] -= taken[kind]
      free -= taken[kind] * lengths[kind]
    rows = min(counts[kind] // number for kind, number in taken.items())  # equal rows, as long as there are such pairs
    columns = []
    for kind, number in taken.items():
      columns.append(next_pair[kind] + np.arange(rows * number).reshape(rows, number))
      next_pair[kind] += rows * number
      counts[kind] -= rows * number
    blocks.append(np.concatenate(columns, 1))
  width = max(block.shape[1] for block in blocks)
  return np.concatenate([np.pad(block, ((0, 0), (0, width - block.shape[1])), constant_values=-1) for block in blocks])


def packed_bucket(buckets: Iterable[Sequence[int]]) -> tuple[int, int]:
  """Returns the lengths of packed rows: the longest source and the longest target of all buckets."""
  source, target = map(max, zip(*buckets, strict=True))
  return source, target


def check_rows_fit(split: str, bucket_index: np.ndarray, max_left_out: float) -> None:
  """Checks that enough rows of a split fit a bucket.

  Args:
    split: name of the split.
    bucket_index: see `encoding.assign_buckets`.
    max_left_out: the share of the rows that may fit none.

  Raises:
    UserError: if more rows fit none, and if no row fits: no metric of the split could be computed.
  """
  if not np.any(bucket_index >= 0):
    raise UserError(f'{split}: none of its {len(bucket_index)} rows fits a bucket; enlarge config.data.buckets')
  if np.mean(bucket_index < 0) > max_left_out:
    raise UserError(
      f'{split}: {np.sum(bucket_index < 0)} of its {len(bucket_index)} rows fit no bucket, a greater share than '
      f'config.data.max_left_out={max_left_out}; enlarge config.data.buckets, or set max_left_out to leave them out'
    )


def eval_batches(
  encoded: EncodedSplit, buckets: Iterable[Sequence[int]], size: int, *, links: bool = False
) -> 'EvaluationBatches':
  """Returns batches for evaluation, ordered by bucket, then by source length; each row that fits one occurs once.

  A row that fits no bucket is in no batch; `encoding.describe_corpus` reports such rows.

  Args:
    encoded: the split.
    buckets: (source, target) length pairs, EOS included.
    size: rows of a batch.
    links: whether batches have the links of their rows.
  """
  buckets = check_buckets(buckets)
  rows = eval_batch_rows(assign_buckets(encoded, buckets), buckets, encoded.lengths[0], size)
  return EvaluationBatches(encoded, list(rows), links)


class EvaluationBatches:
  """Batches of the rows that `eval_batch_rows` selected, read from the split on each iteration.

  Args:
    encoded: the split.
    rows: rows and bucket of each batch, see `eval_batch_rows`.
    links: whether batches have the links of their rows.
  """

  def __init__(self, encoded: EncodedSplit, rows: Sequence[tuple[np.ndarray, tuple[int, ...]]], links: bool):
    self._encoded = encoded
    self._rows = rows
    self._links = links

  def __len__(self) -> int:
    return len(self._rows)

  def __iter__(self) -> Iterator[Batch]:
    for rows, bucket in self._rows:
      yield gather(self._encoded, rows, bucket, links=self._links)


def eval_batch_rows(
  bucket_index: np.ndarray, buckets: Sequence[tuple[int, ...]], lengths: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
  """Yields the rows (-1 = a filler row) and the bucket of batches for evaluation: by bucket, then by length.

  A bucket with fewer rows than MIN_EVALUATION_BATCHES batches is joined to a larger one, if any, so that fewer shapes
  are compiled.

  Args:
    bucket_index: position in `buckets` of the bucket of each row, [rows]; -1 for a row that fits none, which is in no
      batch.
    buckets: the lengths of each bucket.
    lengths: the lengths by which the rows of a bucket are ordered, [rows].
    size: rows of a batch, with filler rows in the last batch of a bucket.
  """
  bucket_index = _join_small_buckets(bucket_index, buckets, MIN_EVALUATION_BATCHES * size)
  for i, bucket in enumerate(buckets):
    rows = np.flatnonzero(bucket_index == i)
    rows = rows[np.argsort(lengths[rows], kind='stable')]
    for start in range(0, len(rows), size):
      yield _pad_rows(rows[start : start + size], size), bucket


def _join_small_buckets(bucket_index: np.ndarray, buckets: Sequence[tuple[int, ...]], min_rows: int) -> np.ndarray:
  """Moves the rows of each small bucket to the next non-empty bucket whose lengths are all at least as large.

  Args:
    bucket_index: position in `buckets` of the bucket of each row, [rows]; -1 for a row that fits none.
    buckets: the lengths of each bucket.
    min_rows: a bucket with fewer rows is small; its rows stay if there is no such larger bucket.

  Returns:
    The new `bucket_index`, [rows].
  """
  joined = bucket_index.copy()
  for i, bucket in enumerate(buckets):
    rows = np.flatnonzero(joined == i)
    if len(rows) >= min_rows:
      continue
    larger = (j for j in range(i + 1, len(buckets)) if np.all(np.greater_equal(buckets[j], bucket)))
    joined[rows] = next((j for j in larger if np.any(joined == j)), i)
  return joined


def gather(encoded: EncodedSplit, rows: np.ndarray, bucket: tuple[int, int], *, links: bool = False) -> Batch:
  """Returns rows of a split as one batch.

  Args:
    encoded: the split.
    rows: indices of rows; -1 = a filler row.
    bucket: (source, target) lengths, at least those of every row.
    links: whether the batch has the links of its rows.
  """
  corpus, positions = encoded.read(rows)
  source = gather_padded(corpus.source, corpus.source_offsets, positions, bucket[0])
  target = gather_padded(corpus.target, corpus.target_offsets, positions, bucket[1])
  return Batch(*source, *target, rows.astype(np.int32), _dense_links(corpus, positions, bucket) if links else None)


def gather_packed(encoded: EncodedSplit, pairs: np.ndarray, bucket: tuple[int, int]) -> Batch:
  """Returns rows of several pairs as one batch.

  Args:
    encoded: the split.
    pairs: indices of the pairs of each row, [B, K], padded with -1.
    bucket: (source, target) lengths, at least the sums of those of the pairs of every row.
  """
  corpus, positions = encoded.read(pairs.ravel())
  positions = positions.reshape(pairs.shape)
  source, source_segments = _concatenate(corpus.source, corpus.source_offsets, positions, bucket[0])
  target, target_segments = _concatenate(corpus.target, corpus.target_offsets, positions, bucket[1])
  return Batch(
    source,
    source_segments > 0,
    target,
    target_segments > 0,
    pairs[:, 0].astype(np.int32),
    segments=(source_segments, target_segments),
  )


def _concatenate(
  flat: np.ndarray, offsets: np.ndarray, pairs: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids of all pairs [B, K] of a row, one after the other, and the number of the pair, both [B, length]."""
  ids, is_real = gather_padded(flat, offsets, pairs, length)
  numbers = np.broadcast_to(np.arange(1, pairs.shape[1] + 1)[:, None], ids.shape)
  is_filled = np.arange(length) < is_real.sum((1, 2))[:, None]
  rows = []
  for values, filler in ((ids, PAD), (numbers, 0)):
    row = np.full(is_filled.shape, filler, np.int32)
    row[is_filled] = values[is_real]
    rows.append(row)
  return rows[0], rows[1]


def _dense_links(encoded: EncodedCorpus, rows: np.ndarray, bucket: tuple[int, int]) -> np.ndarray:
  """The links of rows as a matrix, bool [B, T, S]."""
  dense = np.zeros((len(rows), bucket[1], bucket[0]), bool)
  for i in np.flatnonzero(rows >= 0):
    source, target = encoded.row_links(rows[i]).T
    dense[i, target, source] = True
  return dense


def gather_padded(
  flat: np.ndarray, offsets: np.ndarray, rows: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids of rows, padded to `length`, int32 [..., length], and their mask.

  Args:
    flat: the ids of all rows, concatenated.
    offsets: where each row begins in `flat`, [rows + 1].
    rows: indices of rows [...]; -1 = a filler row.
    length: at least the length of every row.
  """
  starts = offsets[rows]
  lengths = np.where(rows < 0, 0, offsets[rows + 1] - starts)
  columns = np.arange(length)
  mask = columns < lengths[..., None]
  ids = flat[np.where(mask, starts[..., None] + columns, 0)] if flat.size else 0  # no ids if all rows are filler rows
  return np.where(mask, ids, PAD).astype(np.int32), mask


def _pad_rows(rows: np.ndarray, size: int) -> np.ndarray:
  """Rows, padded to `size` with filler rows."""
  return np.pad(rows, (0, size - len(rows)), constant_values=FILLER)
