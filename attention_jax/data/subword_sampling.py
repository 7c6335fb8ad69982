"""Random segmentations of a word into subword pieces: subword regularisation.

They are sampled here because sentencepiece's samples differ from process to process whatever its seed, so that a
resumed run would differ from an uninterrupted one.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping

Segment = Callable[[str, random.Random], list[str]]
# Characters of the longest word of which `unigram_sampling` stores the table of pieces. Without spaces a whole line is
# one word, which seldom repeats: 2^16 tables of such lines, of 12 KB for 40 characters, would take 750 MB.
MAX_STORED_LENGTH = 20


def bpe_dropout(scores: Mapping[str, float], dropout: float) -> Segment:
  """BPE-dropout (Provilkov, Emelianenko & Voita, 2020).

  Adjacent pieces are merged, the pair with the highest score first. Each merge is skipped with a fixed probability. A
  skipped pair is not tried again; a merge of one of its pieces with another neighbour puts a new pair in its place.

  Args:
    scores: the score of each piece.
    dropout: probability of skipping a merge.

  Returns:
    A function (word, random generator) -> pieces.
  """
  no_merge = -math.inf

  def segment(word: str, rng: random.Random) -> list[str]:
    pieces = list(word)

    def merge_score(i: int) -> float:
      return scores.get(pieces[i] + pieces[i + 1], no_merge)

    merges = [merge_score(i) for i in range(len(pieces) - 1)]
    while merges and (best := max(merges)) > no_merge:
      position = merges.index(best)
      if rng.random() < dropout:
        merges[position] = no_merge
        continue
      pieces[position : position + 2] = [pieces[position] + pieces[position + 1]]
      del merges[position]
      for i in range(max(position - 1, 0), min(position + 1, len(merges))):
        merges[i] = merge_score(i)
    return pieces

  return segment


def unigram_sampling(scores: Mapping[str, float], sampling: float) -> Segment:
  """Draws each segmentation x of a word with probability P(x)^α / Σ P^α (Kudo 2018, section 3.3).

  Args:
    scores: the log-probability of each piece; log P is their sum over the pieces of a segmentation.
    sampling: α.

  Returns:
    A function (word, random generator) -> pieces.
  """
  longest = max(map(len, scores))

  def filter_forward(word: str) -> list[tuple[list[int], list[float]]]:
    """Returns, for each position, the starts of the pieces that end there, and their relative probabilities."""
    totals = [0.0]  # log of the summed weights of all segmentations of each prefix
    table = []
    for end in range(1, len(word) + 1):
      starts = range(max(0, end - longest), end)
      logs = {i: totals[i] + sampling * scores[word[i:end]] for i in starts if word[i:end] in scores}
      top = max(logs.values())
      weights = [math.exp(log - top) for log in logs.values()]
      totals.append(top + math.log(sum(weights)))
      table.append((list(logs), weights))
    return table

  stored_table = functools.lru_cache(2**16)(filter_forward)

  def segment(word: str, rng: random.Random) -> list[str]:
    table = stored_table(word) if len(word) <= MAX_STORED_LENGTH else filter_forward(word)
    pieces = []
    end = len(word)
    while end:
      start = rng.choices(*table[end - 1])[0]
      pieces.append(word[start:end])
      end = start
    return pieces[::-1]

  return segment
