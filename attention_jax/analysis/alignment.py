"""Alignments as sets of links: how good they are, how to get them from weights, how to write them down. numpy only.

A link is a pair (source token, target token), both counted from 0.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError

Link = tuple[int, int]
Links = Iterable[Link]


class AlignmentScores(NamedTuple):
  """Scores of a corpus, each from counts summed over its sentences.

  Attributes:
    error_rate: alignment error rate, 0 (best) to 1.
    precision: |A ∩ P| / |A|, the share of predicted links that are possible; 1 when nothing was predicted.
    recall: |A ∩ S| / |S|, the share of sure links that were predicted; 1 when there is no sure link.
    links: |A|, how many links were predicted.
  """

  error_rate: float
  precision: float
  recall: float
  links: int


def alignment_error_rate(links: Links, sure: Links, possible: Links | None = None) -> float:
  """1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|) of one sentence, Och and Ney (2003).

  Args:
    links: A, the predicted (source, target) pairs. Repeated pairs count once, in each of the three.
    sure: S, the pairs that must be there.
    possible: P, pairs that may be there; the sure ones belong to it whether they are repeated here or not.

  Returns: 0 (best) to 1. With neither predicted nor sure links 0.0; with one of the two empty nothing else is special:
    nothing predicted gives 1.0, nothing sure gives 1 - |A ∩ P| / |A|.
  """
  return alignment_scores([links], [sure], None if possible is None else [possible]).error_rate


def alignment_scores(
  links: Iterable[Links], sure: Iterable[Links], possible: Iterable[Links] | None = None
) -> AlignmentScores:
  """Alignment error rate, precision and recall of a corpus: one iterable of pairs per sentence in each argument.

  Raises: UserError if the arguments have different numbers of sentences.
  """
  links, sure = [_pairs(a) for a in links], [_pairs(s) for s in sure]
  possible = [_pairs(p) for p in possible] if possible is not None else sure
  if not len(links) == len(sure) == len(possible):
    raise UserError(
      f'alignments of the same sentences are needed, got links for {len(links)} sentences, '
      f'sure for {len(sure)}, possible for {len(possible)}'
    )
  predicted, wanted = sum(map(len, links)), sum(map(len, sure))
  in_sure = sum(len(a & s) for a, s in zip(links, sure, strict=True))
  in_possible = sum(len(a & (s | p)) for a, s, p in zip(links, sure, possible, strict=True))
  return AlignmentScores(
    error_rate=1.0 - _ratio(in_sure + in_possible, predicted + wanted),
    precision=_ratio(in_possible, predicted),
    recall=_ratio(in_sure, wanted),
    links=predicted,
  )


def _pairs(links: Links) -> set[Link]:
  return {(int(source), int(target)) for source, target in links}


def _ratio(part: int, whole: int) -> float:
  return part / whole if whole else 1.0


def links_from_weights(weights: np.ndarray, source_length: int, target_length: int) -> tuple[Link, ...]:
  """The source token that each target token attends to most.

  A target token gets no link if all its weights are zero or if it looks at the end of the source.

  Args:
    weights: [T, S], where S may hold more than the tokens: position source_length is the EOS, what follows is padding.
    source_length: source tokens, EOS not counted.
    target_length: target tokens, EOS not counted.

  Returns: (source, target) pairs ordered by target; of equal weights the first counts.
  Raises: UserError if the weights are not a matrix that holds that many tokens.
  """
  weights = np.asarray(weights)
  if weights.ndim != 2 or weights.shape[0] < target_length or weights.shape[1] < source_length:
    raise UserError(
      f'weights must be [T, S] with T >= {target_length} and S >= {source_length}, got shape {list(weights.shape)}'
    )
  rows = weights[:target_length, : source_length + 1]
  if not rows.size:
    return ()
  best = rows.argmax(axis=1)
  real = rows.any(axis=1) & (best < source_length)
  return tuple((int(best[t]), int(t)) for t in np.flatnonzero(real))


def monotonicity(weights: np.ndarray, source_length: int, target_length: int) -> np.ndarray:
  """For each two target tokens t, t + 1 that have a link (links_from_weights), whether the second does not move back.

  A token without weights, or one that looks at the end of the source, takes part in no pair, and what stands before it
  is not compared with what stands after it. Staying at the same source token is no move back.

  Args: as of links_from_weights.

  Returns: bool [P], one for each of the P pairs in their order. Their mean is the share of steps that do not move back.
  Raises: as links_from_weights.
  """
  links = links_from_weights(weights, source_length, target_length)
  return np.array([s <= after for (s, t), (after, u) in itertools.pairwise(links) if u == t + 1], bool)


def merge_weights(weights: np.ndarray, source_words: Sequence[int], target_words: Sequence[int]) -> np.ndarray:
  """Weights between parts of words -> weights between words: the sum over a source word, the mean over a target word.

  Args:
    weights: [T, S], the last row and the last column those of the EOS.
    source_words: the word that each of the S - 1 source tokens is part of, counted from 0; -1 for a token of no word,
      whose weight is dropped.
    target_words: likewise of the T - 1 target tokens.

  Returns: [T', S'] float64, a row per target word and a column per source word, up to the last that has a token, and
    the row and the column of the EOS as the last ones. The row of a target word without tokens is zero.
  Raises: UserError if the weights are not of that shape.
  """
  weights = np.asarray(weights, np.float64)
  if weights.shape != (len(target_words) + 1, len(source_words) + 1):
    raise UserError(
      f'weights of {len(source_words)} source and {len(target_words)} target tokens must be '
      f'[{len(target_words) + 1}, {len(source_words) + 1}], EOS included, got shape {list(weights.shape)}'
    )
  source, target = _members(source_words), _members(target_words)
  return target @ (weights @ source.T) / np.maximum(target.sum(axis=1, keepdims=True), 1)


def _members(words: Sequence[int]) -> np.ndarray:
  """bool [words + 1, tokens + 1]: which tokens are parts of which word; the EOS is a word of its own."""
  end = max(words, default=-1) + 1
  return np.arange(end + 1)[:, None] == np.array([*words, end])


def entropy(weights: np.ndarray) -> np.ndarray:
  """-Σ w ln w in nats of every row that is not all zero; rows that do not sum to 1 are normalised first.

  Args:
    weights: [..., S], not negative.

  Returns: [R], one value for each of the R rows with something in them, in their order.
  """
  weights = np.asarray(weights, np.float64)
  rows = weights.reshape(-1, weights.shape[-1])
  rows = rows[rows.sum(axis=1) > 0]
  rows = rows / rows.sum(axis=1, keepdims=True)
  return -np.sum(rows * np.log(np.where(rows > 0, rows, 1.0)), axis=1) + 0.0  # + 0.0: never -0.0


def parse_pharaoh(line: str, where: str = 'alignment') -> tuple[Link, ...]:
  """`'0-0 1-2'` -> ((0, 0), (1, 2)), source first.

  Args:
    line: pairs separated by white space; an empty line has no links.
    where: how to name the line in an error, such as 'train.tsv:12'.

  Raises: UserError for anything that is not a pair of numbers.
  """
  for item in line.split():
    if not re.fullmatch('[0-9]+-[0-9]+', item):
      raise UserError(f"{where}: cannot read the link {item!r}; write source-target, counted from 0, such as '0-0 1-2'")
  return tuple((int(source), int(target)) for source, target in (item.split('-') for item in line.split()))


def format_pharaoh(links: Links) -> str:
  """((0, 0), (1, 2)) -> `'0-0 1-2'`: sorted by source, each link once."""
  return ' '.join(f'{source}-{target}' for source, target in sorted(_pairs(links)))
