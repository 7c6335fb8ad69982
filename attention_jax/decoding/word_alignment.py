"""Word alignments of given pairs by a trained model, and their scores against gold links."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.analysis.alignment import AlignmentScores, Link, alignment_scores, links_from_weights, merge_weights
from attention_jax.data.encoding import token_units
from attention_jax.data.text import LINK_LEVELS, Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.decoding.scoring import ScoredPair
from attention_jax.errors import UserError, choose

Alignments = list[list[Link]]


class AlignedPair(NamedTuple):
  """The alignment of one pair.

  Attributes:
    links: (source, target) pairs of units, words or characters, counted from 0.
    weights: [T, S] weights of the units, with a row and a column for EOS: summed over the tokens of a source unit, and
      averaged over those of a target unit.
  """

  links: list[Link]
  weights: np.ndarray


def align(
  corpus: Corpus, scored: Sequence[ScoredPair], source_vocab: Vocabulary, target_vocab: Vocabulary
) -> list[AlignedPair]:
  """Links each target unit to the source unit with the largest weight; units are words or characters.

  A target unit gets no link if its largest weight is that of EOS, or if all its weights are zero.

  Args:
    corpus: the pairs; its level is that of the units.
    scored: their scores with weights, as `scoring.PairScorer` returns them.
    source_vocab: source vocabulary of the model.
    target_vocab: target vocabulary of the model.

  Returns:
    The links and the weights of each row.

  Raises:
    UserError: for an unknown level, and for a vocabulary whose tokens are not parts of the units of that level.
  """
  source_units, target_units = link_units(corpus.level, source_vocab, target_vocab)
  aligned = []
  for source, target, pair in zip(corpus.source, corpus.target, scored, strict=True):
    weights = merge_weights(pair.weights, source_units(source), target_units(target))
    links = list(links_from_weights(weights, weights.shape[1] - 1, weights.shape[0] - 1))
    aligned.append(AlignedPair(links, weights))
  return aligned


def link_units(level: str, source_vocab: Vocabulary, target_vocab: Vocabulary) -> list[Callable[[str], Sequence[int]]]:
  """Returns for each side a function from a line to the unit of each of its tokens, see `token_units`.

  Args:
    level: the unit that links connect, 'word' or 'char'.
    source_vocab: source vocabulary of the model.
    target_vocab: target vocabulary of the model.

  Raises:
    UserError: for an unknown level, and for a vocabulary whose tokens are not parts of the units of that level.
  """
  choose(level, LINK_LEVELS, 'level of links')
  units = [token_units(vocabulary, level) for vocabulary in (source_vocab, target_vocab)]
  if None in units:
    kinds = f'{source_vocab.kind} and {target_vocab.kind}'
    raise UserError(f'links between {level}s need tokens that are parts of {level}s, got vocabularies {kinds}')
  return units


def swap_links(alignments: Alignments) -> Alignments:
  """Returns alignments with both positions of each link exchanged: (target, source) -> (source, target)."""
  return [[(source, target) for target, source in links] for links in alignments]


def swap_sides(corpus: Corpus) -> Corpus:
  """Returns a corpus with source and target exchanged, without links."""
  return corpus._replace(source=corpus.target, target=corpus.source, links=None, possible=None)


class AlignmentReport(NamedTuple):
  """Scores of alignments against gold links; a link of a unit that has no gold link is an error (Och & Ney 2003).

  Attributes:
    scores: of the corpus.
    sentences: number of sentence pairs.
  """

  scores: AlignmentScores
  sentences: int

  def __str__(self) -> str:
    scores = self.scores
    rates = [100 * value for value in (scores.error_rate, scores.precision, scores.recall)]
    return (
      f'alignment error rate {rates[0]:.2f} %, precision {rates[1]:.2f} %, recall {rates[2]:.2f} %, '
      f'{scores.links} links, {self.sentences} sentences'
    )


def compare_with_gold(corpus: Corpus, alignments: Alignments) -> AlignmentReport:
  """Returns the scores of alignments against the links of a corpus."""
  return AlignmentReport(alignment_scores(alignments, corpus.links, corpus.possible), len(alignments))
