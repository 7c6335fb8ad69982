"""Diagnostic probes: linear classifiers of the states of an encoder, or of tokens that are weighted by attention."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from attention_jax.errors import UserError

ITERATIONS = 1000
# Candidates for C, the inverse regularisation strength; `guided_predictions` chooses one by cross-validation.
REGULARISATION = (0.01, 0.1, 1.0, 10.0)
FOLDS = 3


class Sentence(NamedTuple):
  """A sentence to be probed.

  Attributes:
    states: a state for each token, [S, D].
    tokens: the ids of the tokens, [S].
  """

  states: np.ndarray
  tokens: np.ndarray


def probe_accuracy(train: Sequence[Sentence], test: Sequence[Sentence], offset: int = 0) -> float:
  """Returns the accuracy with which logistic regression predicts token i + offset from the state at position i.

  Alain & Bengio 2017.

  Args:
    train: sentences to fit the probe on.
    test: other sentences.
    offset: 0 for the token of the state itself.

  Returns:
    The accuracy on the test sentences, 0 to 1, over the positions that have such a neighbour.

  Raises:
    UserError: if the positions of the training sentences have fewer than two different tokens at the offset, or those
      of the test sentences none.
  """
  states, tokens = _neighbours(train, offset)
  if len(np.unique(tokens)) < 2:
    raise UserError(f'a probe at offset {offset} needs at least two different tokens, got {len(np.unique(tokens))}')
  test_states, test_tokens = _neighbours(test, offset)
  if not len(test_tokens):
    raise UserError(f'a probe at offset {offset} needs at least one token to be tested on, got none')
  probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))
  return float(probe.fit(states, tokens).score(test_states, test_tokens))


def _neighbours(sentences: Sequence[Sentence], offset: int) -> tuple[np.ndarray, np.ndarray]:
  """The states that have a token at the offset, [n, D], and these tokens, [n]."""
  if not sentences:
    return np.zeros((0, 0)), np.zeros(0, int)
  states = []
  tokens = []
  for sentence in sentences:
    positions = np.arange(len(sentence.tokens))
    positions = positions[(positions + offset >= 0) & (positions + offset < len(sentence.tokens))]
    states.append(sentence.states[positions])
    tokens.append(sentence.tokens[positions + offset])
  return np.concatenate(states), np.concatenate(tokens)


def one_hot_sentences(sentences: Sequence[Sentence], size: int) -> list[Sentence]:
  """Returns the sentences with one-hot vectors of their tokens as states.

  They are a control: a probe of them predicts from the token alone, without its context.

  Args:
    sentences: the sentences.
    size: number of tokens of the vocabulary.
  """
  return [Sentence(np.eye(size, dtype=np.float32)[sentence.tokens], sentence.tokens) for sentence in sentences]


def weighted_counts(tokens: np.ndarray, weights: np.ndarray, mask: np.ndarray, size: int) -> scipy.sparse.csr_array:
  """Returns xₜ = n Σ_s wₜₛ onehot(tokenₛ) for each query, [T, size]; uniform weights give the counts of n tokens.

  Args:
    tokens: ids [S].
    weights: [T, S].
    mask: [S], True for the n real positions.
    size: number of tokens of the vocabulary.
  """
  weights = weights[:, mask] * mask.sum()
  rows, columns = np.broadcast_arrays(np.arange(len(weights))[:, None], tokens[mask])
  return scipy.sparse.csr_array((weights.ravel(), (rows.ravel(), columns.ravel())), (len(weights), size))


def guided_predictions(
  features: scipy.sparse.csr_array, labels: np.ndarray, test_features: scipy.sparse.csr_array
) -> np.ndarray:
  """Returns the labels that logistic regression predicts from weighted tokens, without any context.

  A probe of the weights (Wiegreffe & Pinter 2019): a model that has no access to context uses the weights of one that
  has. The model of the paper applies a layer to each word and takes the weighted sum of the results. For two labels,
  the result for a word amounts to one number, which is here its coefficient in the logistic regression.

  Args:
    features: [n, V], of `weighted_counts`.
    labels: [n].
    test_features: [m, V].

  Raises:
    UserError: for fewer examples than folds of the cross-validation, or if all labels, or all those outside of one
      fold, are equal.
  """
  num_labels = len(np.unique(labels))
  if len(labels) < FOLDS or num_labels < 2:
    raise UserError(
      f'a guided probe needs at least {FOLDS} examples with at least two different labels, got {len(labels)} with '
      f'{num_labels}'
    )
  folds = KFold(FOLDS, shuffle=True, random_state=0)
  if any(len(np.unique(labels[rest])) < 2 for rest, _ in folds.split(labels)):
    raise UserError(
      f'a guided probe has one label outside of one of its {FOLDS} folds; expected more of the rare labels'
    )
  search = GridSearchCV(LogisticRegression(max_iter=ITERATIONS), {'C': REGULARISATION}, cv=folds)
  return search.fit(features, labels).predict(test_features)
