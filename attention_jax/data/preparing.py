"""Prepares a data set on disk: tokenises a training split once, shard by shard, so that an interruption loses little.

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
from attention_jax.data.encoding import EncodedCorpus, encode
from attention_jax.data.pair_streams import Pair, PairStream, open_pairs
from attention_jax.data.prepared import (
  FORMAT,
  INDEX,
  MANIFEST,
  VOCABULARY_FIELDS,
  Shard,
  corpus_as_json,
  pack_row,
  read_corpus,
  read_manifest,
)
from attention_jax.data.text import Corpus, format_count, format_line_numbers
from attention_jax.data.urls import is_url
from attention_jax.errors import UserError

SHARD_ROWS = 100_000
CHUNK_ROWS = 1_000  # pairs that are encoded at once
REPORT_SECONDS = 10
MAX_STORED_BLANKS = 6  # numbers of blank pairs that are stored for each shard: one more than a report shows
LOCK = '.lock'
REQUEST = 'preparing.json'  # of an unfinished folder: the fields of the config and the files that it is prepared from
WRITER_OPTIONS = 'group_size:1,uncompressed'  # one row for each read; 2.5 times as fast to read as the default
Log = Callable[[str], None]


class _ShardSummary(NamedTuple):
  """A finished shard, the number of pairs read up to its end, and the count and first numbers of its blank pairs."""

  shard: Shard
  pairs_read: int
  num_blank: int
  blank_lines: Sequence[int]


class _NumberedPair(NamedTuple):
  """A pair that is blank on neither side, with its number from 1, and the share of the data read so far."""

  number: int
  pair: Pair
  share: float


def prepare(config: tasks.TranslationDataConfig, folder: str | Path, log: Log = print) -> Path:
  """Prepares the data set of a config, or finishes an interrupted preparation.

  Args:
    config: the group `data` of the config of a translation system.
    folder: the folder to write: new, empty, or that of the same data set. A finished data set is left as it is.
    log: called with each line of progress.

  Returns:
    The absolute path of the folder.

  Raises:
    UserError: for mistakes in the config or the data, for a URL, for a folder with other files or other data, and
      while another process prepares it.
  """
  if is_url(str(folder)):
    raise UserError(f'{folder} is a URL; prepare the data set on a disk, and copy the folder there')
  folder = Path(folder).expanduser().absolute()
  stream, other_splits = open_pairs(config)
  request = _request(config, stream)
  if _is_finished(folder, request, other_splits):
    log(f'{folder} is prepared already')
    return folder
  _check_unfinished(folder, request)
  folder.mkdir(parents=True, exist_ok=True)
  with _lock(folder):
    for path in filter(is_unfinished, folder.iterdir()):  # of a process that was killed
      path.unlink()
    write_text(folder / REQUEST, json.dumps(request, indent=2) + '\n')
    vocabularies = _load_or_train_vocabularies(config, folder, stream, log)
    _write_shards(folder, stream, *vocabularies, log)
    _finish(folder, request, stream, other_splits, log)
  return folder


def _request(config: tasks.TranslationDataConfig, stream: PairStream) -> dict[str, Any]:
  fields = {'format': FORMAT, 'task': config.task, 'name': stream.name, 'files': stream.fingerprint}
  return json.loads(json.dumps(fields | {field: getattr(config, field) for field in VOCABULARY_FIELDS}))


def _is_finished(folder: Path, request: Mapping[str, Any], other_splits: Mapping[str, Corpus]) -> bool:
  """Whether a folder holds the finished data set. Raises UserError if it holds another one."""
  manifest = read_manifest(folder) if folder.is_dir() else None
  if manifest is None:
    return False
  _check_same(folder, {name: manifest.get(name) for name in request}, request)
  for split, corpus in other_splits.items():
    if corpus_as_json(read_corpus(folder / f'{split}.json')) != corpus_as_json(corpus):
      raise UserError(
        f'{folder} holds another data set: its split {split} is not that of {corpus.name} now; choose another folder'
      )
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
  """The lines of some columns of a stream, one column after the other, for training a vocabulary."""

  def __init__(self, stream: PairStream, columns: Sequence[str]):
    self._stream = stream
    self._columns = columns

  def __iter__(self) -> Iterator[str]:
    for column in self._columns:
      for numbered_pair in _without_blanks(self._stream.pairs()):
        yield numbered_pair.pair[('source', 'target').index(column)]

  def __len__(self) -> int:
    return len(self._columns) * sum(1 for _ in _without_blanks(self._stream.pairs()))


def _without_blanks(
  pairs: Iterable[tuple[Pair, float]], on_blank: Callable[[int], None] | None = None
) -> Iterator[_NumberedPair]:
  for number, (pair, share) in enumerate(pairs, 1):
    if pair[0].strip() and pair[1].strip():
      yield _NumberedPair(number, pair, share)
    elif on_blank:
      on_blank(number)


def _load_or_train_vocabularies(
  config: tasks.TranslationDataConfig, folder: Path, stream: PairStream, log: Log
) -> tuple[vocab.Vocabulary, vocab.Vocabulary]:
  for side, columns in tasks.columns_by_side(config).items():
    if vocab.load_stored(config.vocabulary, str(folder), side) is None:
      log(f'making the {side} vocabulary {config.vocabulary}')
      vocab.train(config.vocabulary, _Lines(stream, columns)).save(str(folder), side)
  return tasks.load_vocabularies(config, str(folder))


def _write_shards(
  folder: Path, stream: PairStream, source_vocab: vocab.Vocabulary, target_vocab: vocab.Vocabulary, log: Log
) -> None:
  """Writes the shards that are missing."""
  summaries = _read_summaries(folder)
  pairs_read = summaries[-1].pairs_read if summaries else 0
  rows = sum(summary.shard.rows for summary in summaries)
  if rows:
    log(f'continuing after {rows:,} pairs')
  progress = _PreparationProgress(log, rows)
  blank_lines: list[int] = []
  pairs = _without_blanks(stream.pairs(), blank_lines.append)
  pairs = itertools.dropwhile(lambda numbered_pair: numbered_pair.number <= pairs_read, pairs)
  for number in itertools.count(len(summaries)):
    writer = _ShardWriter(folder, number, source_vocab, target_vocab)
    shard = writer.write(itertools.islice(pairs, SHARD_ROWS), progress)
    new_blanks = [line for line in blank_lines if line > pairs_read]
    blank_lines.clear()
    if shard is None:  # the end of the data
      if summaries and new_blanks:
        _store_summary(folder, number - 1, _add_blanks(summaries[-1], new_blanks))
      return
    pairs_read = writer.last_number
    summaries.append(_add_blanks(_ShardSummary(shard, pairs_read, 0, ()), new_blanks))
    _store_summary(folder, number, summaries[-1])


def _add_blanks(summary: _ShardSummary, lines: Sequence[int]) -> _ShardSummary:
  """Adds blank pairs to a summary. `pairs_read` includes those after its last row, so that resuming skips them."""
  return summary._replace(
    pairs_read=max([summary.pairs_read, *lines]),
    num_blank=summary.num_blank + len(lines),
    blank_lines=[*summary.blank_lines, *lines][:MAX_STORED_BLANKS],
  )


def _store_summary(folder: Path, number: int, summary: _ShardSummary) -> None:
  fields = summary._replace(shard=summary.shard._asdict())._asdict()
  write_text(_summary_path(folder, number), json.dumps(fields))


class _PreparationProgress:
  """Logs at most every REPORT_SECONDS how many pairs are prepared, how fast, and the time left.

  Args:
    log: called with a line.
    rows: number of pairs that an earlier process prepared.
  """

  def __init__(self, log: Log, rows: int):
    self._log = log
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
    self._log(f'{self._rows:,} pairs ({share:.0%}), {rate:,.0f} pairs/s, {left / 60:.1f} min left')


class _ShardWriter:
  """Writes one shard: its rows and their index.

  Attributes:
    last_number: number of the last pair that was written.
  """

  def __init__(self, folder: Path, number: int, source_vocab: vocab.Vocabulary, target_vocab: vocab.Vocabulary):
    self._folder = folder
    self._name = f'train-{number:05d}'
    self._vocabularies = source_vocab, target_vocab
    self._index: list[np.ndarray] = []
    self.last_number = 0
    self._digest = hashlib.blake2b(digest_size=8)
    self._counts = np.zeros(5, np.int64)  # tokens of both sides, unknown ones of both sides, uncopyable ones

  def write(self, pairs: Iterator[_NumberedPair], progress: _PreparationProgress) -> Shard | None:
    """Writes the pairs and returns the shard; None if there are no pairs."""
    from array_record.python.array_record_module import ArrayRecordWriter

    first = next(pairs, None)
    if first is None:
      return None
    pairs = itertools.chain([first], pairs)
    path = self._folder / f'{self._name}.array_record'
    with write_atomic(path) as temporary:
      writer = ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
      while chunk := list(itertools.islice(pairs, CHUNK_ROWS)):
        for record in self._encode(chunk):
          writer.write(record)
          self._digest.update(record)
        progress(chunk[-1].share, len(chunk))
        self.last_number = chunk[-1].number
      writer.close()
    index = np.concatenate(self._index)
    with write_atomic(_index_path(self._folder, self._name)) as temporary, open(temporary, 'wb') as file:
      np.save(file, index)
    counts = self._counts.tolist()
    size = path.stat().st_size
    return Shard(path.name, len(index), size, self._digest.hexdigest(), counts[:2], counts[2:4], counts[4])

  def _encode(self, chunk: Sequence[_NumberedPair]) -> Iterator[bytes]:
    """Yields the records of the pairs, and adds them to the index and the counts."""
    corpus = Corpus(
      [numbered_pair.pair[0] for numbered_pair in chunk], [numbered_pair.pair[1] for numbered_pair in chunk]
    )
    encoded = encode(corpus, *self._vocabularies)
    self._count(encoded)
    numbers = [numbered_pair.number for numbered_pair in chunk]
    self._index.append(np.stack([*encoded.lengths, np.array(numbers)], axis=1).astype(np.int32))
    for row, numbered_pair in enumerate(chunk):
      yield pack_row(*encoded.row(row), *numbered_pair.pair)

  def _count(self, encoded: EncodedCorpus) -> None:
    sizes = tuple(len(vocabulary) for vocabulary in self._vocabularies)
    unknown = encoded.num_unknown_tokens(sizes)
    self._counts += np.array([*encoded.num_tokens, *unknown, encoded.num_uncopyable_tokens])


def _finish(
  folder: Path, request: Mapping[str, Any], stream: PairStream, other_splits: Mapping[str, Corpus], log: Log
) -> None:
  """Writes the index, the other splits and the manifest, and removes the files that only resuming reads."""
  summaries = _read_summaries(folder)
  if not summaries:
    raise UserError(f'{stream.name}: no pairs, all are blank on one side or both')
  names = [summary.shard.name.partition('.')[0] for summary in summaries]
  index = np.concatenate([np.load(_index_path(folder, name), allow_pickle=False) for name in names])
  if stream.lines is not None:
    index[:, 2] = np.asarray(stream.lines)[index[:, 2] - 1]
  with write_atomic(folder / INDEX) as temporary, open(temporary, 'wb') as file:
    np.save(file, index)
  for split, corpus in other_splits.items():
    write_text(folder / f'{split}.json', corpus_as_json(corpus))
  report = [*stream.notes, *_describe_blanks(stream, summaries)]
  shards = [summary.shard._asdict() for summary in summaries]
  manifest = request | {'splits': sorted(other_splits), 'report': report, 'shards': shards}
  write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + '\n')
  for path in (folder / REQUEST, *(_index_path(folder, name) for name in names)):
    path.unlink(missing_ok=True)
  for number in range(len(summaries)):
    _summary_path(folder, number).unlink()
  num_files = format_count(len(summaries), 'file')
  log(f'{folder}: {format_count(len(index), "pair")} in {num_files}, {_size(folder):,} bytes')


def _describe_blanks(stream: PairStream, summaries: Sequence[_ShardSummary]) -> list[str]:
  count = sum(summary.num_blank for summary in summaries)
  lines = list(itertools.chain.from_iterable(summary.blank_lines for summary in summaries))
  pairs = format_count(count, 'pair')
  return [f'{stream.name}: {pairs} with a blank side skipped ({format_line_numbers(lines)})'] if count else []


def _read_summaries(folder: Path) -> list[_ShardSummary]:
  """The summaries of the shards that are complete, up to the first one that is not."""
  summaries = []
  while (path := _summary_path(folder, len(summaries))).exists():
    try:
      summary = _ShardSummary(**json.loads(path.read_text('utf-8')))
      summaries.append(summary._replace(shard=Shard(**summary.shard)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
      reason = ' '.join(str(error).split())
      raise UserError(f'cannot read {path}: {reason}; delete it to prepare its rows again') from error
  return summaries


def _summary_path(folder: Path, number: int) -> Path:
  return folder / f'train-{number:05d}.json'


def _index_path(folder: Path, name: str) -> Path:
  return folder / f'{name}.index.npy'


def _size(folder: Path) -> int:
  return sum(os.path.getsize(path) for path in folder.iterdir())
