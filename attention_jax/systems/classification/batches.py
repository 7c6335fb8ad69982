"""Labelled documents as ids of the words of their sentences, and batches of them, pure functions of (seed, step).

Words are the tokens of the vocabulary, whichever its kind: words, subwords or characters.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attention_jax.atomic import write_text
from attention_jax.data import preparing, vocab
from attention_jax.data.batching import (
  FILLER,
  WHOLE_BATCH,
  BatchOrder,
  OrderedBatches,
  Share,
  eval_batch_rows,
  gather_padded,
)
from attention_jax.data.prepared import PreparedTable
from attention_jax.data.text import format_count
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.systems.classification.config import ClassificationDataConfig
from attention_jax.systems.classification.data import (
  LABELS_FILE,
  Documents,
  check_labels,
  documents_as_json,
  load_documents,
  open_documents,
  read_labels,
)
from attention_jax.tokens import UNK

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

  @property
  def num_words(self) -> int:
    """Number of words."""
    return len(self.ids)

  @property
  def num_unknown_words(self) -> int:
    """Number of words that are out of vocabulary."""
    return int(np.count_nonzero(self.ids == UNK))

  @property
  def identity(self) -> 'EncodedDocuments':
    """All arrays, from which digests of the split are computed."""
    return self

  def read(self, rows: np.ndarray) -> tuple['EncodedDocuments', np.ndarray]:
    """Returns a split in memory that contains the rows, and their positions in it: this one and the same rows."""
    return self, rows


class PreparedDocuments:
  """A split on disk, used as EncodedDocuments are. In memory are only the index and the labels.

  Args:
    table: the table of the documents.
    labels: the label of each document, see EncodedDocuments.
  """

  def __init__(self, table: PreparedTable, labels: np.ndarray):
    self._table = table
    self.labels = labels
    self.rows = table.rows
    self.num_sentences = table.column('sentences')
    self.max_words = table.column('words')
    self.num_words, self.num_unknown_words, self.num_truncated_words = table.counts
    self.identity = table.identity, labels

  def read(self, rows: np.ndarray) -> tuple[EncodedDocuments, np.ndarray]:
    """Returns a split in memory that contains the rows, and their positions in it; those of filler rows are -1."""
    ((ids, _), (lengths, offsets)), positions = self._table.read_flat(rows, 'ids', 'sentence_lengths')
    return EncodedDocuments(ids, _offsets(lengths), offsets, self.labels[rows[rows >= 0]], 0), positions


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


DocumentSplit = EncodedDocuments | PreparedDocuments


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
  label_ids = _label_ids(documents, labels)
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
    label_ids,
    num_truncated_words,
  )


def _label_ids(documents: Documents, labels: Sequence[str]) -> np.ndarray:
  ids = {label: i for i, label in enumerate(labels)}
  for row, label in enumerate(documents.labels):
    if label not in ids:
      expected = f'expected one of the labels of the model: {", ".join(labels)}'
      raise UserError(f'{documents.location(row)}: unknown label {label!r}; {expected}')
  return np.array([ids[label] for label in documents.labels], np.int32)


def encode_split(
  documents: Documents, vocabulary: Vocabulary, labels: Sequence[str], config: ClassificationDataConfig
) -> DocumentSplit:
  """Returns the ids of a split: those on disk if it was prepared, otherwise those of `encode_documents`.

  Args:
    documents: the split as text.
    vocabulary: the vocabulary of the words; not used if the split was prepared.
    labels: all labels; the id of a label is its position.
    config: the group `data` of the config.

  Raises:
    UserError: as `encode_documents` does.
  """
  if documents.prepared is not None:
    return PreparedDocuments(documents.prepared, _label_ids(documents, labels))
  limits = largest_bucket(check_document_buckets(config.buckets))
  return encode_documents(documents, vocabulary, labels, limits, config.joined)


def load_splits(config: ClassificationDataConfig) -> dict[str, Documents]:
  """Returns the splits as `load_documents` does.

  Raises:
    UserError: as `load_documents` does, and for a data set that was prepared with other settings.
  """
  documents = load_documents(config)
  if (train := documents['train']).prepared is not None:
    train.prepared.check_settings(_settings(config))
  return documents


def _settings(config: ClassificationDataConfig) -> dict[str, Any]:
  """What the ids of a prepared data set depend on."""
  fields = {f'config.data.{name}': getattr(config, name) for name in ('vocabulary', 'joined')}
  return fields | {'the largest of config.data.buckets': [*largest_bucket(check_document_buckets(config.buckets))]}


def prepare_documents(config: ClassificationDataConfig) -> preparing.Preparation:
  """Returns the documents of a config as a data set to write.

  Raises:
    UserError: for mistakes in the config or the data.
  """
  streams = dict(open_documents(config))
  train = streams.pop('train')
  if isinstance(train, Documents):
    raise UserError(f'{config.folder or "."} is prepared already; expected a task other than {config.task!r}')
  request = {'system': 'classification', 'task': config.task, 'name': train.name, 'files': train.fingerprint}

  def texts() -> Iterator[str]:
    rows = (row for row, _ in train.rows())
    while chunk := list(itertools.islice(rows, preparing.CHUNK_ROWS)):
      yield from train.split(chunk, train.first).texts

  def open_tables(folder: Path, log: preparing.Log) -> list[preparing.RecordTable]:
    if not (folder / LABELS_FILE).exists():
      labels = sorted({label for (_, label), _ in train.rows()})
      check_labels(labels, train.name)
      write_text(folder / LABELS_FILE, json.dumps(labels, ensure_ascii=False))
    preparing.store_vocabulary(config.vocabulary, 'source', texts(), folder, log)
    vocabulary = vocab.load_stored(config.vocabulary, str(folder), 'source')
    labels = read_labels(folder)

    def encode(chunk: Sequence[preparing.NumberedExample]) -> preparing.EncodedRows:
      first = train.first + chunk[0].number - 1
      documents = train.split([numbered.example for numbered in chunk], first)
      encoded = encode_split(documents, vocabulary, labels, config)
      lengths = np.diff(encoded.sentence_offsets).astype(np.int32)
      parts = [slice(*pair) for pair in itertools.pairwise(encoded.offsets)]
      words = np.split(encoded.ids, encoded.sentence_offsets[encoded.offsets[1:-1]])
      values = zip(words, [lengths[part] for part in parts], map('\n'.join, documents.sentences), strict=True)
      counts = (encoded.num_words, encoded.num_unknown_words, encoded.num_truncated_words)
      return preparing.EncodedRows(values, (encoded.num_sentences, encoded.max_words, encoded.labels), counts)

    return [preparing.RecordTable('train', 'document', train.rows, encode, lambda numbers: numbers - 1 + train.first)]

  splits = {name: documents_as_json(stream.read()) for name, stream in streams.items()}
  return preparing.Preparation(request | {'pairs': train.pairs} | _settings(config), splits, open_tables)


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


def assign_documents(encoded: DocumentSplit, buckets: Sequence[tuple[int, int]]) -> np.ndarray:
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
    encoded: DocumentSplit,
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
  encoded: DocumentSplit, buckets: Sequence[tuple[int, int]], size: int
) -> Iterator[LabelledBatch]:
  """Yields batches of `size` rows for evaluation: every document once, by bucket, then by its number of sentences.

  Args:
    encoded: the split.
    buckets: (sentences, words) pairs, smallest first; every document fits at least one of them.
    size: rows of a batch, with filler rows in the last batch of a bucket.
  """
  for rows, bucket in eval_batch_rows(assign_documents(encoded, buckets), buckets, encoded.num_sentences, size):
    yield gather_documents(encoded, rows, bucket)


def gather_documents(encoded: DocumentSplit, rows: np.ndarray, bucket: tuple[int, int]) -> LabelledBatch:
  """Returns rows of a split as one batch.

  Args:
    encoded: the split.
    rows: indices of documents; -1 = a filler row.
    bucket: (sentences, words), at least those of every document.
  """
  documents, positions = encoded.read(rows)
  sentence_numbers = np.arange(len(documents.sentence_offsets) - 1)
  sentences, is_sentence = gather_padded(sentence_numbers, documents.offsets, positions, bucket[0])
  sentences = np.where(is_sentence, sentences, FILLER)
  source, mask = gather_padded(documents.ids, documents.sentence_offsets, sentences, bucket[1])
  label = np.where(rows >= 0, encoded.labels[rows], 0).astype(np.int32)
  return LabelledBatch(source, mask, label, rows.astype(np.int32))


def describe_documents(split: str, encoded: DocumentSplit, labels: Sequence[str]) -> str:
  """Returns a line with the number of documents of each label, and the shares of unknown and of truncated words.

  The share of unknown words is that among the words that are kept; the other one is left out if it rounds to 0.0 %.

  Args:
    split: name of the split.
    encoded: the split as ids.
    labels: all labels; the id of a label is its position.
  """
  label_counts = ', '.join(f'{np.sum(encoded.labels == i)} {label}' for i, label in enumerate(labels))
  num_words = encoded.num_words + encoded.num_truncated_words
  truncated = 100 * encoded.num_truncated_words / max(num_words, 1)
  unknown = 100 * encoded.num_unknown_words / max(encoded.num_words, 1)
  line = f'{split}: {format_count(encoded.rows, "document")} ({label_counts}); unknown words: {unknown:.2f} %'
  return f'{line}; {truncated:.1f} % of the words exceed the largest bucket' if truncated >= 0.05 else line
