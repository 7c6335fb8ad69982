"""Which of several hypotheses the others agree with most: minimum Bayes risk (Kumar & Byrne 2004)."""

from collections.abc import Sequence

import numpy as np

from attention_jax.inference.metrics import compute_metric, higher_is_better


def expected_utility(texts: Sequence[str], metric: str, log_probs: Sequence[float] | None = None) -> list[float]:
  """Of each text, the mean of a metric over all texts as references; of metrics where less is better, less than 0.

  With samples of a model for texts this estimates the utility that the model expects (Eikema & Aziz 2020). What a
  search has found counts by its probability instead (Kumar & Byrne 2004, equation 7, of the texts alone). It takes as
  many measurements of single lines as there are pairs of different texts. An empty reference agrees with an empty text
  as equal words do, and with any other as different words do.

  Args:
    metric: a spec of inference.metrics.METRICS.
    log_probs: of each text, by which it counts; None for texts that were drawn, each of which counts as much.

  Raises: UserError for an unknown metric or option.
  """
  sign, found = (1 if higher_is_better(metric) else -1), {}
  for text in texts:
    for reference in texts:
      if (text, reference) not in found:
        found[text, reference] = sign * _of_lines(text, reference, metric)
  counts = np.ones(len(texts)) if log_probs is None else np.exp(np.subtract(log_probs, max(log_probs, default=0.0)))
  return [float(np.average([found[text, reference] for reference in texts], weights=counts)) for text in texts]


def _of_lines(text: str, reference: str, metric: str) -> float:
  """A metric of one line; where the reference is empty, of two words that are equal or not."""
  if not reference.strip():
    text, reference = ('a' if text.strip() else 'b'), 'b'
  return compute_metric(metric, [text], [[reference]], sentence_level=True).value
