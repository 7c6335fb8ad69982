"""Batches as a pure function of (seed, step), with static shapes from a short stated list of buckets."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.data.encoding import EncodedCorpus, assign_buckets, check_buckets
from attention_jax.data.resegment import Resegment
from attention_jax.errors import UserError, choose
from attention_jax.tokens import PAD


class Batch(NamedTuple):
  """B rows of one bucket (S, T).

  Attributes:
    source: int32 [B, S], each row ending with EOS, then PAD.
    source_mask: bool [B, S], True = real.
    target: int32 [B, T], each row ending with EOS, without BOS.
    target_mask: bool [B, T].
    index: int32 [B], the row in its split; -1 = a filler row, whose masks are all False.
    links: bool [B, T, S], True = gold says that the target token belongs to the source token; all False in rows without
      links and in filler rows. None where they were not asked for.
  """

  source: np.ndarray
  source_mask: np.ndarray
  target: np.ndarray
  target_mask: np.ndarray
  index: np.ndarray
  links: np.ndarray | None = None


def _sentences(size: int, bucket: tuple[int, int]) -> int:
  return size


def _tokens(size: int, bucket: tuple[int, int]) -> int:
  return max(8, size // max(bucket) // 8 * 8)


BATCH_UNITS = {'sentences': _sentences, 'tokens': _tokens}  # (batch size, bucket) -> rows of a batch


class Order:
  """Which rows of a split make the batch of a step, without end: `order[step]` for any step >= 0.

  Step `s` lies in epoch `s // len(order)`. Each epoch has every row that fits a bucket exactly once, in an order given
  by (seed, epoch) alone, and the bucket of a step by the epoch alone; the last batch of each bucket is filled up with
  filler rows. Nothing is kept between steps but a cache, so that a run is resumed by knowing its step, and threads may
  share one object.
  """

  def __init__(
    self,
    chosen: np.ndarray,
    buckets: Sequence[tuple[int, ...]],
    size: int,
    unit: str = 'sentences',
    seed: int = 0,
    shard: int = 0,
    shards: int = 1,
  ):
    """Args:
      chosen: the number of the bucket of each row of a split; -1 for one that fits none.
      buckets: what each is like: lengths.
      size: rows of a batch, or its tokens (rows times the longest side of the bucket).
      unit: a name in BATCH_UNITS.
      seed: of the order.
      shard, shards: this process gets the rows `shard::shards` of every batch.

    Raises: UserError when no row fits a bucket, or the rows of a batch cannot be divided among the shards.
    """
    for what, value, least in (('batch_size', size, 1), ('seed', seed, 0)):
      if value < least:
        raise UserError(f'{what} is {value}; possible: {least} or more')
    if not 0 <= shard < shards:
      raise UserError(f'shard {shard} of {shards}; possible: from 0 to below {shards}')
    rows_of = BATCH_UNITS[choose(unit, BATCH_UNITS, 'batch unit')]
    held = [(bucket, np.flatnonzero(chosen == i)) for i, bucket in enumerate(buckets)]
    self._held = [(bucket, rows) for bucket, rows in held if len(rows)]
    self._sizes = [rows_of(size, bucket) for bucket, _ in self._held]
    self._seed, self._shard, self._shards = seed, shard, shards
    if not self._held:
      raise UserError(f'none of the {len(chosen)} rows fits a bucket of {buckets}')
    for (bucket, _), size in zip(self._held, self._sizes, strict=True):
      if size % shards:
        raise UserError(f'the {size} rows of a batch of bucket {bucket} cannot be divided among {shards} processes')
    self._chunks = [-(-len(rows) // size) for (_, rows), size in zip(self._held, self._sizes, strict=True)]
    self._epoch = functools.lru_cache(maxsize=2)(self._order)  # prefetching threads may straddle two epochs

  def __len__(self) -> int:
    """Batches in an epoch."""
    return sum(self._chunks)

  @property
  def shapes(self) -> list[tuple[int, ...]]:
    """The (rows, *bucket) that occur: at most as many as buckets, each one compilation."""
    return [(size // self._shards, *bucket) for (bucket, _), size in zip(self._held, self._sizes, strict=True)]

  def __getitem__(self, step: int) -> tuple[int, np.ndarray, tuple[int, ...]]:
    """The epoch of a step, the rows of its batch (-1 = a filler row), and their bucket: a function of (seed, step)."""
    if step < 0:
      raise IndexError(f'step {step} is negative')
    epoch, place = divmod(step, len(self))
    shuffled, plan = self._epoch(epoch)
    which, chunk = plan[place]
    size = self._sizes[which]
    rows = _filled(shuffled[which][chunk * size : (chunk + 1) * size], size)[self._shard :: self._shards]
    return epoch, rows, self._held[which][0]

  def _order(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows of each bucket, shuffled, and the (bucket, chunk) of each batch of an epoch, shuffled."""
    rng = np.random.default_rng((self._seed, epoch))
    shuffled = [rng.permutation(rows) for _, rows in self._held]
    plan = [(which, chunk) for which, chunks in enumerate(self._chunks) for chunk in range(chunks)]
    # Not by the seed: at a given step all seeds have batches of one shape, and can be trained side by side.
    return shuffled, np.random.default_rng(epoch).permutation(np.array(plan))


class Batches:
  """The training batches of one split of pairs, without end: `batches[step]` for any step >= 0, see Order."""

  shape_names = 'rows, source, target'

  def __init__(
    self,
    encoded: EncodedCorpus,
    buckets: Iterable[Sequence[int]],
    size: int,
    unit: str = 'sentences',
    seed: int = 0,
    shard: int = 0,
    shards: int = 1,
    links: bool = False,
    resegment: Resegment | None = None,
  ):
    """Args:
      encoded: the split.
      buckets: (source, target) length pairs, EOS included.
      size, unit, seed, shard, shards: see Order.
      links: whether batches have the links of their rows.
      resegment: see resegment.make_resegmenter; None leaves rows as they are.

    Raises: UserError as Order does, and when links are asked of a split that has none, or whose rows are cut anew.
    """
    buckets = check_buckets(buckets)
    self._order = Order(assign_buckets(encoded, buckets), buckets, size, unit, seed, shard, shards)
    self._encoded, self._links, self._resegment = encoded, links, resegment
    if links and encoded.links is None:
      raise UserError(f'links are asked for, but the {encoded.rows} pairs come without links between their tokens')
    if links and resegment:
      raise UserError('links are asked for, but they are between tokens, and lines are cut into other ones: dropout=0')

  def __len__(self) -> int:
    """Batches in an epoch."""
    return len(self._order)

  @property
  def shapes(self) -> list[tuple[int, int, int]]:
    """The (B, S, T) that occur: at most as many as buckets, each one compilation."""
    return self._order.shapes

  def __getitem__(self, step: int) -> Batch:
    """The batch of a step: a pure function of (seed, step)."""
    epoch, rows, bucket = self._order[step]
    if self._resegment:
      return gather(self._resegment(epoch, rows, bucket), np.arange(len(rows)), bucket)._replace(index=_index(rows))
    return gather(self._encoded, rows, bucket, links=self._links)


class StackedBatches:
  """The batches of several runs side by side: those of a step, which have one shape, under a new first axis."""

  def __init__(self, runs: Sequence[Any]):
    """runs: of each, what gives a NamedTuple of arrays, or None, for a step."""
    self._runs = runs

  def __getitem__(self, step: int) -> Any:
    stack = lambda *arrays: None if arrays[0] is None else np.stack(arrays)
    batches = [run[step] for run in self._runs]
    return type(batches[0])(*map(stack, *batches))


def check_any_row_fits(split: str, chosen: np.ndarray) -> None:
  """Raises: UserError for a split of which `assign_buckets` found no bucket for any row: nothing of it could be measured."""
  if not np.any(chosen >= 0):
    raise UserError(f'{split}: none of its {len(chosen)} rows fits a bucket; possible: larger config.data.buckets')


def eval_batches(
  encoded: EncodedCorpus, buckets: Iterable[Sequence[int]], size: int, *, links: bool = False
) -> Iterator[Batch]:
  """Batches of `size` rows for evaluation: every row that fits a bucket once, by bucket, then by source length.

  A row that fits no bucket is in no batch: the caller knows it by its index that never comes (encoding.describe_corpus
  reports it). `links`: whether batches have the links of their rows.
  """
  buckets = check_buckets(buckets)
  for rows, bucket in eval_batch_rows(assign_buckets(encoded, buckets), buckets, encoded.lengths[0], size):
    yield gather(encoded, rows, bucket, links=links)


def eval_batch_rows(
  chosen: np.ndarray, buckets: Sequence[tuple[int, ...]], lengths: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
  """The rows (-1 = a filler row) and the bucket of batches for evaluation: by bucket, then by length."""
  for i, bucket in enumerate(buckets):
    rows = np.flatnonzero(chosen == i)
    rows = rows[np.argsort(lengths[rows], kind='stable')]
    for start in range(0, len(rows), size):
      yield _filled(rows[start : start + size], size), bucket


def gather(encoded: EncodedCorpus, rows: np.ndarray, bucket: tuple[int, int], *, links: bool = False) -> Batch:
  """The given rows (-1 = a filler row) as one batch of the shape of `bucket`, which must hold them."""
  source = _padded(encoded.source, encoded.source_offsets, rows, bucket[0])
  target = _padded(encoded.target, encoded.target_offsets, rows, bucket[1])
  return Batch(*source, *target, _index(rows), _dense_links(encoded, rows, bucket) if links else None)


def _index(rows: np.ndarray) -> np.ndarray:
  return rows.astype(np.int32)


def _dense_links(encoded: EncodedCorpus, rows: np.ndarray, bucket: tuple[int, int]) -> np.ndarray:
  dense = np.zeros((len(rows), bucket[1], bucket[0]), bool)
  for i in np.flatnonzero(rows >= 0):
    source, target = encoded.row_links(rows[i]).T
    dense[i, target, source] = True
  return dense


def _padded(flat: np.ndarray, offsets: np.ndarray, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
  starts = offsets[rows]
  lengths = np.where(rows < 0, 0, offsets[rows + 1] - starts)
  columns = np.arange(length)
  mask = columns < lengths[:, None]
  ids = flat[np.where(mask, starts[:, None] + columns, 0)] if flat.size else 0  # nothing but filler rows
  return np.where(mask, ids, PAD).astype(np.int32), mask


def _filled(rows: np.ndarray, size: int) -> np.ndarray:
  return np.pad(rows, (0, size - len(rows)), constant_values=-1)
