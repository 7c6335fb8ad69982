"""Pairs of texts that are read one after the other, for training splits that are larger than memory."""

import contextlib
import gzip
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from attention_jax.data import hugging_face, tasks, translation_sets
from attention_jax.data.files import (
  BYTE_ORDER_MARK,
  check_regular_file,
  invalid_utf8_error,
  join_path,
  report_read_errors,
  strip_line_ends,
)
from attention_jax.data.text import (
  Corpus,
  as_line,
  line_breaks_note,
  normalize_corpus,
  normalize_lines,
  split_columns,
  unequal_lengths_error,
)
from attention_jax.data.urls import is_url, open_url, report_url_errors
from attention_jax.errors import UserError
from attention_jax.specs import bind

Pair = tuple[str, str]


class PairStream(NamedTuple):
  """The training split of a task.

  Attributes:
    name: where the pairs come from, for messages.
    pairs: each call yields (pair, share of the data read so far), starting at the first pair. Pairs with a blank side
      are included, so that pair i is line i; a task that is read into memory may have dropped them, see `lines`.
    fingerprint: path, size and, on a disk, modification time of each file; of other data, the name and the number of
      pairs. It detects that the data changed between two readings.
    notes: lines that describe what is left out; complete when all pairs have been read.
    lines: the line number of each pair; None: pair i is line i, counted from 1.
  """

  name: str
  pairs: Callable[[], Iterator[tuple[Pair, float]]]
  fingerprint: list[Any]
  notes: Sequence[str] = ()
  lines: Sequence[int] | None = None


def open_pairs(config: tasks.TranslationDataConfig) -> tuple[PairStream, dict[str, Corpus]]:
  """Returns the training split of a task as a stream, and its other splits.

  Tasks without a row in STREAMS are read into memory.

  Args:
    config: the group `data` of the config of a translation system.

  Raises:
    UserError: for a mistake in the config or in the files of the other splits, for a training split that cannot be
      opened or, if it is read into memory, has a mistake, and for a data set that is prepared already.
  """
  stream, other_splits = _open_task(config)
  normalization = config.normalization

  def normalized_pairs() -> Iterator[tuple[Pair, float]]:
    for pair, share in stream.pairs():
      yield tuple(normalize_lines(pair, normalization)), share

  corpora = {split: normalize_corpus(corpus, normalization) for split, corpus in other_splits.items()}
  return stream._replace(pairs=normalized_pairs), corpora


def _open_task(config: tasks.TranslationDataConfig) -> tuple[PairStream, dict[str, Corpus]]:
  """The training split and the others as they were read."""
  name, read, options = bind(config.task, tasks.TASKS, 'task')
  folder = os.path.expanduser(config.folder or '')
  if name in STREAMS:
    return STREAMS[name](folder, **options)
  corpora = read(folder, **options)
  train = corpora.pop('train')
  if train.prepared is not None:
    raise UserError(f'{folder or "."} is prepared already; expected a task other than {name!r}')
  return _in_memory(train), corpora


def _text(
  folder: str,
  *,
  train: Any,
  source: str | None = None,
  target: str | None = None,
  links: str | None = None,
  **options: Any,
):
  paths = tasks.text_paths(folder, 'train', train, source, target)

  def pairs() -> Iterator[tuple[Pair, float]]:
    source_lines, target_lines = map(iter_lines, paths)
    counts = [0, 0]
    for source_item, target_item in itertools.zip_longest(source_lines, target_lines):
      counts[0] += source_item is not None
      counts[1] += target_item is not None
      if counts[0] == counts[1]:
        source_line, share = source_item
        target_line, _ = target_item
        yield (source_line, target_line), share
    if counts[0] != counts[1]:
      raise unequal_lengths_error(*paths, *counts)

  notes = _links_note(paths[0]) if tasks.text_links_path(folder, 'train', train, links) else ()
  other_splits = tasks.text(folder, train=None, source=source, target=target, links=links, **options)
  return PairStream(paths[0], pairs, [file_fingerprint(path) for path in paths], notes), other_splits


def _tsv(folder: str, *, train: str, columns: tuple[int, ...] = (), **options: Any):
  path = join_path(folder, train)
  notes = []

  def pairs() -> Iterator[tuple[Pair, float]]:
    for number, (line, share) in enumerate(iter_lines(path), 1):
      row = split_columns(path, number, line, columns)
      if len(row) == 3 and not notes:
        notes.extend(_links_note(path))
      yield (row[0], row[1] if len(row) > 1 else ''), share

  other_splits = tasks.tsv(folder, train=None, columns=columns, **options)
  return PairStream(path, pairs, [file_fingerprint(path)], notes), other_splits


def _tfds(folder: str, *, name: str, source: str | None = None, target: str | None = None):
  rows = translation_sets.TrainingPairs(folder, name, source, target)
  notes = []

  def pairs() -> Iterator[tuple[Pair, float]]:
    texts = ((rows[row], (row + 1) / len(rows)) for row in range(len(rows)))
    return _as_lines(texts, rows.name, notes)

  other_splits = translation_sets.read(folder, name, source, target, without_train=True)
  return PairStream(rows.name, pairs, [rows.name, len(rows)], notes), other_splits


def _huggingface(folder: str, *, path: str, source: str, target: str):
  path = join_path(folder, path)
  splits = hugging_face.split_files(path)
  train = splits.pop('train')
  name = f'{path} train'
  notes = []

  def pairs() -> Iterator[tuple[Pair, float]]:
    return _as_lines(hugging_face.iter_text_pairs(train, source, target), name, notes)

  other_splits = hugging_face.read(path, splits, source, target)
  return PairStream(name, pairs, [file_fingerprint(file) for file in train], notes), other_splits


def _as_lines(texts: Iterable[tuple[Pair, float]], name: str, notes: list[str]) -> Iterator[tuple[Pair, float]]:
  """Yields texts without line breaks; `notes` is complete at the end."""
  num_with_breaks = 0
  for pair, share in texts:
    lines = as_line(pair[0]), as_line(pair[1])
    num_with_breaks += sum(map(operator.ne, lines, pair))
    yield lines, share
  notes[:] = line_breaks_note(name, num_with_breaks)


STREAMS: Mapping[str, Callable[..., tuple[PairStream, dict[str, Corpus]]]] = {
  'text': _text,
  'tsv': _tsv,
  'tfds': _tfds,
  'huggingface': _huggingface,
}


def _in_memory(corpus: Corpus) -> PairStream:
  def pairs() -> Iterator[tuple[Pair, float]]:
    for row, pair in enumerate(zip(corpus.source, corpus.target, strict=True), 1):
      yield pair, row / len(corpus.source)

  notes = corpus.report + (_links_note(corpus.name) if corpus.links else ())
  return PairStream(corpus.name, pairs, [corpus.name, len(corpus.source)], notes, corpus.lines)


def _links_note(name: str) -> tuple[str, ...]:
  return (f'{name}: the links of the training split are not prepared',)


def iter_lines(path: str) -> Iterator[tuple[str, float]]:
  """Yields the lines of a file as `files.read_lines` returns them, with the share of the file read so far.

  Raises:
    UserError: as `files.read_lines` does.
  """
  with _report_errors(path), _open(path) as raw, gzip.GzipFile(fileobj=raw) if path.endswith('.gz') else raw as file:
    size = raw.seek(0, os.SEEK_END)
    raw.seek(0)
    for number, line in enumerate(strip_line_ends(file, path), 1):
      yield _decode(line, path, number), raw.tell() / size


def _report_errors(path: str) -> contextlib.AbstractContextManager[None]:
  return report_url_errors(path) if is_url(path) else report_read_errors(path)


def _open(path: str) -> BinaryIO:
  if is_url(path):
    return open_url(path)
  check_regular_file(path)
  return open(path, 'rb')


def _decode(line: bytes, path: str, number: int) -> str:
  try:
    text = line.decode('utf-8')
  except UnicodeDecodeError as error:
    raise invalid_utf8_error(path, number, error.start + 1, line[error.start]) from None
  return text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text


def file_fingerprint(path: str) -> list[Any]:
  """Returns path, size and, on a disk, modification time of a file. Raises UserError if it cannot be opened."""
  with _report_errors(path), _open(path) as file:
    if is_url(path):
      return [path, file.seek(0, os.SEEK_END)]
    status = os.fstat(file.fileno())
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]
