"""Prepared data sets: pairs of texts on disk, tokenised once. Each batch reads its rows from there.

A folder holds the manifest, the vocabularies, the training split as ArrayRecord files with an index of lengths and
line numbers, and the other splits, which are small, as text. `preparing` writes it; the task `prepared` reads it.
Each row is a record of its own: random access makes the order of all rows a function of (seed, epoch), without a buffer
whose content a resumed run would have to restore.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.data.text import Corpus
from attention_jax.data.url_folders import local_copy
from attention_jax.errors import UserError

MANIFEST = 'prepared.json'  # written last: a folder without it is not finished
INDEX = 'train.index.npy'
FORMAT = 3  # of the folder; increased by changes that older code cannot read
# fields of config.data that the ids depend on
VOCABULARY_FIELDS = ('vocabulary', 'shared_vocabulary', 'normalization')
HEADER_DTYPE = np.dtype('<u4')  # of three counts: source tokens, target tokens, and bytes of the source text
ID_DTYPE = np.dtype('<i4')
READ_ROWS = 1024  # lines per read when all are read: 0.01 ms for each, instead of 0.3 to 0.8 ms for a line by itself


class Shard(NamedTuple):
  """One file of rows.

  Attributes:
    name: name of the file.
    rows: number of rows.
    size: bytes of the file.
    digest: digest of the rows.
    tokens, unknown: number of source and target tokens, and of those that are out of vocabulary.
    uncopyable: number of target ids that do not occur in their source, for a shared vocabulary.
  """

  name: str
  rows: int
  size: int
  digest: str
  tokens: Sequence[int]
  unknown: Sequence[int]
  uncopyable: int


class PreparedRow(NamedTuple):
  """One pair: ids as in EncodedCorpus, and the texts."""

  source: np.ndarray
  target: np.ndarray
  source_text: str
  target_text: str


def pack_row(source: np.ndarray, target: np.ndarray, source_text: str, target_text: str) -> bytes:
  """Returns the record of a row.

  Args:
    source: ids of the source as in EncodedCorpus, EOS included, int32 [S].
    target: ids of the target, likewise, int32 [T].
    source_text: the source as text.
    target_text: the target as text.
  """
  text = source_text.encode()
  header = np.array([len(source), len(target), len(text)], HEADER_DTYPE)
  return b''.join([header.tobytes(), source.astype(ID_DTYPE).tobytes(), target.astype(ID_DTYPE).tobytes(), text]) + (
    target_text.encode()
  )


def _unpack_ids(record: bytes) -> tuple[np.ndarray, np.ndarray, int, int]:
  """Source and target ids of a record, and the offset of its source text and its length in bytes."""
  num_source, num_target, num_bytes = map(int, np.frombuffer(record, HEADER_DTYPE, 3))
  start = 3 * HEADER_DTYPE.itemsize
  ids = np.frombuffer(record, ID_DTYPE, num_source + num_target, start)
  return ids[:num_source], ids[num_source:], start + ids.nbytes, num_bytes


def unpack_row(record: bytes) -> PreparedRow:
  """Returns the row of a record."""
  source, target, start, size = _unpack_ids(record)
  return PreparedRow(source, target, record[start : start + size].decode(), record[start + size :].decode())


class PreparedSplit:
  """A training split on disk, an EncodedSplit. In memory are only the lengths and line numbers, 12 bytes for each row.

  Args:
    folder: the folder of a prepared data set.
    manifest: the content of its manifest.

  Raises:
    UserError: for files that are missing or not of the size that the manifest states, and for a damaged index.
  """

  links = None

  def __init__(self, folder: Path, manifest: Mapping[str, Any]):
    self.folder = folder
    self._manifest = manifest
    self._shards = [Shard(**shard) for shard in manifest['shards']]
    for shard in self._shards:
      _check_size(folder / shard.name, shard.size)
    self.rows = sum(shard.rows for shard in self._shards)
    self._index = _read_index(folder / INDEX, self.rows)

  @property
  def lengths(self) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths [rows], EOS included."""
    return self._index[:, 0], self._index[:, 1]

  @property
  def line_numbers(self) -> np.ndarray:
    """The line number of each row in its file, [rows]; the number of its pair for data without lines."""
    return self._index[:, 2]

  @property
  def num_tokens(self) -> tuple[int, int]:
    """Number of source and target tokens, EOS included."""
    return _sum_by_side(shard.tokens for shard in self._shards)

  @property
  def num_uncopyable_tokens(self) -> int:
    """Number of target ids that do not occur in their source, for a shared vocabulary."""
    return sum(shard.uncopyable for shard in self._shards)

  @property
  def identity(self) -> np.ndarray:
    """The digests of all shards."""
    return np.frombuffer(''.join(shard.digest for shard in self._shards).encode(), np.uint8)

  def num_unknown_tokens(self, vocab_sizes: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of source and of target tokens that are out of vocabulary, counted when they were prepared.

    Args:
      vocab_sizes: not used.
    """
    return _sum_by_side(shard.unknown for shard in self._shards)

  def read(self, rows: np.ndarray) -> tuple[EncodedCorpus, np.ndarray]:
    """Returns a split in memory that contains the rows, and their positions in it; those of filler rows are -1."""
    is_row = rows >= 0
    columns = [], []
    for record in self.read_records(rows[is_row]):
      source, target, *_ = _unpack_ids(record)
      columns[0].append(source)
      columns[1].append(target)
    corpus = EncodedCorpus(*_concatenate(columns[0]), *_concatenate(columns[1]))
    return corpus, np.where(is_row, np.cumsum(is_row) - 1, -1)

  def read_records(self, rows: np.ndarray) -> Sequence[bytes]:
    """Returns the records of these rows, which are read in one call.

    Raises:
      UserError: for records that cannot be read.
    """
    try:
      return self._records.__getitems__(rows.tolist()) if len(rows) else []
    except Exception as error:  # ArrayRecord verifies the checksums of what it reads
      raise UserError(f'{self.folder}: cannot read its rows ({" ".join(str(error).split())[:200]})') from error

  def check_config(self, config: Any) -> None:
    """Raises UserError if `config`, the group config.data, has other vocabularies than the data set."""
    for field in VOCABULARY_FIELDS:
      value, expected = getattr(config, field), self._manifest[field]
      if value != expected:
        raise UserError(f'config.data.{field} is {value!r}, but {self.folder} was prepared with {expected!r}')

  @functools.cached_property
  def _records(self) -> Any:
    import grain

    return grain.sources.ArrayRecordDataSource([str(self.folder / shard.name) for shard in self._shards])


class PreparedLines(Sequence[str]):
  """The texts of one side of a split on disk, which are read when they are used.

  Args:
    split: the split.
    column: the side: 'source_text' or 'target_text', a field of PreparedRow.
  """

  def __init__(self, split: PreparedSplit, column: str):
    self._split = split
    self._column = column

  def __len__(self) -> int:
    return self._split.rows

  def __iter__(self) -> Iterator[str]:
    for start in range(0, len(self), READ_ROWS):
      yield from self[start : start + READ_ROWS]

  @overload
  def __getitem__(self, index: int) -> str: ...

  @overload
  def __getitem__(self, index: slice) -> list[str]: ...

  def __getitem__(self, index: int | slice) -> str | list[str]:
    rows = np.array(range(len(self))[index], np.int64)  # a range raises IndexError as a list does, and takes no memory
    lines = self.read(np.atleast_1d(rows))
    return lines if isinstance(index, slice) else lines[0]

  def read(self, rows: np.ndarray) -> list[str]:
    """Returns the lines of these rows, which are read in one call."""
    return [getattr(unpack_row(record), self._column) for record in self._split.read_records(rows)]


def select_lines(lines: Sequence[str], rows: np.ndarray) -> list[str]:
  """Returns the lines of these rows, of one side of a split in memory or on disk."""
  return lines.read(rows) if isinstance(lines, PreparedLines) else [lines[row] for row in rows.tolist()]


def read_prepared(folder: str) -> dict[str, Corpus]:
  """Reads a prepared data set; the rows of its training split stay on disk.

  Args:
    folder: its folder, or the URL of its folder, which is copied to the cache.

  Raises:
    UserError: if the folder holds no finished data set, or a damaged one.
  """
  path = Path(local_copy(folder) or '.').absolute()
  manifest = read_manifest(path)
  if manifest is None:
    raise UserError(f'{path} holds no prepared data set (no {MANIFEST}); python -m experiments.prepare makes one')
  try:
    split = PreparedSplit(path, manifest)
    lines = (PreparedLines(split, column) for column in ('source_text', 'target_text'))
    report = tuple(manifest['report'])
    train = Corpus(*lines, name=manifest['name'], lines=split.line_numbers, report=report, prepared=split)
    return {'train': train} | {name: read_corpus(path / f'{name}.json') for name in manifest['splits']}
  except (KeyError, TypeError) as error:
    raise UserError(f'{path / MANIFEST}: not the manifest of a prepared data set ({error!r})') from error


def read_manifest(folder: Path) -> dict[str, Any] | None:
  """Returns the manifest of a prepared data set; None if there is none.

  Raises:
    UserError: for a file that is no manifest, or has another format.
  """
  path = folder / MANIFEST
  try:
    manifest = dict(json.loads(path.read_text('utf-8')))
  except FileNotFoundError:
    return None
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise UserError(f'cannot read {path}: {" ".join(str(error).split())}') from error
  if manifest.get('format') != FORMAT:
    raise UserError(f'{path} has format {manifest.get("format")!r}, expected {FORMAT}; prepare the data set again')
  return manifest


def corpus_as_json(corpus: Corpus) -> str:
  """Returns a corpus in memory as JSON."""
  fields = corpus._asdict() | {'lines': None if corpus.lines is None else [*map(int, corpus.lines)], 'prepared': None}
  return json.dumps(fields, ensure_ascii=False)


def read_corpus(path: Path) -> Corpus:
  """Reads a file with the JSON of `corpus_as_json`.

  Raises:
    UserError: for anything else.
  """
  try:
    corpus = Corpus(**json.loads(path.read_text('utf-8')))
    return corpus._replace(
      links=_as_links(corpus.links), possible=_as_links(corpus.possible), report=tuple(corpus.report)
    )
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise UserError(f'{path}: not a split of a prepared data set ({" ".join(str(error).split())})') from error


def _as_links(rows: Sequence[Sequence[Sequence[int]]] | None) -> list[tuple[tuple[int, int], ...]] | None:
  return rows and [tuple((source, target) for source, target in links) for links in rows]


def _check_size(path: Path, size: int) -> None:
  try:
    stored_size = os.path.getsize(path)
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}; prepare the data set again') from error
  if stored_size != size:
    raise UserError(f'{path} has {stored_size} bytes, expected {size}; prepare the data set again')


def _read_index(path: Path, rows: int) -> np.ndarray:
  """Source length, target length and line number of each row, int32 [rows, 3]."""
  try:
    index = np.load(path, allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise UserError(f'{path}: cannot be read ({" ".join(str(error).split())}); prepare the data set again') from error
  if index.shape != (rows, 3) or index.dtype != np.int32:
    got = f'{index.dtype} {list(index.shape)}'
    raise UserError(f'{path} must be int32 {[rows, 3]}, got {got}; prepare the data set again')
  return index


def _sum_by_side(counts: Any) -> tuple[int, int]:
  """Adds up the (source, target) counts of shards, each side by itself."""
  source, target = map(sum, zip(*counts, strict=True))
  return source, target


def _concatenate(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Rows, concatenated, and their offsets."""
  offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
  return (np.concatenate(rows) if rows else np.zeros(0, ID_DTYPE)), offsets
