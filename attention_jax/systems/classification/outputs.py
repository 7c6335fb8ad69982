"""Predictions of classifiers, as records for JSON and as shaded documents for plots."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_jax.systems.classification.shading import ShadedDocument


class ClassificationPrediction(NamedTuple):
  """Prediction for one document.

  Attributes:
    label: the most probable label.
    probabilities: probability of every label.
    word_weights: for each of N sentences, weights [H, W] of H heads over its W words, see
      systems.classification.model.ClassifierOutput. For each text of a pair, H = heads x words of the other text.
    sentence_weights: weights [H, N] of the heads over the sentences.
  """

  label: str
  probabilities: dict[str, float]
  word_weights: list[np.ndarray]
  sentence_weights: np.ndarray


class CutDocument(NamedTuple):
  """The part of a document that a model reads.

  Attributes:
    tokens: tokens of each sentence.
    num_unread: number of tokens beyond the largest bucket.
  """

  tokens: list[list[str]]
  num_unread: int


def prediction_record(document: CutDocument, prediction: ClassificationPrediction) -> dict[str, Any]:
  """Returns a prediction with its weights, for JSON."""
  parts = zip(document.tokens, prediction.word_weights, strict=True)
  return {
    'label': prediction.label,
    'probabilities': prediction.probabilities,
    'parts': [{'tokens': tokens, 'weights': weights} for tokens, weights in parts],
    'weights': prediction.sentence_weights,
    'unread': document.num_unread,
  }


def shade_document(
  title: str, label: str, document: CutDocument, prediction: ClassificationPrediction, pair_heads: int = 0
) -> ShadedDocument:
  """Returns a prediction with its weights, for a plot.

  Args:
    title: the heading.
    label: the gold label; '' if unknown.
    document: the part of the document that the model reads.
    prediction: the prediction for it.
    pair_heads: number of heads of a classifier that compares two texts; 0 for other classifiers.
  """
  word_weights: Sequence[np.ndarray] = prediction.word_weights
  if pair_heads:
    # For each text: [heads x T, W] for the T words of the other text -> the mean over heads, [T, W].
    word_weights = [weights.reshape(pair_heads, -1, weights.shape[-1]).mean(0) for weights in word_weights]
  return ShadedDocument(
    title,
    label,
    prediction.probabilities,
    document.tokens,
    word_weights,
    prediction.sentence_weights,
    bool(pair_heads),
    document.num_unread,
  )
