"""Recall tasks: the inputs and answers of episodes."""

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.recall.tasks import make_recall_task

RNG = np.random.default_rng


def test_copy_shows_vectors_and_a_mark():
  inputs, answer, _ = make_recall_task('copy(bits=3)').draw(RNG(0), (5,))
  assert inputs.shape == (6, 4) and answer.shape == (5, 3) and set(answer.ravel()) == {0, 1}
  assert np.array_equal(inputs[:5], np.pad(answer, ((0, 0), (0, 1)))) and inputs[5].tolist() == [0, 0, 0, 1]


def test_repeat_copy_shows_the_number_of_repeats():
  task = make_recall_task('repeat_copy(bits=3, repeats=4)')
  for times in (1, 2, 3, 4):
    inputs, answer, _ = task.draw(RNG(0), (2, times))
    vectors = inputs[1:3, :3]
    assert inputs[0].tolist() == [0, 0, 0, 1, 0] and not inputs[1:3, 3:].any()
    # Normalised by the mean and the standard deviation of the numbers 1 to 4.
    np.testing.assert_allclose(inputs[3], [0, 0, 0, 0, (times - 2.5) / np.sqrt(5 / 4)], rtol=1e-6)
    assert np.array_equal(answer[:-1, :3], np.tile(vectors, (times, 1))) and not answer[:-1, 3].any()
    assert answer[-1].tolist() == [0, 0, 0, 1]


def test_associative_recall_answers_with_the_next_item():
  task = make_recall_task('associative_recall(bits=4, vectors=2)')
  positions = set()
  for i in range(40):
    inputs, answer, _ = task.draw(RNG(i), (3,))
    assert inputs[:, 4].nonzero()[0].tolist() == [0, 3, 6] and inputs[:, 5].nonzero()[0].tolist() == [9, 12]
    items = [inputs[mark + 1 : mark + 3, :4] for mark in (0, 3, 6)]
    query = inputs[10:12, :4]
    (position,) = (i for i, item in enumerate(items) if np.array_equal(item, query))
    assert np.array_equal(answer, items[position + 1])
    positions.add(position)
  assert positions == {0, 1}


def test_the_number_of_bits_of_an_item_has_no_upper_bound():
  assert make_recall_task('associative_recall(bits=2147483647, vectors=2147483647)').input_features == 2**31 + 1
  items = make_recall_task('associative_recall(bits=5, vectors=1, beyond=8)').draw(RNG(0), (8,)).inputs[1:16:2, :5]
  assert len(np.unique(items, axis=0)) == 8


def test_ngrams_predict_the_next_bit_at_every_step():
  inputs, answer, start = make_recall_task('ngrams(order=3, length=10)').draw(RNG(0), (10,))
  assert inputs.shape == (9, 1) and answer.shape == (8, 1) and start == 1
  assert np.array_equal(inputs[2:], answer[:-1])  # the answer of a step is the input of the next one


@pytest.mark.long
def test_probabilities_of_bits_of_ngrams_follow_a_beta_distribution():
  """Beta(1/2, 1/2) has mean 1/2 and variance 1/8, that of a uniform one is 1/12; rare contexts are left out."""
  task = make_recall_task('ngrams(order=2, length=5000, beyond=5001)')
  shares = []
  for seed in range(200):
    inputs, answer, _ = task.draw(RNG(seed), (5000,))
    is_after_one = inputs[:, 0] == 1
    shares += [answer[is_after_one].mean()] if is_after_one.sum() > 500 else []
  assert abs(np.mean(shares) - 0.5) < 0.12 and 0.1 < np.var(shares) < 0.15


def test_the_estimate_of_ngrams_counts_what_followed_each_context():
  task = make_recall_task('ngrams(order=3, length=40)')
  episode = task.draw(RNG(1), (40,))
  bits = [int(x) for x in (*episode.inputs[:2, 0], *episode.target[:, 0])]
  for t, estimate in zip(range(2, 40), task.estimate(episode)[:, 0], strict=True):
    after = [bits[i] for i in range(2, t) if bits[i - 2 : i] == bits[t - 2 : t]]
    np.testing.assert_allclose(estimate, (sum(after) + 0.5) / (len(after) + 1), rtol=1e-12)


def test_priority_sort_answers_with_the_vectors_of_highest_priority():
  inputs, answer, start = make_recall_task('priority_sort(bits=3, items=6, highest=4)').draw(RNG(0), (6,))
  assert inputs.shape == (7, 5) and start == 7 and inputs[6].tolist() == [0, 0, 0, 0, 1] and not inputs[:6, 4].any()
  priorities = inputs[:6, 3].tolist()
  assert min(priorities) < 0 < max(priorities) and len(set(priorities)) == 6
  best = sorted(range(6), key=lambda i: priorities[i], reverse=True)[:4]
  assert np.array_equal(answer, inputs[best, :3])


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('cpy', "unknown task 'cpy' .*did you mean 'copy'"),
    ('copy(longest=60)', "task 'copy': option beyond must be at least 61, got 50"),
    ('repeat_copy(repeats=3)', r'option repeats must be even \(a count in the middle would be encoded as 0\), got 3'),
    ('repeat_copy(longest=20, repeats=20)', 'option beyond_repeats must be at least 21, got 10'),
    ('associative_recall(max_items=12)', 'option beyond must be at least 13, got 12'),
    ('associative_recall(min_items=4, max_items=3)', 'option max_items must be at least 4, got 3'),
    ('ngrams(order=70)', "task 'ngrams': option order must be at most 24, got 70"),
    ('ngrams(length=5)', "task 'ngrams': option length must be at least 6, got 5"),
    ('priority_sort(items=10)', "task 'priority_sort': option items must be at least 16, got 10"),
    ('priority_sort(beyond=20)', 'option beyond must be at least 21, got 20'),
    ('associative_recall(bits=1, vectors=3)', '3 bits of an item are too few for 12 items that differ'),
    ('associative_recall(bits=10, vectors=1, beyond=200)', '10 bits of an item are too few for 200 items that differ'),
  ],
)
def test_invalid_specs_are_reported(spec, message):
  with pytest.raises(UserError, match=message):
    make_recall_task(spec)
