"""Minimum Bayes risk reranking of hypotheses (Kumar & Byrne 2004)."""

from collections.abc import Sequence

import numpy as np

from attention_jax.inference.metrics import compute_metric, higher_is_better


def expected_utility(texts: Sequence[str], metric: str, log_probs: Sequence[float] | None = None) -> list[float]:
  """Returns the expected utility of each text: the mean of a metric over all texts as references.

  For samples of a model this estimates the utility under the model (Eikema & Aziz 2020). Results of a search are
  weighted by their probabilities instead (Kumar & Byrne 2004, equation 7, over these texts alone). The metric is
  computed once for each text and reference, even if a text occurs several times. An empty reference counts as a word:
  it equals an empty text, and differs from any other.

  Args:
    texts: the hypotheses of one source.
    metric: a spec of inference.metrics.METRICS; its sign is changed if lower is better.
    log_probs: log-probability of each text, for results of a search; None for samples, which have equal weights.

  Raises:
    UserError: for an unknown metric or option.
  """
  sign = 1 if higher_is_better(metric) else -1
  utilities = {}
  for text in texts:
    for reference in texts:
      if (text, reference) not in utilities:
        utilities[text, reference] = sign * _sentence_metric(text, reference, metric)
  log_weights = np.zeros(len(texts)) if log_probs is None else np.subtract(log_probs, max(log_probs, default=0.0))
  weights = np.exp(log_weights)
  return [float(np.average([utilities[text, reference] for reference in texts], weights=weights)) for text in texts]


def combine_hypotheses(systems: Sequence[Sequence[str]], metric: str) -> list[str]:
  """Chooses one of the hypotheses of several systems for each source: the one with the highest expected utility.

  All systems have equal weights; among equal utilities the first system counts. With a metric that only compares texts
  for equality, such as sequence_error_rate, this is a vote: the text of most systems is chosen.

  Args:
    systems: the hypotheses of each system, one per source.
    metric: as for `expected_utility`.

  Returns:
    One hypothesis per source.

  Raises:
    UserError: as `expected_utility`.
  """
  return [_best_text(texts, metric) for texts in zip(*systems, strict=True)]


def _best_text(texts: Sequence[str], metric: str) -> str:
  if len(set(texts)) == 1:
    return texts[0]
  return texts[int(np.argmax(expected_utility(texts, metric)))]


def _sentence_metric(text: str, reference: str, metric: str) -> float:
  """The metric of one line; for an empty reference, that of two equal or two different words."""
  if not reference.strip():
    text = 'a' if text.strip() else 'b'
    reference = 'b'
  return compute_metric(metric, [text], [[reference]], sentence_level=True).value
