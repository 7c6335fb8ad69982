"""The Pharaoh format of word alignments: `'0-0 1-2'` is a line of links source-target, counted from 0."""

import re
from collections.abc import Iterable

from attention_jax.errors import UserError

Link = tuple[int, int]  # (source token, target token)

_LINK = re.compile(r'([0-9]{1,9})-([0-9]{1,9})')


def parse_pharaoh(
  line: str, where: str = 'alignment', lengths: tuple[int, int] | None = None, unit: str = 'token'
) -> tuple[Link, ...]:
  """Parses `'0-0 1-2'` to ((0, 0), (1, 2)), in the order of the line.

  Args:
    line: links separated by white space; an empty line has no links.
    where: names the line in an error, such as 'train.tsv:12'.
    lengths: number of source and of target tokens, which every link must be within; None does not check.
    unit: what the links count, for error messages, such as 'word' or 'char'.

  Raises:
    UserError: for anything that is not a pair of numbers, and for a link out of range.
  """
  links = []
  for item in line.split():
    match = _LINK.fullmatch(item)
    if not match:
      raise UserError(f"{where}: a link must be source-target, counted from 0, such as '0-0 1-2', got '{item}'")
    source = int(match[1])
    target = int(match[2])
    if lengths is not None and (source >= lengths[0] or target >= lengths[1]):
      raise UserError(
        f"{where}: link '{item}' is out of range, counted from 0 in {unit}s: "
        f'the source has {lengths[0]}, the target {lengths[1]}'
      )
    links.append((source, target))
  return tuple(links)


def format_pharaoh(links: Iterable[Link]) -> str:
  """Formats ((0, 0), (1, 2)) as `'0-0 1-2'`, sorted by source, each link once."""
  unique = {(int(source), int(target)) for source, target in links}
  return ' '.join(f'{source}-{target}' for source, target in sorted(unique))
