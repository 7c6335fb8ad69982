"""Alignments as sets of links: scores against gold links, links from weights, statistics of weights. NumPy only.

A link is a pair (source token, target token), both counted from 0.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError
from attention_jax.pharaoh import Link, format_pharaoh, parse_gold, parse_pharaoh

__all__ = [
  'AlignmentScores',
  'Link',
  'Links',
  'alignment_error_rate',
  'alignment_scores',
  'entropy',
  'format_pharaoh',
  'links_from_weights',
  'merge_weights',
  'monotonicity',
  'parse_gold',
  'parse_pharaoh',
]

Links = Iterable[Link]


class AlignmentScores(NamedTuple):
  """Scores of a corpus, each from counts summed over its sentences.

  Attributes:
    error_rate: alignment error rate, 0 (best) to 1.
    precision: |A ∩ P| / |A|, the share of predicted links that are possible; 1 if nothing was predicted.
    recall: |A ∩ S| / |S|, the share of sure links that were predicted; 1 if there is no sure link.
    links: |A|, the number of predicted links.
  """

  error_rate: float
  precision: float
  recall: float
  links: int


def alignment_error_rate(links: Links, sure: Links, possible: Links | None = None) -> float:
  """1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|) of one sentence. Och & Ney 2003.

  Args:
    links: A, the predicted (source, target) pairs. In all three arguments a repeated pair counts once.
    sure: S, the pairs that must be predicted.
    possible: P, the pairs that may be predicted; it always includes the sure ones. None: only the sure ones.

  Returns:
    0 (best) to 1. If both A and S are empty it is 0; if only A is empty, 1; if only S is empty, 1 - |A ∩ P| / |A|.
  """
  return alignment_scores([links], [sure], None if possible is None else [possible]).error_rate


def alignment_scores(
  links: Iterable[Links], sure: Iterable[Links], possible: Iterable[Links] | None = None
) -> AlignmentScores:
  """Returns alignment error rate, precision and recall of a corpus.

  Args:
    links: predicted pairs per sentence, see `alignment_error_rate`.
    sure: sure pairs per sentence.
    possible: possible pairs per sentence, or None.

  Raises:
    UserError: if the arguments have different numbers of sentences.
  """
  links = [_unique_links(sentence) for sentence in links]
  sure = [_unique_links(sentence) for sentence in sure]
  possible = sure if possible is None else [_unique_links(sentence) for sentence in possible]
  if not len(links) == len(sure) == len(possible):
    raise UserError(
      f'links, sure and possible must have the same number of sentences, got links for {len(links)} sentences, '
      f'sure for {len(sure)}, possible for {len(possible)}'
    )
  num_links = sum(map(len, links))
  num_sure = sum(map(len, sure))
  links_in_sure = sum(len(a & s) for a, s in zip(links, sure, strict=True))
  links_in_possible = sum(len(a & (s | p)) for a, s, p in zip(links, sure, possible, strict=True))
  return AlignmentScores(
    error_rate=1.0 - _ratio(links_in_sure + links_in_possible, num_links + num_sure),
    precision=_ratio(links_in_possible, num_links),
    recall=_ratio(links_in_sure, num_sure),
    links=num_links,
  )


def _unique_links(links: Links) -> set[Link]:
  return {(int(source), int(target)) for source, target in links}


def _ratio(part: int, whole: int) -> float:
  return part / whole if whole else 1.0


def links_from_weights(weights: np.ndarray, source_length: int, target_length: int) -> tuple[Link, ...]:
  """Links each target token to the source token that it attends to most.

  A target token gets no link if all its weights are zero or if it attends most to the EOS.

  Args:
    weights: [T, S]; column source_length, if present, is the EOS, and later columns are padding.
    source_length: number of source tokens without the EOS.
    target_length: number of target tokens without the EOS.

  Returns:
    (source, target) pairs ordered by target; the first position wins a tie.

  Raises:
    UserError: if the weights are not a matrix of at least target_length rows and source_length columns.
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
  is_linked = rows.any(axis=1) & (best < source_length)
  return tuple((int(best[t]), int(t)) for t in np.flatnonzero(is_linked))


def monotonicity(weights: np.ndarray, source_length: int, target_length: int) -> np.ndarray:
  """Returns, for each pair of adjacent linked target tokens, whether the source position stays or moves forward.

  Pairs are target tokens t and t + 1 that both have a link, see `links_from_weights`.

  Args:
    weights: [T, S], as in `links_from_weights`.
    source_length: number of source tokens without the EOS.
    target_length: number of target tokens without the EOS.

  Returns:
    bool [P], one for each of the P pairs in order. Their mean is the share of monotonic steps.

  Raises:
    UserError: as `links_from_weights`.
  """
  links = links_from_weights(weights, source_length, target_length)
  is_monotonic = [
    next_source >= source
    for (source, target), (next_source, next_target) in itertools.pairwise(links)
    if next_target == target + 1
  ]
  return np.array(is_monotonic, bool)


def merge_weights(weights: np.ndarray, source_words: Sequence[int], target_words: Sequence[int]) -> np.ndarray:
  """Merges weights between subwords to weights between words: the sum over a source word, the mean over a target word.

  Args:
    weights: [T, S]; the last row and the last column are those of the EOS.
    source_words: the index of the word that each of the S - 1 source tokens is part of, from 0; -1 for a token of no
      word, whose weight is dropped.
    target_words: the same for the T - 1 target tokens.

  Returns:
    [T', S'] float64, with a row per target word and a column per source word, up to the last word that has a token,
    followed by the row and the column of the EOS. The row of a target word without tokens is zero.

  Raises:
    UserError: if the weights have another shape.
  """
  weights = np.asarray(weights, np.float64)
  if weights.shape != (len(target_words) + 1, len(source_words) + 1):
    raise UserError(
      f'weights of {len(source_words)} source and {len(target_words)} target tokens must be '
      f'[{len(target_words) + 1}, {len(source_words) + 1}], EOS included, got shape {list(weights.shape)}'
    )
  source = _membership(source_words)
  target = _membership(target_words)
  return target @ (weights @ source.T) / np.maximum(target.sum(axis=1, keepdims=True), 1)


def _membership(words: Sequence[int]) -> np.ndarray:
  """bool [words + 1, tokens + 1]: whether a token is part of a word; the EOS is a word of its own."""
  num_words = max(words, default=-1) + 1
  return np.arange(num_words + 1)[:, None] == np.array([*words, num_words])


def entropy(weights: np.ndarray) -> np.ndarray:
  """-Σ w ln w in nats of every row that is not all zero; rows that do not sum to 1 are normalised first.

  Args:
    weights: [..., S], not negative.

  Returns:
    [R], one value for each of the R rows that are not all zero, in order.
  """
  weights = np.asarray(weights, np.float64)
  rows = weights[weights.sum(axis=-1) > 0]
  rows = rows / rows.sum(axis=1, keepdims=True)
  return -np.sum(rows * np.log(np.where(rows > 0, rows, 1.0)), axis=1) + 0.0  # + 0.0 turns -0.0 into 0.0
