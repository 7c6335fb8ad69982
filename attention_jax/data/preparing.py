"""Prepares a data set on disk: tokenises its tables once, shard by shard, so that an interruption loses little.

Each shard is renamed into place when it is complete, and its summary (`train-00003.json`) is written after it. The
manifest is written last. The data set is a function of the config and the files, whatever the number of interruptions.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np

from attention_jax.atomic import is_unfinished, write_atomic, write_text
from attention_jax.data import tasks, vocab
from attention_jax.data.encoding import encode
from attention_jax.data.pair_streams import Pair, open_pairs
from attention_jax.data.prepared import FORMAT, MANIFEST, Shard, corpus_as_json, index_name, pack, read_manifest
from attention_jax.data.text import Corpus, format_count, format_line_numbers
from attention_jax.data.urls import is_url
from attention_jax.errors import UserError

SHARD_ROWS = 100_000
CHUNK_ROWS = 1_000  # examples that are encoded at once
REPORT_SECONDS = 10
MAX_STORED_BLANKS = 6  # numbers of blank examples that are stored for each shard: one more than a report shows
LOCK = '.lock'
REQUEST = 'preparing.json'  # of an unfinished folder: the fields of the config and the files that it is prepared from
WRITER_OPTIONS = 'group_size:1,uncompressed'  # one row for each read; 2.5 times as fast to read as the default
Log = Callable[[str], None]


class NumberedExample(NamedTuple):
  """An example, with its number from 1 and the share of the data read so far."""

  number: int
  example: Any
  share: float


class EncodedRows(NamedTuple):
  """Encoded examples.

  Attributes:
    values: the values of the fields of each row; a generator may make them one at a time.
    columns: the columns of the index but the last one, [rows] each.
    counts: what the table counts, see prepared.Shard.
  """

  values: Iterable[Sequence[np.ndarray | str]]
  columns: Sequence[np.ndarray] = ()
  counts: Sequence[int] = ()


class RecordTable(NamedTuple):
  """A table to write.

  Attributes:
    name: its name.
    unit: what a row is, for messages.
    examples: each call yields (example, share of the data read so far), starting at the first one; None for a blank
      example, which is skipped and reported.
    encode: encodes examples, CHUNK_ROWS at once.
    lines_of: maps the numbers of examples, counted from 1, to line numbers.
  """

  name: str
  unit: str
  examples: Callable[[], Iterator[tuple[Any, float]]]
  encode: Callable[[Sequence[NumberedExample]], EncodedRows]
  lines_of: Callable[[np.ndarray], np.ndarray] = np.asarray


class Preparation(NamedTuple):
  """A data set to write.

  Attributes:
    request: fields of the manifest that identify the data set, `system` and `name` among them: a folder with others is
      not continued.
    splits: the splits that are stored as JSON, by name.
    open_tables: stores vocabularies in the folder, unless it has them, and returns the tables. Called with the folder
      and a log.
    notes: lines that describe what is left out; complete when all tables have been written.
  """

  request: Mapping[str, Any]
  splits: Mapping[str, str]
  open_tables: Callable[[Path, Log], Sequence[RecordTable]]
  notes: Sequence[str] = ()


class _ShardSummary(NamedTuple):
  """A finished shard, the number of examples read up to its end, and the count and first numbers of its blank ones."""

  shard: Shard
  examples_read: int
  num_blank: int
  blank_lines: Sequence[int]


def write_prepared(preparation: Preparation, folder: str | Path, log: Log = print) -> Path:
  """Writes a data set, or finishes an interrupted preparation.

  Args:
    preparation: the data set.
    folder: the folder to write: new, empty, or that of the same data set. A finished data set is left as it is.
    log: called with each line of progress.

  Returns:
    The absolute path of the folder.

  Raises:
    UserError: for mistakes in the data, for a URL, for a folder with other files or other data, and while another
      process prepares it.
  """
  if is_url(str(folder)):
    raise UserError(f'{folder} is a URL; prepare the data set on a disk, and copy the folder there')
  folder = Path(folder).expanduser().absolute()
  request = json.loads(json.dumps({'format': FORMAT, **preparation.request}))
  if _is_finished(folder, request, preparation.splits):
    log(f'{folder} is prepared already')
    return folder
  _check_unfinished(folder, request)
  folder.mkdir(parents=True, exist_ok=True)
  with _lock(folder):
    for path in filter(is_unfinished, folder.iterdir()):  # of a process that was killed
      path.unlink()
    write_text(folder / REQUEST, json.dumps(request, indent=2) + '\n')
    tables = preparation.open_tables(folder, log)
    for table in tables:
      _write_shards(folder, table, log)
    _finish(folder, request, preparation, tables, log)
  return folder


def prepare(config: tasks.TranslationDataConfig, folder: str | Path, log: Log = print) -> Path:
  """Prepares the pairs of a config. Arguments: see `prepare_pairs` and `write_prepared`."""
  return write_prepared(prepare_pairs(config), folder, log)


def prepare_pairs(config: tasks.TranslationDataConfig) -> Preparation:
  """Returns the pairs of the group `data` of the config of a translation system as a data set to write.

  Raises:
    UserError: for mistakes in the config or the data.
  """
  stream, other_splits = open_pairs(config)
  request = {'system': 'translation', 'task': config.task, 'name': stream.name, 'files': stream.fingerprint}

  def examples() -> Iterator[tuple[Pair | None, float]]:
    for pair, share in stream.pairs():
      yield pair if pair[0].strip() and pair[1].strip() else None, share

  def open_tables(folder: Path, log: Log) -> list[RecordTable]:
    for side, columns in tasks.columns_by_side(config).items():
      store_vocabulary(config.vocabulary, side, _Lines(examples, columns), folder, log)
    vocabularies = tasks.load_vocabularies(config, str(folder))
    sizes = tuple(map(len, vocabularies))

    def encode_pairs(chunk: Sequence[NumberedExample]) -> EncodedRows:
      pairs = [numbered.example for numbered in chunk]
      encoded = encode(Corpus(*map(list, zip(*pairs, strict=True))), *vocabularies)
      counts = [*encoded.num_tokens, *encoded.num_unknown_tokens(sizes), encoded.num_uncopyable_tokens]
      values = ((*encoded.row(row), *pair) for row, pair in enumerate(pairs))
      return EncodedRows(values, encoded.lengths, counts)

    lines_of = np.asarray if stream.lines is None else lambda numbers: np.asarray(stream.lines)[numbers - 1]
    return [RecordTable('train', 'pair', examples, encode_pairs, lines_of)]

  splits = {split: corpus_as_json(corpus) for split, corpus in other_splits.items()}
  return Preparation(request | tasks.vocabulary_settings(config), splits, open_tables, stream.notes)


def store_vocabulary(spec: str, side: str, lines: Iterable[str], folder: Path, log: Log) -> None:
  """Trains the vocabulary of a side and stores it in a folder, unless the folder has it.

  Args:
    spec: a spec of vocab.VOCABULARIES.
    side: 'source', 'target' or 'shared'.
    lines: the lines of the training split.
    folder: the folder of the prepared data set.
    log: called with a line if the vocabulary is trained.
  """
  if vocab.load_stored(spec, str(folder), side) is None:
    log(f'making the {side} vocabulary {spec}')
    vocab.train(spec, lines).save(str(folder), side)


def _is_finished(folder: Path, request: Mapping[str, Any], splits: Mapping[str, str]) -> bool:
  """Whether a folder holds the finished data set. Raises UserError if it holds another one."""
  manifest = read_manifest(folder) if folder.is_dir() else None
  if manifest is None:
    return False
  _check_same(folder, {name: manifest.get(name) for name in request}, request)
  for split, content in splits.items():
    path = folder / f'{split}.json'
    if not path.exists() or path.read_text('utf-8') != content:
      raise UserError(f'{folder} holds another data set: its split {split} has changed; choose another folder')
  return True


def _check_unfinished(folder: Path, request: Mapping[str, Any]) -> None:
  """Raises UserError unless a folder is new, empty, or that of an interrupted preparation of the same data set."""
  try:
    names = [path.name for path in folder.iterdir() if path.name != LOCK and not is_unfinished(path)]
    if REQUEST in names:
      _check_same(folder, dict(json.loads((folder / REQUEST).read_text('utf-8'))), request)
    elif names:
      raise UserError(f'{folder} holds other files ({", ".join(sorted(names)[:3])}); choose an empty or new folder')
  except FileNotFoundError:
    return
  except UserError:
    raise
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise UserError(f'cannot use {folder}: {getattr(error, "strerror", None) or error}') from error


def _check_same(folder: Path, stored: Mapping[str, Any], request: Mapping[str, Any]) -> None:
  different = [name for name in request if stored.get(name) != request[name]]
  if different:
    name = different[0]
    raise UserError(
      f'{folder} holds another data set: {name} is {stored.get(name)!r} there, {request[name]!r} now; '
      'choose another folder'
    )


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
  lock = filelock.FileLock(folder / LOCK, timeout=0)
  try:
    lock.acquire()
  except filelock.Timeout as error:
    raise UserError(f'another process is preparing {folder}') from error
  try:
    yield
  finally:
    lock.release()


class _Lines:
  """The lines of some columns of pairs, one column after the other, for training a vocabulary."""

  def __init__(self, examples: Callable[[], Iterator[tuple[Pair | None, float]]], columns: Sequence[str]):
    self._examples = examples
    self._columns = columns

  def __iter__(self) -> Iterator[str]:
    for column in self._columns:
      for pair, _ in self._examples():
        if pair is not None:
          yield pair[('source', 'target').index(column)]

  def __len__(self) -> int:
    return len(self._columns) * sum(pair is not None for pair, _ in self._examples())


def _without_blanks(
  examples: Iterable[tuple[Any, float]], on_blank: Callable[[int], None]
) -> Iterator[NumberedExample]:
  for number, (example, share) in enumerate(examples, 1):
    if example is None:
      on_blank(number)
    else:
      yield NumberedExample(number, example, share)


def _write_shards(folder: Path, table: RecordTable, log: Log) -> None:
  """Writes the shards of a table that are missing."""
  summaries = _read_summaries(folder, table.name)
  examples_read = summaries[-1].examples_read if summaries else 0
  rows = sum(summary.shard.rows for summary in summaries)
  if rows:
    log(f'continuing after {rows:,} {table.unit}s')
  progress = _PreparationProgress(log, table.unit, rows)
  blank_lines: list[int] = []
  examples = _without_blanks(table.examples(), blank_lines.append)
  examples = itertools.dropwhile(lambda numbered: numbered.number <= examples_read, examples)
  for number in itertools.count(len(summaries)):
    writer = _ShardWriter(folder, table, number)
    shard = writer.write(itertools.islice(examples, SHARD_ROWS), progress)
    new_blanks = [line for line in blank_lines if line > examples_read]
    blank_lines.clear()
    if shard is None:  # the end of the data
      if summaries and new_blanks:
        _store_summary(folder, table.name, number - 1, _add_blanks(summaries[-1], new_blanks))
      return
    examples_read = writer.last_number
    summaries.append(_add_blanks(_ShardSummary(shard, examples_read, 0, ()), new_blanks))
    _store_summary(folder, table.name, number, summaries[-1])


def _add_blanks(summary: _ShardSummary, lines: Sequence[int]) -> _ShardSummary:
  """Adds blank examples to a summary. `examples_read` includes those after its last row: resuming skips them."""
  return summary._replace(
    examples_read=max([summary.examples_read, *lines]),
    num_blank=summary.num_blank + len(lines),
    blank_lines=[*summary.blank_lines, *lines][:MAX_STORED_BLANKS],
  )


def _store_summary(folder: Path, table: str, number: int, summary: _ShardSummary) -> None:
  fields = summary._replace(shard=summary.shard._asdict())._asdict()
  write_text(_summary_path(folder, table, number), json.dumps(fields))


class _PreparationProgress:
  """Logs at most every REPORT_SECONDS how many rows are prepared, how fast, and the time left.

  Args:
    log: called with a line.
    unit: what a row is.
    rows: number of rows that an earlier process prepared.
  """

  def __init__(self, log: Log, unit: str, rows: int):
    self._log = log
    self._unit = unit
    self._rows = rows
    self._start: tuple[float, float, int] | None = None  # time, share and rows at the first call
    self._last = 0.0

  def __call__(self, share: float, new_rows: int) -> None:
    now = time.monotonic()
    self._rows += new_rows
    if self._start is None:
      self._start = now, share, self._rows
      self._last = now
    start, first_share, first_rows = self._start
    if now - self._last < REPORT_SECONDS or share <= first_share:
      return
    self._last = now
    rate = (self._rows - first_rows) / (now - start)
    left = (1 - share) * (now - start) / (share - first_share)
    self._log(f'{self._rows:,} {self._unit}s ({share:.0%}), {rate:,.0f} {self._unit}s/s, {left / 60:.1f} min left')


class _ShardWriter:
  """Writes one shard: its rows and their index.

  Attributes:
    last_number: number of the last example that was written.
  """

  def __init__(self, folder: Path, table: RecordTable, number: int):
    self._folder = folder
    self._table = table
    self._name = _shard_name(table.name, number)
    self.last_number = 0

  def write(self, examples: Iterator[NumberedExample], progress: _PreparationProgress) -> Shard | None:
    """Writes the examples and returns the shard; None if there are none."""
    from array_record.python.array_record_module import ArrayRecordWriter

    first = next(examples, None)
    if first is None:
      return None
    examples = itertools.chain([first], examples)
    path = self._folder / f'{self._name}.array_record'
    digest = hashlib.blake2b(digest_size=8)
    index = []
    counts = []
    with write_atomic(path) as temporary:
      writer = ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
      while chunk := list(itertools.islice(examples, CHUNK_ROWS)):
        encoded = self._table.encode(chunk)
        for record in map(pack, encoded.values):
          writer.write(record)
          digest.update(record)
        numbers = np.array([numbered.number for numbered in chunk])
        index.append(np.stack([*encoded.columns, numbers], axis=1).astype(np.int32))
        counts.append(encoded.counts)
        progress(chunk[-1].share, len(chunk))
        self.last_number = chunk[-1].number
      writer.close()
    rows = _store_index(self._folder, self._name, index)
    return Shard(path.name, rows, path.stat().st_size, digest.hexdigest(), np.sum(counts, axis=0, dtype=int).tolist())


def _store_index(folder: Path, name: str, parts: Sequence[np.ndarray]) -> int:
  """Stores the index of a table, or of one of its shards, and returns its number of rows."""
  index = np.concatenate(parts)
  with write_atomic(folder / index_name(name)) as temporary, open(temporary, 'wb') as file:
    np.save(file, index)
  return len(index)


def _finish(
  folder: Path, request: Mapping[str, Any], preparation: Preparation, tables: Sequence[RecordTable], log: Log
) -> None:
  """Writes the indices, the other splits and the manifest, and removes the files that only resuming reads."""
  report = [*preparation.notes]
  shards = {}
  for table in tables:
    summaries = _read_summaries(folder, table.name)
    if not summaries:
      raise UserError(f'{request["name"]}: no {table.unit}s, all are blank on one side or both')
    index = np.concatenate([np.load(folder / index_name(name), allow_pickle=False) for name in _names(summaries)])
    index[:, -1] = table.lines_of(index[:, -1])
    _store_index(folder, table.name, [index])
    shards[table.name] = [summary.shard._asdict() for summary in summaries]
    report += _describe_blanks(request['name'], table.unit, summaries)
  for split, content in preparation.splits.items():
    write_text(folder / f'{split}.json', content)
  manifest = request | {'splits': sorted(preparation.splits), 'report': report, 'tables': shards}
  write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + '\n')
  (folder / REQUEST).unlink()
  for table in tables:
    names = _names(_read_summaries(folder, table.name))
    for number, name in enumerate(names):
      (folder / index_name(name)).unlink(missing_ok=True)
      _summary_path(folder, table.name, number).unlink()
    rows = sum(shard['rows'] for shard in shards[table.name])
    log(f'{folder}: {format_count(rows, table.unit)} in {format_count(len(names), "file")}')
  log(f'{folder}: {_size(folder):,} bytes')


def _names(summaries: Sequence[_ShardSummary]) -> list[str]:
  return [summary.shard.name.partition('.')[0] for summary in summaries]


def _describe_blanks(name: str, unit: str, summaries: Sequence[_ShardSummary]) -> list[str]:
  count = sum(summary.num_blank for summary in summaries)
  lines = list(itertools.chain.from_iterable(summary.blank_lines for summary in summaries))
  blanks = format_count(count, unit)
  return [f'{name}: {blanks} with a blank side skipped ({format_line_numbers(lines)})'] if count else []


def _read_summaries(folder: Path, table: str) -> list[_ShardSummary]:
  """The summaries of the shards that are complete, up to the first one that is not."""
  summaries = []
  while (path := _summary_path(folder, table, len(summaries))).exists():
    try:
      summary = _ShardSummary(**json.loads(path.read_text('utf-8')))
      summaries.append(summary._replace(shard=Shard(**summary.shard)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
      reason = ' '.join(str(error).split())
      raise UserError(f'cannot read {path}: {reason}; delete it to prepare its rows again') from error
  return summaries


def _shard_name(table: str, number: int) -> str:
  return f'{table}-{number:05d}'


def _summary_path(folder: Path, table: str, number: int) -> Path:
  return folder / f'{_shard_name(table, number)}.json'


def _size(folder: Path) -> int:
  return sum(os.path.getsize(path) for path in folder.iterdir())
