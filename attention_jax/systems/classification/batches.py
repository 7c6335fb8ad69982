"""Labelled documents as ids of the words of their sentences, and batches of them, pure functions of (seed, step).

Words are the tokens of the vocabulary, whichever its kind: words, subwords or characters.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from attention_jax.data.batching import WHOLE_BATCH, BatchOrder, OrderedBatches, Share, eval_batch_rows
from attention_jax.data.text import format_count
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.systems.classification.data import Documents
from attention_jax.tokens import PAD, UNK

Token = TypeVar('Token')  # a token, or its id
DocumentBuckets = tuple[tuple[int, int], ...]


class EncodedDocuments(NamedTuple):
  """One split as ids.

  Document i has the sentences offsets[i] to offsets[i + 1] - 1; sentence j has the words
  ids[sentence_offsets[j]:sentence_offsets[j + 1]].

  Attributes:
    ids: int32, all words concatenated.
    sentence_offsets: int64 [sentences + 1].
    offsets: int64 [documents + 1].
    labels: int32 [documents].
    num_truncated_words: number of words of all documents that are left out because they exceed the largest bucket.
  """

  ids: np.ndarray
  sentence_offsets: np.ndarray
  offsets: np.ndarray
  labels: np.ndarray
  num_truncated_words: int

  @property
  def rows(self) -> int:
    """Number of documents."""
    return len(self.labels)

  @property
  def num_sentences(self) -> np.ndarray:
    """Number of sentences of each document [documents]."""
    return np.diff(self.offsets)

  @property
  def max_words(self) -> np.ndarray:
    """Number of words of the longest sentence of each document [documents]."""
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
  sentences: Sequence[str],
  tokenize: Callable[[str], list[Token]],
  limits: tuple[int, int],
  *,
  joined: bool,
  pairs: bool,
) -> tuple[list[list[Token]], int]:
  """Fits a document into (sentences, words): splits sentences that are too long, leaves out those beyond the limit.

  Args:
    sentences: the sentences of the document.
    tokenize: returns the tokens of a sentence, or their ids.
    limits: maximum number of sentences, and of words in each.
    joined: whether the document is read as one sentence, of which the first limits[1] words are kept.
    pairs: whether the document is a pair of texts; the first limits[1] words of each are kept.

  Returns:
    The tokens of each sentence, and the number of tokens that are left out.
  """
  max_sentences, max_words = limits
  if joined:
    sentences = [' '.join(sentences)]
  pieces = []
  num_tokens = 0
  for sentence in sentences:
    tokens = tokenize(sentence)
    num_tokens += len(tokens)
    starts = range(0, len(tokens), max_words)
    if joined or pairs:
      starts = starts[:1]
    pieces += [tokens[start : start + max_words] for start in starts]
  pieces = pieces[:max_sentences]
  return pieces, num_tokens - sum(map(len, pieces))


def encode_documents(
  documents: Documents, vocabulary: Vocabulary, labels: Sequence[str], limits: tuple[int, int], joined: bool
) -> EncodedDocuments:
  """Returns the ids of a split.

  Args:
    documents: the split as text.
    vocabulary: the vocabulary of the words.
    labels: all labels; the id of a label is its position.
    limits: see `cut_document`.
    joined: see `cut_document`.

  Raises:
    UserError: for a text that has no token, such as '▁' with a vocabulary of subwords, and for a label that is not
      among `labels`, which may be those of an earlier run on other data.
  """
  label_ids = {label: i for i, label in enumerate(labels)}
  for row, label in enumerate(documents.labels):
    if label not in label_ids:
      expected = f'expected one of the labels of the model: {", ".join(labels)}'
      raise UserError(f'{documents.location(row)}: unknown label {label!r}; {expected}')
  min_pieces = min(2, limits[0]) if documents.pairs and not joined else 1
  flat = []
  sentence_lengths = []
  document_lengths = []
  num_truncated_words = 0
  for row, sentences in enumerate(documents.sentences):
    pieces, num_left_out = cut_document(sentences, vocabulary.encode, limits, joined=joined, pairs=documents.pairs)
    if len(pieces) < min_pieces:
      raise UserError(f'{documents.location(row)}: a text has no token, got {" ".join(sentences)[:40]!r}')
    num_truncated_words += num_left_out
    flat += itertools.chain.from_iterable(pieces)
    sentence_lengths += map(len, pieces)
    document_lengths.append(len(pieces))
  return EncodedDocuments(
    np.array(flat, np.int32),
    _offsets(sentence_lengths),
    _offsets(document_lengths),
    np.array([label_ids[label] for label in documents.labels], np.int32),
    num_truncated_words,
  )


def _offsets(lengths: Sequence[int]) -> np.ndarray:
  return np.cumsum([0, *lengths], dtype=np.int64)


def check_document_buckets(buckets: Iterable[Sequence[int]]) -> DocumentBuckets:
  """Returns distinct (sentences, words) pairs, smallest first.

  Raises:
    UserError: for anything but pairs of positive whole numbers.
  """
  try:
    pairs = sorted({(sentences, words) for sentences, words in buckets}, key=lambda pair: (pair[0] * pair[1], pair))
  except (TypeError, ValueError):
    pairs = []
  if not pairs or not all(isinstance(size, int) and size > 0 for pair in pairs for size in pair):
    raise UserError(
      'buckets must be pairs (sentences, words) of whole numbers of at least 1, such as ((10, 30), (30, 30)), '
      f'got {buckets}'
    )
  return tuple(pairs)


def largest_bucket(buckets: Sequence[tuple[int, int]]) -> tuple[int, int]:
  """Returns the bucket with the most sentences and the most words.

  Raises:
    UserError: if no bucket has both.
  """
  largest = max(sentences for sentences, _ in buckets), max(words for _, words in buckets)
  if largest not in buckets:
    raise UserError(
      f'one of config.data.buckets must have the most sentences and the most words, {largest}, got {buckets}'
    )
  return largest


def assign_documents(encoded: EncodedDocuments, buckets: Sequence[tuple[int, int]]) -> np.ndarray:
  """Returns for each document the position of the first bucket that holds it, -1 if none does.

  Args:
    encoded: the split.
    buckets: (sentences, words) pairs, smallest first.
  """
  bucket_index = np.full(encoded.rows, -1, np.int32)
  for i, (sentences, words) in reversed(list(enumerate(buckets))):
    bucket_index[(encoded.num_sentences <= sentences) & (encoded.max_words <= words)] = i
  return bucket_index


class DocumentBatches(OrderedBatches):
  """Endless training batches of one split: `batches[step]` for any step >= 0, see batching.BatchOrder."""

  shape_names = 'rows, sentences, words'
  min_row_positions = math.prod  # (sentences, words) -> the words of a row; see systems.base.BatchSequence

  def __init__(
    self,
    encoded: EncodedDocuments,
    buckets: Sequence[tuple[int, int]],
    size: int,
    seed: int = 0,
    share: Share = WHOLE_BATCH,
  ):
    """Assigns the rows of a split to batches; for size, seed and share see batching.BatchOrder."""
    bucket_index = assign_documents(encoded, buckets)
    self._order = BatchOrder(bucket_index, buckets, size, seed=seed, share=share)
    self._encoded = encoded

  def __getitem__(self, step: int) -> LabelledBatch:
    _, rows, bucket = self._order[step]
    return gather_documents(self._encoded, rows, bucket)


def eval_document_batches(
  encoded: EncodedDocuments, buckets: Sequence[tuple[int, int]], size: int
) -> Iterator[LabelledBatch]:
  """Yields batches of `size` rows for evaluation: every document once, by bucket, then by its number of sentences.

  Args:
    encoded: the split.
    buckets: (sentences, words) pairs, smallest first; every document fits at least one of them.
    size: rows of a batch, with filler rows in the last batch of a bucket.
  """
  for rows, bucket in eval_batch_rows(assign_documents(encoded, buckets), buckets, encoded.num_sentences, size):
    yield gather_documents(encoded, rows, bucket)


def gather_documents(encoded: EncodedDocuments, rows: np.ndarray, bucket: tuple[int, int]) -> LabelledBatch:
  """Returns rows of a split as one batch.

  Args:
    encoded: the split.
    rows: indices of documents; -1 = a filler row.
    bucket: (sentences, words), at least those of every document.
  """
  sentences = np.arange(bucket[0])
  words = np.arange(bucket[1])
  is_sentence = (sentences < encoded.num_sentences[rows][:, None]) & (rows >= 0)[:, None]
  sentence_index = np.where(is_sentence, encoded.offsets[rows][:, None] + sentences, 0)
  starts = encoded.sentence_offsets[sentence_index]
  lengths = np.where(is_sentence, encoded.sentence_offsets[sentence_index + 1] - starts, 0)
  mask = words < lengths[..., None]
  ids = encoded.ids[np.where(mask, starts[..., None] + words, 0)]
  label = np.where(rows >= 0, encoded.labels[rows], 0).astype(np.int32)
  return LabelledBatch(np.where(mask, ids, PAD).astype(np.int32), mask, label, rows.astype(np.int32))


def describe_documents(split: str, encoded: EncodedDocuments, labels: Sequence[str]) -> str:
  """Returns a line with the number of documents of each label, and the shares of unknown and of truncated words.

  The share of unknown words is that among the words that are kept; the other one is left out if it rounds to 0.0 %.

  Args:
    split: name of the split.
    encoded: the split as ids.
    labels: all labels; the id of a label is its position.
  """
  label_counts = ', '.join(f'{np.sum(encoded.labels == i)} {label}' for i, label in enumerate(labels))
  num_words = len(encoded.ids) + encoded.num_truncated_words
  truncated = 100 * encoded.num_truncated_words / max(num_words, 1)
  unknown = 100 * float(np.mean(encoded.ids == UNK)) if len(encoded.ids) else 0.0
  line = f'{split}: {format_count(encoded.rows, "document")} ({label_counts}); unknown words: {unknown:.2f} %'
  return f'{line}; {truncated:.1f} % of the words exceed the largest bucket' if truncated >= 0.05 else line
