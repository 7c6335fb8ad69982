"""The Pharaoh format of word alignments: `'0-0 1-2 1?3'` is a line of links source-target, counted from 0.

`1-2` is a sure link, `1?3` a possible one (Och & Ney 2003).
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from attention_jax.errors import UserError

Link = tuple[int, int]  # (source token, target token)

_LINK = re.compile(r'([0-9]{1,9})([-?])([0-9]{1,9})')


class GoldLinks(NamedTuple):
  """Links that an annotator has made in one sentence pair, in the order of the line.

  Attributes:
    sure: the links that an aligner must find, S.
    possible: the links that it may find, P; the sure ones are among them.
  """

  sure: tuple[Link, ...]
  possible: tuple[Link, ...]


def parse_gold(
  line: str, where: str = 'alignment', lengths: tuple[int, int] | None = None, unit: str = 'token'
) -> GoldLinks:
  """Parses `'0-0 1?2'` to sure links ((0, 0),) and possible links ((0, 0), (1, 2)).

  Args:
    line: links separated by white space; an empty line has no links.
    where: names the line in an error, such as 'train.tsv:12'.
    lengths: number of source and of target tokens, which bound the indices of every link; None does not check.
    unit: unit of the indices, for error messages, such as 'word' or 'char'.

  Raises:
    UserError: for anything that is not a pair of numbers of at most 9 digits, and for a link out of range.
  """
  sure = []
  possible = []
  for item in line.split():
    match = _LINK.fullmatch(item)
    if not match:
      raise UserError(
        f'{where}: a link must be source-target (sure) or source?target (possible), counted from 0 '
        f"with at most 9 digits, such as '0-0 1-2 1?3', got '{item}'"
      )
    link = (int(match[1]), int(match[3]))
    if lengths is not None and (link[0] >= lengths[0] or link[1] >= lengths[1]):
      raise UserError(
        f"{where}: link '{item}' is out of range, counted from 0 in {unit}s: "
        f'the source has {lengths[0]}, the target {lengths[1]}'
      )
    possible.append(link)
    if match[2] == '-':
      sure.append(link)
  return GoldLinks(tuple(sure), tuple(possible))


def parse_pharaoh(
  line: str, where: str = 'alignment', lengths: tuple[int, int] | None = None, unit: str = 'token'
) -> tuple[Link, ...]:
  """Parses `'0-0 1-2'` to ((0, 0), (1, 2)), in the order of the line: an alignment, whose links are all sure.

  Args:
    line, where, lengths, unit: as for `parse_gold`.

  Raises:
    UserError: as `parse_gold`, and for a link that is only possible.
  """
  gold = parse_gold(line, where, lengths, unit)
  sure = set(gold.sure)
  if only_possible := [link for link in gold.possible if link not in sure]:
    source, target = only_possible[0]
    raise UserError(f"{where}: expected links such as '0-0', got the possible link '{source}?{target}'")
  return gold.sure


def format_pharaoh(links: Iterable[Link], possible: Iterable[Link] = ()) -> str:
  """Formats ((0, 0), (1, 2)) as `'0-0 1-2'`, sorted by source, each link once.

  Args:
    links: the sure links, or those of an alignment.
    possible: the possible links; those that are sure are written as sure.
  """
  sure = {(int(source), int(target)) for source, target in links}
  all_links = sure | {(int(source), int(target)) for source, target in possible}
  return ' '.join(f'{link[0]}{"-" if link in sure else "?"}{link[1]}' for link in sorted(all_links))
