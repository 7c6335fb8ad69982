"""Corpora: pairs of lines from parallel files or tables, every row still knowing the line it came from.

Nothing is dropped without a word: what was left out stands, with its line numbers, in `Corpus.report`.
"""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from attention_jax.data.files import read_lines
from attention_jax.errors import UserError, choose

Links = tuple[tuple[int, int], ...]
LINK_LEVELS = {'char': list, 'word': str.split}  # what links may count, and how it is counted
_COLUMNS = 'expected source TAB target, or source TAB target TAB links'
_LINK = re.compile(r'([0-9]{1,9})-([0-9]{1,9})')


class Corpus(NamedTuple):
  """One split, text level.

  Attributes:
    source: one line each.
    target: one line each, as many as in source.
    links: per row the sure gold (source token, target token) pairs, 0-based; None where the data has none.
    level: what links count, a name in LINK_LEVELS.
    name: where the rows come from, for messages (the source file's path).
    lines: the 1-based line number of each row in that file; None: row i is line i + 1.
    report: what reading left out, one human line each.
    possible: per row all pairs that are not wrong, the sure ones among them; None: those in links.
  """

  source: list[str]
  target: list[str]
  links: list[Links] | None = None
  level: str = 'word'
  name: str = ''
  lines: Sequence[int] | None = None
  report: tuple[str, ...] = ()
  possible: list[Links] | None = None

  def line(self, row: int) -> int:
    """The line number of a row in its file."""
    return row + 1 if self.lines is None else self.lines[row]


def read_parallel(source: str, target: str) -> Corpus:
  """Two files, line i of one belonging to line i of the other; pairs with a blank side are left out and reported.

  Raises: UserError for files that cannot be read, that differ in length, or that hold nothing but blank pairs.
  """
  sources, targets = read_lines(source), read_lines(target)
  if len(sources) != len(targets):
    raise UserError(
      f'{source} has {len(sources)} lines but {target} has {len(targets)}; parallel files have one line per pair'
    )
  return from_pairs(sources, targets, name=source, what=f'{source}, {target}')


def parallel_paths(prefix: str, source: str, target: str) -> tuple[str, str]:
  """`a/train`, `en`, `de` -> `a/train.en`, `a/train.de`, or those with `.gz` where only that exists."""
  return _plain_or_gz(f'{prefix}.{source}'), _plain_or_gz(f'{prefix}.{target}')


def _plain_or_gz(path: str) -> str:
  return f'{path}.gz' if os.path.exists(f'{path}.gz') and not os.path.exists(path) else path


def read_tsv(path: str, level: str = 'word') -> Corpus:
  """A table `source TAB target [TAB links]`, links in Pharaoh format (`0-0 1-2`) counting words or characters.

  Rows with a blank side are left out and reported; every other row is kept, also where several share a source.
  Raises: UserError with file and line number for a wrong number of columns, a bad link, or one out of range.
  """
  rows = [line.split('\t') for line in read_lines(path)]
  for number, row in enumerate(rows, 1):
    if len(row) > 3 or (len(row) == 1 and row[0].strip()):
      raise UserError(f'{path}:{number}: {len(row)} column{"s" * (len(row) > 1)}; {_COLUMNS}')
  links = None
  if any(len(row) == 3 for row in rows):
    links = [row[2] if len(row) == 3 else '' for row in rows]
  return from_pairs([row[0] for row in rows], [''.join(row[1:2]) for row in rows], links, level=level, name=path)


def from_pairs(
  source: list[str],
  target: list[str],
  links: list[str] | None = None,
  *,
  level: str = 'word',
  name: str,
  what: str = '',
) -> Corpus:
  """A corpus from lines as they were read, and links in Pharaoh format; `what` names it in the report.

  Raises: UserError for bad links, an unknown level, or when no pair is left.
  """
  choose(level, LINK_LEVELS, 'level of links')
  what = what or name
  keep = [i for i, (s, t) in enumerate(zip(source, target, strict=True)) if s.strip() and t.strip()]
  if not keep:
    raise UserError(f'{what}: no pairs, all {len(source)} are blank on one side or both')
  if len(keep) == len(source):
    corpus = Corpus(source, target, level=level, name=name)
  else:
    kept = set(keep)
    blank = [i + 1 for i in range(len(source)) if i not in kept]
    note = f'{what}: {format_count(len(blank), "blank line")} skipped ({format_line_numbers(blank)})'
    lines = [i + 1 for i in keep]
    corpus = Corpus([source[i] for i in keep], [target[i] for i in keep], None, level, name, lines, (note,))
  if links is None:
    return corpus
  return corpus._replace(links=[_read_links(corpus, row, links[i]) for row, i in enumerate(keep)])


def _read_links(corpus: Corpus, row: int, text: str) -> Links:
  where, split = f'{corpus.name}:{corpus.line(row)}', LINK_LEVELS[corpus.level]
  sizes = len(split(corpus.source[row])), len(split(corpus.target[row]))
  links = []
  for item in text.split():
    match = _LINK.fullmatch(item)
    if not match:
      raise UserError(f"{where}: cannot read link '{item}'; write source-target, counted from 0, such as '0-0 1-2'")
    link = int(match[1]), int(match[2])
    if link[0] >= sizes[0] or link[1] >= sizes[1]:
      raise UserError(
        f"{where}: link '{item}' is out of range, counted from 0 in {corpus.level}s: "
        f'the source has {sizes[0]}, the target {sizes[1]}'
      )
    links.append(link)
  return tuple(links)


def group_references(corpus: Corpus) -> tuple[list[str], list[list[str]], list[int]]:
  """Rows that share a source, together: (sources, all targets of each, row index of the first of each)."""
  groups: dict[str, list[int]] = {}
  for row, source in enumerate(corpus.source):
    groups.setdefault(source, []).append(row)
  references = [[corpus.target[row] for row in rows] for rows in groups.values()]
  return list(groups), references, [rows[0] for rows in groups.values()]


def format_count(number: int, noun: str) -> str:
  """`1 line`, `2 lines`."""
  return f'{number} {noun}{"s" * (number != 1)}'


def format_line_numbers(lines: Sequence[int], shown: int = 5) -> str:
  """`line 3`, `lines 3, 10`, `lines 1, 2, 3, 4, 5, ...`: the first few line numbers."""
  return f'line{"s" * (len(lines) > 1)} {", ".join(map(str, lines[:shown]))}{", ..." * (len(lines) > shown)}'
