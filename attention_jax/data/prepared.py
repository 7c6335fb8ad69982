"""Prepared data sets: examples on disk, tokenised once. Each batch reads its rows from there.

A folder holds the manifest, the vocabularies, tables of records as ArrayRecord files with an index of lengths and line
numbers, and the splits that are small as text. `preparing` writes it; the tasks named `prepared` read it. Each row is a
record of its own: random access makes the order of all rows a function of (seed, epoch), without a buffer whose content
a resumed run would have to restore.
"""

import contextlib
import functools
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from etils import epath

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.data.text import Corpus
from attention_jax.data.url_folders import local_copy
from attention_jax.errors import UserError

MANIFEST = 'prepared.json'  # written last: a folder without it is not finished
FORMAT = 4  # of the folder; increased by changes that older code cannot read
TEXT = 'text'  # the type of fields that are strings
IDS = '<i4'
READ_ROWS = 1024  # lines per read when all are read: 0.01 ms for each, instead of 0.3 to 0.8 ms for a line by itself


class Schema(NamedTuple):
  """The content of a table.

  Attributes:
    fields: type of each field of a record by name: the dtype of a flat array of any length, or TEXT.
    columns: names of the columns of the index, which is in memory. The last one is the line number, or the number of
      the row for data without lines.
  """

  fields: Mapping[str, str]
  columns: tuple[str, ...]


PAIRS = Schema(
  {'source': IDS, 'target': IDS, 'source_text': TEXT, 'target_text': TEXT}, ('source_length', 'target_length', 'line')
)
PAIR_COUNTS = ('source', 'target', 'unknown_source', 'unknown_target', 'uncopyable')  # numbers of tokens


class Shard(NamedTuple):
  """One file of rows.

  Attributes:
    name: name of the file.
    rows: number of rows.
    size: bytes of the file.
    digest: digest of the rows.
    counts: what the table counts, such as PAIR_COUNTS, in these rows.
  """

  name: str
  rows: int
  size: int
  digest: str
  counts: Sequence[int]


def pack(values: Sequence[np.ndarray | str]) -> bytes:
  """Returns the record of a row: the size in bytes of each field, then the fields."""
  parts = [value.encode() if isinstance(value, str) else value.tobytes() for value in values]
  return b''.join([struct.pack(f'<{len(parts)}I', *map(len, parts)), *parts])


def make_unpack(schema: Schema, names: Sequence[str]) -> Callable[[bytes], list[Any]]:
  """Returns a function that maps a record to the values of the fields `names`, in the order of the schema.

  It does not decode the other fields.
  """
  header = struct.Struct(f'<{len(schema.fields)}I')
  converters = [_make_converter(dtype) if name in names else None for name, dtype in schema.fields.items()]

  def unpack(record: bytes) -> list[Any]:
    values = []
    start = header.size
    for size, convert in zip(header.unpack_from(record), converters, strict=True):
      if convert:
        values.append(convert(record, start, size))
      start += size
    return values

  return unpack


def _make_converter(dtype: str) -> Callable[[bytes, int, int], np.ndarray | str]:
  """Returns (record, offset, size in bytes) -> the value of a field."""
  if dtype == TEXT:
    return lambda record, start, size: record[start : start + size].decode()
  array_type = np.dtype(dtype)
  item_size = array_type.itemsize
  return lambda record, start, size: np.frombuffer(record, array_type, size // item_size, start)


class PreparedTable:
  """A table of records on disk. In memory is only its index, 4 bytes for each column of each row.

  Args:
    folder: the folder of a prepared data set.
    manifest: the content of its manifest.
    name: the name of the table.
    schema: the content of the table.

  Raises:
    UserError: for files that are missing or not of the size that the manifest states, and for a damaged index.
  """

  def __init__(self, folder: epath.Path, manifest: Mapping[str, Any], name: str, schema: Schema):
    self.folder = folder
    self._manifest = manifest
    self._schema = schema
    self._shards = [Shard(**shard) for shard in manifest['tables'][name]]
    for shard in self._shards:
      _check_size(folder / shard.name, shard.size)
    self.rows = sum(shard.rows for shard in self._shards)
    self._index = _read_index(folder / index_name(name), (self.rows, len(schema.columns)))

  def column(self, name: str) -> np.ndarray:
    """Returns a column of the index, int32 [rows]."""
    return self._index[:, self._schema.columns.index(name)]

  @property
  def counts(self) -> list[int]:
    """What the table counts, in all rows."""
    return [sum(counts) for counts in zip(*(shard.counts for shard in self._shards), strict=True)]

  @property
  def identity(self) -> tuple[np.ndarray, np.ndarray]:
    """The digests of all shards, and the index: all arrays in memory."""
    return np.frombuffer(''.join(shard.digest for shard in self._shards).encode(), np.uint8), self._index

  def read(self, rows: np.ndarray, *names: str) -> list[list[Any]]:
    """Returns the values of fields in these rows, which are read in one call: a list for each field.

    Args:
      rows: indices of rows.
      names: names of fields, in the order of the schema; the others are not decoded.
    """
    unpack = self._unpack(names)
    return [[*values] for values in zip(*map(unpack, self.read_records(rows)), strict=True)] or [[] for _ in names]

  def read_flat(self, rows: np.ndarray, *names: str) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """Reads fields that are arrays.

    Args:
      rows: indices of rows; -1 = a filler row, which is not read.
      names: names of the fields, in the order of the schema.

    Returns:
      For each field, its values in all rows, concatenated, and the offset of each row; and the positions of the rows in
      these, -1 for filler rows.
    """
    is_row = rows >= 0
    values = self.read(rows[is_row], *names)
    dtypes = (self._schema.fields[name] for name in names)
    return [*map(_concatenate, values, dtypes)], np.where(is_row, np.cumsum(is_row) - 1, -1)

  def read_records(self, rows: np.ndarray) -> Sequence[bytes]:
    """Returns the records of these rows, which are read in one call.

    Raises:
      UserError: for records that cannot be read.
    """
    try:
      return self._records.__getitems__(rows.tolist()) if len(rows) else []
    except Exception as error:  # ArrayRecord verifies the checksums of what it reads
      raise UserError(f'{self.folder}: cannot read its rows ({" ".join(str(error).split())[:200]})') from error

  def check_settings(self, settings: Mapping[str, Any]) -> None:
    """Raises UserError for settings of a config that are not those that the data set was prepared with."""
    for name, value in settings.items():
      if value != self._manifest[name]:
        raise UserError(f'{name} is {value!r}, but {self.folder} was prepared with {self._manifest[name]!r}')

  @functools.cached_property
  def _records(self) -> Any:
    import grain

    return grain.sources.ArrayRecordDataSource([str(self.folder / shard.name) for shard in self._shards])

  @functools.cached_property
  def _unpack(self) -> Callable[[tuple[str, ...]], Callable[[bytes], list[Any]]]:
    return functools.cache(functools.partial(make_unpack, self._schema))


class PreparedSplit:
  """A training split of pairs on disk, an EncodedSplit. In memory are only the lengths and line numbers.

  Args:
    table: the table of the pairs, of schema PAIRS.
  """

  links = None

  def __init__(self, table: PreparedTable):
    self.table = table
    self.rows = table.rows
    self.identity = table.identity

  @property
  def lengths(self) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths [rows], EOS included."""
    return self.table.column('source_length'), self.table.column('target_length')

  @functools.cached_property
  def _counts(self) -> dict[str, int]:
    return dict(zip(PAIR_COUNTS, self.table.counts, strict=True))

  @property
  def num_tokens(self) -> tuple[int, int]:
    """Number of source and target tokens, EOS included."""
    return self._counts['source'], self._counts['target']

  @property
  def num_uncopyable_tokens(self) -> int:
    """Number of target ids that do not occur in their source, for a shared vocabulary."""
    return self._counts['uncopyable']

  def num_unknown_tokens(self, vocab_sizes: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of source and of target tokens that are out of vocabulary, counted when they were prepared.

    Args:
      vocab_sizes: not used.
    """
    return self._counts['unknown_source'], self._counts['unknown_target']

  def read(self, rows: np.ndarray) -> tuple[EncodedCorpus, np.ndarray]:
    """Returns a split in memory that contains the rows, and their positions in it; those of filler rows are -1."""
    (source, target), positions = self.table.read_flat(rows, 'source', 'target')
    return EncodedCorpus(*source, *target), positions


class PreparedField(Sequence[Any]):
  """The values of one field of a table, which are read when they are used.

  Args:
    table: the table.
    name: the name of the field.
    parse: maps a stored value to an item.
  """

  def __init__(self, table: PreparedTable, name: str, parse: Callable[[Any], Any] = lambda value: value):
    self._table = table
    self._name = name
    self._parse = parse

  def __len__(self) -> int:
    return self._table.rows

  def __iter__(self) -> Iterator[Any]:
    for start in range(0, len(self), READ_ROWS):
      yield from self[start : start + READ_ROWS]

  @overload
  def __getitem__(self, index: int) -> Any: ...

  @overload
  def __getitem__(self, index: slice) -> list[Any]: ...

  def __getitem__(self, index: int | slice) -> Any:
    rows = np.array(range(len(self))[index], np.int64)  # a range raises IndexError as a list does, and takes no memory
    (values,) = self._table.read(np.atleast_1d(rows), self._name)
    items = [*map(self._parse, values)]
    return items if isinstance(index, slice) else items[0]


def read_prepared(folder: str) -> dict[str, Corpus]:
  """Reads a prepared data set of pairs; the rows of its training split stay on disk.

  Args:
    folder: see `open_prepared`.

  Raises:
    UserError: if the folder holds no finished data set, or a damaged one.
  """
  with open_prepared(folder, 'translation') as (path, manifest):
    table = PreparedTable(path, manifest, 'train', PAIRS)
    lines = (PreparedField(table, name) for name in ('source_text', 'target_text'))
    report = tuple(manifest['report'])
    split = PreparedSplit(table)
    train = Corpus(*lines, name=manifest['name'], lines=table.column('line'), report=report, prepared=split)
    return {'train': train} | {name: read_corpus(path / f'{name}.json') for name in manifest['splits']}


@contextlib.contextmanager
def open_prepared(folder: str, system: str) -> Iterator[tuple[epath.Path, dict[str, Any]]]:
  """Yields the path and the manifest of a prepared data set; the block reads it.

  Args:
    folder: its folder, or the URL of its folder, which is copied to the cache: a request for each record is slow.
    system: the name of the system that it was prepared for.

  Raises:
    UserError: if the folder holds no finished data set of this system, or a damaged one.
  """
  path = epath.Path(local_copy(folder) or '.').absolute()
  manifest = read_manifest(path)
  if manifest is None:
    raise UserError(f'{path} holds no prepared data set (no {MANIFEST}); python -m experiments.prepare makes one')
  if manifest.get('system') != system:
    raise UserError(f'{path} was prepared for system {manifest.get("system")!r}, not for {system!r}')
  try:
    yield path, manifest
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


def read_corpus(path: epath.Path) -> Corpus:
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


def _check_size(path: epath.Path, size: int) -> None:
  try:
    stored_size = path.stat().length
  except OSError as error:
    raise UserError(f'{path}: {error.strerror}; prepare the data set again') from error
  if stored_size != size:
    raise UserError(f'{path} has {stored_size} bytes, expected {size}; prepare the data set again')


def index_name(table: str) -> str:
  """Returns the name of the file with the index of a table, or of one of its shards."""
  return f'{table}.index.npy'


def _read_index(path: epath.Path, shape: tuple[int, int]) -> np.ndarray:
  try:
    with path.open('rb') as file:
      index = np.load(file, allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise UserError(f'{path}: cannot be read ({" ".join(str(error).split())}); prepare the data set again') from error
  if index.shape != shape or index.dtype != np.int32:
    got = f'{index.dtype} {list(index.shape)}'
    raise UserError(f'{path} must be int32 {list(shape)}, got {got}; prepare the data set again')
  return index


def _concatenate(rows: Sequence[np.ndarray], dtype: str) -> tuple[np.ndarray, np.ndarray]:
  """Rows, concatenated, and their offsets."""
  offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
  return (np.concatenate(rows) if rows else np.zeros(0, dtype)), offsets
