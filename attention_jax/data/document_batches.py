"""Documents as ids: sentences of words, a label each; and their batches, as functions of (seed, step)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.data.batching import Order, eval_batch_rows
from attention_jax.data.documents import Documents
from attention_jax.data.text import format_count
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.tokens import PAD, UNK


class EncodedDocuments(NamedTuple):
  """One split as ids. Document i has the sentences from offsets[i] to offsets[i + 1], and sentence j the words
  ids[sentence_offsets[j]:sentence_offsets[j + 1]].

  Attributes:
    ids: int32, all words after one another.
    sentence_offsets: int64 [sentences + 1].
    offsets: int64 [documents + 1].
    labels: int32 [documents].
    left: how many words of all documents are behind the largest bucket.
  """

  ids: np.ndarray
  sentence_offsets: np.ndarray
  offsets: np.ndarray
  labels: np.ndarray
  left: int

  @property
  def rows(self) -> int:
    return len(self.labels)

  @property
  def sentences(self) -> np.ndarray:
    """How many sentences each document has [documents]."""
    return np.diff(self.offsets)

  @property
  def words(self) -> np.ndarray:
    """How long the longest sentence of each document is [documents]."""
    return np.maximum.reduceat(np.diff(self.sentence_offsets), self.offsets[:-1])


class LabelledBatch(NamedTuple):
  """B documents of one bucket (N, W).

  Attributes:
    source: int32 [B, N, W] words of sentences, then PAD.
    source_mask: bool [B, N, W], True = real.
    label: int32 [B].
    index: int32 [B], the row in its split; -1 = a filler row, whose mask is all False.
  """

  source: np.ndarray
  source_mask: np.ndarray
  label: np.ndarray
  index: np.ndarray


def cut_document(
  sentences: Sequence[str], vocabulary: Vocabulary, most: tuple[int, int], *, joined: bool, pairs: bool
) -> tuple[list[tuple[list[str], list[int]]], int]:
  """The sentences of a document as (tokens, ids), as many as most[0], cut wherever they are longer than most[1]; and
  how many tokens that leaves out.

  Args:
    joined: whether the document is one sentence, of whose words the first most[1] are kept.
    pairs: whether it is a pair of texts, of each of which the first most[1] words are kept.
  """
  if joined:
    sentences = [' '.join(sentences)]
  found, total = [], 0
  for sentence in sentences:
    tokens, ids = vocabulary.tokenize(sentence), vocabulary.encode(sentence)
    starts = range(0, len(ids), most[1])[: 1 if joined or pairs else None]
    found += [(tokens[start : start + most[1]], ids[start : start + most[1]]) for start in starts]
    total += len(ids)
  kept = found[: most[0]]
  return kept, total - sum(len(ids) for _, ids in kept)


def encode_documents(
  documents: Documents, vocabulary: Vocabulary, labels: Sequence[str], most: tuple[int, int], joined: bool
) -> EncodedDocuments:
  """The ids of a split, of each document as many sentences and words as `most` says, see `cut_document`."""
  flat, lengths, sizes, left = [], [], [], 0
  for sentences in documents.sentences:
    kept, more = cut_document(sentences, vocabulary, most, joined=joined, pairs=documents.pairs)
    left += more
    flat += [id for _, ids in kept for id in ids]
    lengths += [len(ids) for _, ids in kept]
    sizes.append(len(kept))
  numbers = {label: i for i, label in enumerate(labels)}
  offsets = lambda sizes: np.cumsum([0, *sizes], dtype=np.int64)
  known = np.array([numbers[label] for label in documents.labels], np.int32)
  return EncodedDocuments(np.array(flat, np.int32), offsets(lengths), offsets(sizes), known, left)


def check_document_buckets(buckets: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
  """The (sentences, words) pairs, smallest first. Raises: UserError for anything else."""
  try:
    pairs = sorted({(sentences, words) for sentences, words in buckets}, key=lambda pair: (pair[0] * pair[1], pair))
  except (TypeError, ValueError):
    pairs = []
  if not pairs or not all(isinstance(size, int) and size > 0 for pair in pairs for size in pair):
    raise UserError(f'buckets are different (sentences, words) such as ((10, 30), (30, 30)), got {buckets}')
  return tuple(pairs)


def largest_bucket(buckets: Sequence[tuple[int, int]]) -> tuple[int, int]:
  """How many sentences, and words of each, some bucket holds. Raises: UserError where no bucket holds both."""
  most = max(sentences for sentences, _ in buckets), max(words for _, words in buckets)
  if most not in buckets:
    raise UserError(f'one of config.data.buckets={buckets} must hold all that is read: {most}')
  return most


def assign_documents(encoded: EncodedDocuments, buckets: Sequence[tuple[int, int]]) -> np.ndarray:
  """For each document the position of the smallest bucket that holds it."""
  chosen = np.full(encoded.rows, -1, np.int32)
  for i, (sentences, words) in reversed(list(enumerate(buckets))):
    chosen[(encoded.sentences <= sentences) & (encoded.words <= words)] = i
  return chosen


class DocumentBatches:
  """The training batches of one split, without end: `batches[step]` for any step >= 0, see batching.Order."""

  shape_names = 'rows, sentences, words'

  def __init__(
    self,
    encoded: EncodedDocuments,
    buckets: Sequence[tuple[int, int]],
    size: int,
    seed: int = 0,
    shard: int = 0,
    shards: int = 1,
  ):
    self._order = Order(assign_documents(encoded, buckets), buckets, size, seed=seed, shard=shard, shards=shards)
    self._encoded = encoded

  def __len__(self) -> int:
    """Batches in an epoch."""
    return len(self._order)

  @property
  def shapes(self) -> list[tuple[int, int, int]]:
    """The (rows, sentences, words) that occur."""
    return self._order.shapes

  def __getitem__(self, step: int) -> LabelledBatch:
    _, rows, bucket = self._order[step]
    return gather_documents(self._encoded, rows, bucket)


def eval_document_batches(
  encoded: EncodedDocuments, buckets: Sequence[tuple[int, int]], size: int
) -> Iterator[LabelledBatch]:
  """Batches for evaluation: every document once, by bucket, then by its number of sentences."""
  for rows, bucket in eval_batch_rows(assign_documents(encoded, buckets), buckets, encoded.sentences, size):
    yield gather_documents(encoded, rows, bucket)


def gather_documents(encoded: EncodedDocuments, rows: np.ndarray, bucket: tuple[int, int]) -> LabelledBatch:
  """The given rows (-1 = a filler row) as one batch of the shape of `bucket`, which must hold them."""
  sentences, words = np.arange(bucket[0]), np.arange(bucket[1])
  number = encoded.offsets[rows][:, None] + sentences
  there = (sentences < encoded.sentences[rows][:, None]) & (rows >= 0)[:, None]
  number = np.where(there, number, 0)
  starts = encoded.sentence_offsets[number]
  lengths = np.where(there, encoded.sentence_offsets[number + 1] - starts, 0)
  mask = words < lengths[..., None]
  ids = encoded.ids[np.where(mask, starts[..., None] + words, 0)]
  label = np.where(rows >= 0, encoded.labels[rows], 0).astype(np.int32)
  return LabelledBatch(np.where(mask, ids, PAD).astype(np.int32), mask, label, rows.astype(np.int32))


def describe_documents(split: str, encoded: EncodedDocuments, labels: Sequence[str]) -> str:
  """A line on a split: how many documents of each label, and which share of the words was cut off or is unknown."""
  each = ', '.join(f'{np.sum(encoded.labels == i)} {label}' for i, label in enumerate(labels))
  cut = 100 * encoded.left / max(len(encoded.ids) + encoded.left, 1)
  unknown = 100 * float(np.mean(encoded.ids == UNK)) if len(encoded.ids) else 0.0
  long = f'; {cut:.1f} % of the words are behind the largest bucket' if cut >= 0.05 else ''
  return f'{split}: {format_count(encoded.rows, "document")} ({each}); unknown words: {unknown:.2f} %{long}'
