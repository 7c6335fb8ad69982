"""Ways to cut a word into pieces that are drawn anew each time: subword regularisation.

They are drawn here and not by sentencepiece, whose draws differ from process to process whatever its seed: a resumed
run would not be the one that was interrupted.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping

Cut = Callable[[str, random.Random], list[str]]


def bpe_dropout(scores: Mapping[str, float], dropout: float) -> Cut:
  """Merges of neighbours, the highest score first; each is left out with this probability when its turn comes.

  Provilkov, Emelianenko & Voita 2020 (BPE-dropout). What was left out comes again as soon as a neighbour has grown.

  Args: scores, of all pieces.
  """
  none = -math.inf

  def cut(word: str, draws: random.Random) -> list[str]:
    parts = list(word)
    score = lambda i: scores.get(parts[i] + parts[i + 1], none)
    pairs = [score(i) for i in range(len(parts) - 1)]
    while pairs and (best := max(pairs)) > none:
      at = pairs.index(best)
      if draws.random() < dropout:
        pairs[at] = none
        continue
      parts[at : at + 2] = [parts[at] + parts[at + 1]]
      del pairs[at]
      for i in range(max(at - 1, 0), min(at + 1, len(pairs))):
        pairs[i] = score(i)
    return parts

  return cut


def unigram_sampling(scores: Mapping[str, float], sampling: float) -> Cut:
  """Each way x of cutting the word with probability P(x)^α / Σ P^α. Kudo 2018, section 3.2.

  Args: scores, log-probabilities of all pieces, whose sums are log P; sampling, α.
  """
  longest = max(map(len, scores))

  @functools.lru_cache(2**16)
  def ends(word: str) -> list[tuple[list[int], list[float]]]:
    """For each end of a part where it may begin, and the weights of these: forward filtering."""
    total, found = [0.0], []
    for end in range(1, len(word) + 1):
      ways = range(max(0, end - longest), end)
      logs = {i: total[i] + sampling * scores[word[i:end]] for i in ways if word[i:end] in scores}
      top = max(logs.values())
      weights = [math.exp(log - top) for log in logs.values()]
      total.append(top + math.log(sum(weights)))
      found.append((list(logs), weights))
    return found

  def cut(word: str, draws: random.Random) -> list[str]:
    table, end, parts = ends(word), len(word), []
    while end:
      begin = draws.choices(*table[end - 1])[0]
      parts.append(word[begin:end])
      end = begin
    return parts[::-1]

  return cut
