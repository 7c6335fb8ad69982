"""Probes: states with known content, random states, and an independent count."""

import numpy as np
import pytest
import scipy.sparse

from attention_jax.errors import UserError
from lab.probes import Sentence, guided_predictions, one_hot_sentences, probe_accuracy

SIZE = 5


def splits(state_of):
  """Returns 80 sentences for training and 60 for the test."""
  result = []
  for seed, count in enumerate((80, 60)):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(SIZE, size=rng.integers(4, 9)) for _ in range(count)]
    result.append([Sentence(state_of(rng, row), row) for row in tokens])
  return result


@pytest.mark.long
@pytest.mark.parametrize('shift', [-2, 0, 1])
def test_states_that_contain_one_neighbour_reveal_it_and_no_other(shift):
  def rotated(rng, tokens):
    basis = np.linalg.qr(np.random.default_rng(3).normal(size=(SIZE, SIZE)))[0]
    return basis[np.roll(tokens, -shift)]

  train, test = splits(rotated)
  accuracies = {offset: probe_accuracy(train, test, offset) for offset in (-2, -1, 0, 1)}
  assert accuracies.pop(shift) == 1.0
  assert max(accuracies.values()) < 0.4  # chance is 0.2


def test_random_states_reveal_nothing():
  train, test = splits(lambda rng, tokens: rng.normal(size=(len(tokens), 3)))
  assert probe_accuracy(train, test) < 0.35


def test_one_hot_states_predict_the_most_frequent_successor():
  def follow(rng, count):
    rows = []
    for _ in range(count):
      tokens = [0]
      while len(tokens) < 8:
        tokens.append((tokens[-1] + 1) % SIZE if rng.random() < 0.8 else int(rng.integers(SIZE)))
      rows.append(Sentence(np.zeros((8, 1)), np.array(tokens)))
    return rows

  rng = np.random.default_rng(5)
  train = follow(rng, 80)
  test = follow(rng, 60)
  pairs = [(row.tokens[i], row.tokens[i + 1]) for row in test for i in range(7)]
  expected = np.mean([(a + 1) % SIZE == b for a, b in pairs])
  accuracy = probe_accuracy(one_hot_sentences(train, SIZE), one_hot_sentences(test, SIZE), 1)
  assert accuracy == pytest.approx(expected)


def test_probes_without_different_tokens_or_examples_are_errors():
  train = [Sentence(np.eye(3), np.arange(3))]
  short = [Sentence(np.zeros((1, 3)), np.zeros(1, int))]
  for examples, message in (
    ((train, short, 1), 'offset 1 needs at least one token to be tested on, got none'),
    ((train, [], 1), 'offset 1 needs at least one token to be tested on, got none'),
    (([], train), 'at least two different tokens, got 0'),
    ((short * 3, short), 'at least two different tokens, got 1'),
  ):
    with pytest.raises(UserError, match=message):
      probe_accuracy(*examples)


@pytest.mark.parametrize(
  ('labels', 'message'),
  [
    ([0, 0, 0, 0], 'at least 3 examples with at least two different labels, got 4 with 1$'),
    ([0, 1], 'at least 3 examples with at least two different labels, got 2 with 2$'),
    # Otherwise no regularisation strength has an accuracy.
    ([0, 1, 1, 1, 1, 1], 'one label outside of one of its 3 folds; expected more of the rare labels'),
  ],
)
def test_guided_probes_need_examples_of_two_labels(labels, message):
  features = scipy.sparse.csr_array(np.eye(len(labels)))
  with pytest.raises(UserError, match=message):
    guided_predictions(features, np.array(labels), features)
