"""Corpora: pairs of lines from parallel files or tables. Every row keeps the number of the line that it came from.

Nothing is dropped silently: `Corpus.report` describes what was left out.
"""

import functools
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.data.files import read_lines
from attention_jax.data.urls import is_url, url_exists
from attention_jax.data.word_positions import split_words
from attention_jax.errors import UserError, choose
from attention_jax.pharaoh import GoldLinks, parse_gold

Links = tuple[tuple[int, int], ...]
LINK_LEVELS = {'char': list, 'word': split_words}  # the units that links connect, and how to split a line into them
NORMALIZATIONS: Mapping[str, Callable[[str], str] | None] = {
  'none': None,
  'NFC': functools.partial(unicodedata.normalize, 'NFC'),
  'NFKC': functools.partial(unicodedata.normalize, 'NFKC'),
}
_SURROGATE = re.compile('[\ud800-\udfff]')
_COLUMNS = 'expected source TAB target, or source TAB target TAB links'


class Corpus(NamedTuple):
  """One split as text.

  Attributes:
    source: one line per row.
    target: one line per row.
    links: the sure gold (source unit, target unit) pairs of each row, 0-based; None if the data has none.
    level: the unit that links connect, a key of LINK_LEVELS.
    name: where the rows come from, such as the path of the source file, for messages.
    lines: the 1-based number of the line that each row comes from; None: row i is line i + 1.
    report: lines that describe what reading left out or changed.
    possible: the possible links of each row, the sure ones among them; None: those in `links`.
    prepared: the ids of the rows, if they are on disk: a prepared.PreparedSplit. None if the rows are in memory.
    normalization: the Unicode normal form of the lines, a key of NORMALIZATIONS; metrics normalise hypotheses likewise.
  """

  source: Sequence[str]
  target: Sequence[str]
  links: list[Links] | None = None
  level: str = 'word'
  name: str = ''
  lines: Sequence[int] | None = None
  report: tuple[str, ...] = ()
  possible: list[Links] | None = None
  prepared: Any = None
  normalization: str = 'none'

  def line(self, row: int) -> int:
    """Returns the line number of a row in its file."""
    return row + 1 if self.lines is None else self.lines[row]


def read_parallel(source: str, target: str, links: str | None = None, level: str = 'word') -> Corpus:
  """Reads parallel files: line i of each file belongs to pair i.

  Pairs with a blank side are left out and reported.

  Args:
    source: path of the source file.
    target: path of the target file.
    links: path of a file of gold links in Pharaoh format, or None.
    level: the unit that links connect, a key of LINK_LEVELS.

  Raises:
    UserError: for files that cannot be read, that differ in their number of lines, or in which every pair has a blank
      side; for links that are malformed or out of range; for an unknown level.
  """
  sources = read_lines(source)
  columns = {path: read_lines(path) for path in (target, links) if path is not None}
  for path, lines in columns.items():
    if len(lines) != len(sources):
      raise unequal_lengths_error(source, path, len(sources), len(lines))
  gold = None if links is None else columns[links]
  report_name = f'{source}, {target}'
  return from_pairs(
    sources, columns[target], gold, level=level, name=source, report_name=report_name, links_name=links or ''
  )


def unequal_lengths_error(source: str, target: str, source_lines: int, target_lines: int) -> UserError:
  """Returns the error for parallel files that differ in their number of lines.

  Args:
    source: path of the source file.
    target: path of the other file.
    source_lines: number of lines of the source file.
    target_lines: number of lines of the other file.
  """
  return UserError(
    f'{source} has {format_count(source_lines, "line")} but {target} has {target_lines}; parallel files have one line '
    'per pair'
  )


def parallel_paths(prefix: str, source: str, target: str) -> tuple[str, str]:
  """Returns the paths of parallel files: `a/train`, `en`, `de` -> `a/train.en`, `a/train.de`.

  A path ends in `.gz` if only the compressed file exists.

  Args:
    prefix: the part of both paths before the dot and the suffix, on a disk or behind a URL.
    source: suffix of the source file.
    target: suffix of the target file.
  """
  return _plain_or_gz(f'{prefix}.{source}'), _plain_or_gz(f'{prefix}.{target}')


def existing_path(prefix: str, suffix: str | None) -> str | None:
  """Returns the path of an optional file: `a/train.links` for `a/train` and `links`.

  It ends in `.gz` if only the compressed file exists. The result is None if neither exists, or if the suffix is None.

  Args:
    prefix: the part of the path before the dot and the suffix, on a disk or behind a URL.
    suffix: suffix of the file, or None.
  """
  if suffix is None:
    return None
  path = _plain_or_gz(f'{prefix}.{suffix}')
  return path if _exists(path) else None


def _plain_or_gz(path: str) -> str:
  return f'{path}.gz' if _exists(f'{path}.gz') and not _exists(path) else path


def _exists(path: str) -> bool:
  return url_exists(path) if is_url(path) else os.path.exists(path)


def read_tsv(path: str, level: str = 'word', columns: Sequence[int] = ()) -> Corpus:
  """Reads a table `source TAB target [TAB links]`, with links in Pharaoh format (`0-0 1-2 1?3`, sure and possible).

  Rows with a blank side are left out and reported; every other row is kept, even if several share a source.

  Args:
    path: the table, plain or .gz.
    level: the unit that links connect, a key of LINK_LEVELS.
    columns: see `split_columns`.

  Raises:
    UserError: for a file that cannot be read, or in which every pair has a blank side; with the line number, for a
      wrong number of columns and for a link that is malformed or out of range; for an unknown level, and for `columns`
      that are not two or three numbers from 1.
  """
  rows = [split_columns(path, number, line, columns) for number, line in enumerate(read_lines(path), 1)]
  sources = [row[0] for row in rows]
  targets = [row[1] if len(row) > 1 else '' for row in rows]
  links = None
  if any(len(row) == 3 for row in rows):
    links = [row[2] if len(row) == 3 else '' for row in rows]
  return from_pairs(sources, targets, links, level=level, name=path)


def split_columns(path: str, number: int, line: str, columns: Sequence[int] = ()) -> list[str]:
  """Returns source, target and, if the table has them, links of a line; a blank line has one column.

  Args:
    path: the table, for the error.
    number: number of the line, from 1, for the error.
    line: the line.
    columns: numbers of the columns of source, target and, optionally, links, from 1; () for the first two or three,
      which then are all.

  Raises:
    UserError: if the line has too many columns, or too few and is not blank; for `columns` that are not two or three
      numbers from 1.
  """
  row = line.split('\t')
  if columns:
    if len(columns) not in (2, 3) or min(columns) < 1:
      raise UserError(f'{path}: columns must be two or three numbers from 1, got {tuple(columns)}')
    if len(row) < max(columns) and line.strip():
      raise UserError(f'{path}:{number}: {format_count(len(row), "column")}; expected column {max(columns)}')
    return [row[column - 1] for column in columns] if line.strip() else ['']
  if len(row) > 3 or (len(row) == 1 and row[0].strip()):
    raise UserError(f'{path}:{number}: {format_count(len(row), "column")}; {_COLUMNS}')
  return row


def from_pairs(
  source: list[str],
  target: list[str],
  links: list[str] | None = None,
  *,
  level: str = 'word',
  name: str,
  report_name: str = '',
  links_name: str = '',
) -> Corpus:
  """Returns a corpus of all pairs that are blank on neither side.

  Args:
    source: lines as they were read.
    target: lines as they were read.
    links: the links of each line in Pharaoh format; None if the data has none.
    level: the unit that links connect, a key of LINK_LEVELS.
    name: name of the data, such as the path of the file of the lines.
    report_name: name of the data in the report and in the error of a corpus without pairs; by default `name`.
    links_name: path of the file of the links, for their errors; by default `name`.

  Raises:
    UserError: for links that are malformed or out of range, for an unknown level, and if no pair is left.
  """
  choose(level, LINK_LEVELS, 'level of links')
  report_name = report_name or name
  rows = [i for i, (s, t) in enumerate(zip(source, target, strict=True)) if s.strip() and t.strip()]
  if not rows:
    raise UserError(f'{report_name}: no pairs, all {len(source)} are blank on one side or both')
  if len(rows) == len(source):
    corpus = Corpus(source, target, level=level, name=name)
  else:
    blank_lines = [i + 1 for i in sorted(set(range(len(source))) - set(rows))]
    count = format_count(len(blank_lines), 'pair')
    note = f'{report_name}: {count} with a blank side skipped ({format_line_numbers(blank_lines)})'
    corpus = Corpus(
      [source[i] for i in rows],
      [target[i] for i in rows],
      level=level,
      name=name,
      lines=[i + 1 for i in rows],
      report=(note,),
    )
  if links is None:
    return corpus
  gold = [_read_links(corpus, row, links[i], f'{links_name or name}:{i + 1}') for row, i in enumerate(rows)]
  has_possible = any(len(row.possible) > len(row.sure) for row in gold)
  possible = [row.possible for row in gold] if has_possible else None
  return corpus._replace(links=[row.sure for row in gold], possible=possible)


def from_texts(texts: Iterable[tuple[str, str]], name: str) -> Corpus:
  """Returns a corpus of pairs of texts, such as those of a data set, in which line breaks are read as spaces.

  Args:
    texts: the source and the target of each row.
    name: name of the data, for messages.

  Raises:
    UserError: as `from_pairs` does.
  """
  num_with_breaks = 0
  columns: tuple[list[str], list[str]] = ([], [])
  for pair in texts:
    for text, column in zip(pair, columns, strict=True):
      line = as_line(text)
      num_with_breaks += line != text
      column.append(line)
  corpus = from_pairs(*columns, name=name)
  return corpus._replace(report=(*corpus.report, *line_breaks_note(name, num_with_breaks)))


def as_line(text: str) -> str:
  """Returns a text without line breaks, as a corpus has one line per text."""
  return text.replace('\r', ' ').replace('\n', ' ')


def line_breaks_note(name: str, count: int) -> tuple[str, ...]:
  """Returns the report of texts whose line breaks were read as spaces; nothing if there are none."""
  return (f'{name}: line breaks inside {format_count(count, "text")} read as spaces',) if count else ()


def check_text(text: Any, field: str, where: str) -> str:
  """Returns a text if it is a string that can be encoded.

  Args:
    text: the value to check.
    field: its name in the data, for the error.
    where: the file and line, or the example, for the error.

  Raises:
    UserError: for anything else.
  """
  if not isinstance(text, str):
    raise UserError(f'{where}: {field} must be a string, got {text!r}')
  if _SURROGATE.search(text):
    raise UserError(f'{where}: {field} contains an unpaired surrogate, which is not a character; escape both halves')
  return text


def _read_links(corpus: Corpus, row: int, text: str, where: str) -> GoldLinks:
  """Parses the links of a row, and checks that they lie within the lengths of its source and target."""
  split = LINK_LEVELS[corpus.level]
  lengths = len(split(corpus.source[row])), len(split(corpus.target[row]))
  return parse_gold(text, where, lengths, corpus.level)


def normalize_lines(lines: Iterable[str], normalization: str) -> list[str]:
  """Returns lines in a Unicode normal form, a key of NORMALIZATIONS."""
  normalize = NORMALIZATIONS[normalization]
  return [normalize(line) for line in lines] if normalize else list(lines)


def normalize_corpus(corpus: Corpus, normalization: str) -> Corpus:
  """Returns a corpus with both sides in a Unicode normal form; one that was prepared has been normalised already.

  Args:
    corpus: the rows.
    normalization: a key of NORMALIZATIONS.

  Raises:
    UserError: for a line of a corpus with links whose number of words, or characters, would change.
  """
  if NORMALIZATIONS[normalization] is None or corpus.prepared is not None:
    return corpus
  columns = {side: normalize_lines(getattr(corpus, side), normalization) for side in ('source', 'target')}
  if corpus.links is not None:
    split = LINK_LEVELS[corpus.level]
    for side, lines in columns.items():
      for row, (before, after) in enumerate(zip(getattr(corpus, side), lines, strict=True)):
        if before != after and len(split(before)) != len(split(after)):
          raise UserError(
            f'{corpus.name}:{corpus.line(row)}: {normalization} changes the number of {corpus.level}s of the {side}, '
            'in which links are counted; expected links of normalised text, or another config.data.normalization'
          )
  return corpus._replace(**columns, normalization=normalization)


def describe_repetitions(corpora: Mapping[str, Corpus]) -> list[str]:
  """Describes pairs that a split in memory has twice, and pairs of other splits that are also in training.

  Args:
    corpora: the splits by name, 'train' among them.

  Returns:
    One line for each finding.
  """
  in_memory = {split: corpus for split, corpus in corpora.items() if corpus.prepared is None}
  pairs = {  # hashes take an eighth of the memory of the pairs
    split: np.fromiter(map(hash, zip(corpus.source, corpus.target, strict=True)), np.int64)
    for split, corpus in in_memory.items()
  }
  report = []
  for split, hashes in pairs.items():
    total = format_count(len(hashes), 'pair')
    if repeated := len(hashes) - len(np.unique(hashes)):
      report.append(f'{split}: {repeated} of {total} repeat an earlier pair of the split')
    if split != 'train' and 'train' in pairs and (seen := np.count_nonzero(np.isin(hashes, pairs['train']))):
      report.append(f'{split}: {seen} of {total} are also in train')
  return report


def group_references(corpus: Corpus) -> tuple[list[str], list[list[str]], list[int]]:
  """Groups rows that share a source.

  Returns:
    The distinct sources, all targets of each, and the index of the first row of each.
  """
  groups: dict[str, list[int]] = {}
  for row, source in enumerate(corpus.source):
    groups.setdefault(source, []).append(row)
  references = [[corpus.target[row] for row in rows] for rows in groups.values()]
  return list(groups), references, [rows[0] for rows in groups.values()]


def format_count(number: int, noun: str) -> str:
  """Returns a number with its noun: `1 line`, `2 lines`."""
  return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def format_line_numbers(lines: Sequence[int], shown: int = 5) -> str:
  """Returns the first line numbers as text: `line 3`, `lines 3, 10`, `lines 1, 2, 3, 4, 5, ...`."""
  noun = 'lines' if len(lines) > 1 else 'line'
  numbers = [str(line) for line in lines[:shown]]
  if len(lines) > shown:
    numbers.append('...')
  return f'{noun} {", ".join(numbers)}'
