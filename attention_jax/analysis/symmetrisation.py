"""Symmetrisation: one alignment from those of both directions of translation. Och & Ney 2003; Koehn et al. 2003, 2005.

Both alignments consist of (source, target) pairs: those of the reverse model must be swapped beforehand.
"""

import functools
import heapq
from collections.abc import Callable, Iterable, Mapping

from attention_jax.errors import choose
from attention_jax.pharaoh import Link

Symmetrisation = Callable[[set[Link], set[Link]], set[Link]]

_ADJACENT = ((-1, 0), (0, -1), (1, 0), (0, 1))
_DIAGONAL = ((-1, -1), (-1, 1), (1, -1), (1, 1))


def symmetrise(forward: Iterable[Link], reverse: Iterable[Link], method: str = 'grow_diag_final_and') -> list[Link]:
  """Joins the alignments of one sentence pair in both directions.

  Args:
    forward: (source, target) pairs of the model from source to target.
    reverse: (source, target) pairs of the model from target to source.
    method: a key of SYMMETRISATIONS.

  Returns:
    (source, target) pairs, sorted.

  Raises:
    UserError: for an unknown method.
  """
  join = SYMMETRISATIONS[choose(method, SYMMETRISATIONS, 'symmetrisation')]
  return sorted(join(_unique(forward), _unique(reverse)))


def _unique(links: Iterable[Link]) -> set[Link]:
  return {(int(source), int(target)) for source, target in links}


def _grow(
  forward: set[Link],
  reverse: set[Link],
  neighbours: tuple[Link, ...],
  final: Callable[[bool, bool], bool] | None = None,
) -> set[Link]:
  """Grows the intersection of both alignments.

  Adds links of the union that are neighbours of a link and have an unaligned word, until there are none. Then adds the
  links of each direction for which final(source is unaligned, target is unaligned) holds. Links are visited in the
  order of their targets, then of their sources.
  """
  links = forward & reverse
  union = forward | reverse
  sources = {source for source, _ in links}
  targets = {target for _, target in links}

  def add(link: Link) -> None:
    links.add(link)
    sources.add(link[0])
    targets.add(link[1])

  size = -1
  while size < len(links):
    size = len(links)
    remaining = [(target, source) for source, target in links]
    heapq.heapify(remaining)
    while remaining:
      point = heapq.heappop(remaining)
      target, source = point
      for target_step, source_step in neighbours:
        new = (source + source_step, target + target_step)
        if new in union and new not in links and (new[0] not in sources or new[1] not in targets):
          add(new)
          if new[::-1] > point:  # a later point of the same pass
            heapq.heappush(remaining, new[::-1])
  for direction in (forward, reverse) if final else ():
    for link in sorted(direction - links, key=lambda link: link[::-1]):
      if final(link[0] not in sources, link[1] not in targets):
        add(link)
  return links


def _either(is_source_unaligned: bool, is_target_unaligned: bool) -> bool:
  return is_source_unaligned or is_target_unaligned


def _both(is_source_unaligned: bool, is_target_unaligned: bool) -> bool:
  return is_source_unaligned and is_target_unaligned


SYMMETRISATIONS: Mapping[str, Symmetrisation] = {
  'forward': lambda forward, reverse: forward,
  'reverse': lambda forward, reverse: reverse,
  'intersection': set.intersection,
  'union': set.union,
  'grow': functools.partial(_grow, neighbours=_ADJACENT),
  'grow_diag': functools.partial(_grow, neighbours=_ADJACENT + _DIAGONAL),
  'grow_diag_final': functools.partial(_grow, neighbours=_ADJACENT + _DIAGONAL, final=_either),
  'grow_diag_final_and': functools.partial(_grow, neighbours=_ADJACENT + _DIAGONAL, final=_both),
}
