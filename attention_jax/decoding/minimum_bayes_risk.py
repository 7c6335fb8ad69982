"""Minimum Bayes risk reranking of the hypotheses of one or of several systems (Kumar & Byrne 2004)."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.decoding.metrics import compute_metric, higher_is_better
from attention_jax.decoding.predictor import Hypothesis


class Candidates(NamedTuple):
  """Hypotheses of one source by one system, best first.

  Attributes:
    texts: the hypotheses, at least one.
    log_probs: natural log of the probability of each, for results of a search; None for samples, which have equal
      weights.
  """

  texts: Sequence[str]
  log_probs: Sequence[float] | None = None


def expected_utility(texts: Sequence[str], metric: str, log_probs: Sequence[float] | None = None) -> list[float]:
  """Returns the expected utility of each text: the mean of a metric over all texts as references.

  For samples of a model this estimates the utility under the model (Eikema & Aziz 2020). Results of a search are
  weighted by their probabilities instead (Kumar & Byrne 2004, equation 7, over these texts alone). The metric is
  computed once for each text and reference, even if a text occurs several times. An empty reference counts as a word:
  it equals an empty text, and differs from any other.

  Args:
    texts: the hypotheses of one source.
    metric: a spec of decoding.metrics.METRICS; its sign is changed if lower is better.
    log_probs: log-probability of each text, for results of a search; None for samples, which have equal weights.

  Raises:
    UserError: for an unknown metric or option.
  """
  return _expected_utility(texts, _probabilities(Candidates(texts, log_probs)), metric)


def combine_hypotheses(systems: Sequence[Sequence[Candidates]], metric: str) -> list[str]:
  """Chooses one of the hypotheses of several systems for each source: the one with the highest expected utility.

  All systems have equal weights: the probabilities of the hypotheses of each are scaled to a sum of 1. Among equal
  utilities the first hypothesis of the first system counts. With a metric that only compares texts for equality, such
  as exact_match, this chooses the text with the largest sum of probabilities over all systems; if each system has one
  hypothesis, it is a vote.

  Args:
    systems: the hypotheses of each system, Candidates for every source.
    metric: as for `expected_utility`.

  Returns:
    One hypothesis per source.

  Raises:
    UserError: as `expected_utility`.
  """
  return [_best_text(candidates, metric) for candidates in zip(*systems, strict=True)]


def _best_text(systems: Sequence[Candidates], metric: str) -> str:
  """The text with the highest expected utility among those of all systems for one source."""
  weights: dict[str, float] = {}
  for candidates in systems:
    for text, weight in zip(candidates.texts, _probabilities(candidates), strict=True):
      weights[text] = weights.get(text, 0.0) + weight
  texts = list(weights)
  if len(texts) == 1:
    return texts[0]
  return texts[int(np.argmax(_expected_utility(texts, list(weights.values()), metric)))]


def _probabilities(candidates: Candidates) -> list[float]:
  """The weight of each text of one system; their sum is 1, unless there is none."""
  log_probs = [0.0] * len(candidates.texts) if candidates.log_probs is None else candidates.log_probs
  weights = np.exp(np.subtract(log_probs, max(log_probs, default=0.0)))
  return (weights / weights.sum()).tolist()


def _expected_utility(texts: Sequence[str], weights: Sequence[float], metric: str) -> list[float]:
  """The mean of the metric of each text over all texts as references, weighted."""
  sign = 1 if higher_is_better(metric) else -1
  utilities = {}
  for text in texts:
    for reference in texts:
      if (text, reference) not in utilities:
        utilities[text, reference] = sign * _sentence_metric(text, reference, metric)
  return [float(np.average([utilities[text, reference] for reference in texts], weights=weights)) for text in texts]


def _sentence_metric(text: str, reference: str, metric: str) -> float:
  """The metric of one line; for an empty reference, that of two equal or two different words."""
  if not reference.strip():
    text = 'a' if text.strip() else 'b'
    reference = 'b'
  return compute_metric(metric, [text], [[reference]], sentence_level=True).value


def rank_hypotheses(hypotheses: Sequence[Hypothesis], metric: str = '', is_sampled: bool = False) -> list[Hypothesis]:
  """Ranks the hypotheses of one source and removes repeated ones.

  With a metric, they are sorted by their expected utility, which becomes their score, and repeated texts are removed.
  Otherwise the order is unchanged; repeated tokens are removed from a search, and kept among samples.

  Args:
    hypotheses: the hypotheses, those of a search best first.
    metric: as for `expected_utility`, or ''.
    is_sampled: whether they are samples, which have equal weights.
  """
  if not metric:
    return list(hypotheses) if is_sampled else _distinct(hypotheses, key=lambda hypothesis: tuple(hypothesis.tokens))
  log_probs = None if is_sampled else [hypothesis.log_prob for hypothesis in hypotheses]
  utilities = expected_utility([hypothesis.text for hypothesis in hypotheses], metric, log_probs)
  scored = [hypothesis._replace(score=utility) for hypothesis, utility in zip(hypotheses, utilities, strict=True)]
  return _distinct(sorted(scored, key=lambda hypothesis: -hypothesis.score), key=lambda hypothesis: hypothesis.text)


def _distinct(hypotheses: Iterable[Hypothesis], key: Callable[[Hypothesis], Hashable]) -> list[Hypothesis]:
  """Returns the first hypothesis with each key."""
  first = {}
  for hypothesis in hypotheses:
    first.setdefault(key(hypothesis), hypothesis)
  return list(first.values())
