"""Recall tasks: inputs, answers, and batches as a function of (seed, step)."""

import numpy as np
import pytest

from attention_jax.data.batching import Share
from attention_jax.data.recall import RECALL, RecallBatches, eval_episodes, eval_recall_batches, make_recall_task
from attention_jax.errors import UserError

RNG = np.random.default_rng


def test_copy_shows_vectors_and_a_mark():
  inputs, answer = make_recall_task('copy(bits=3)').draw(RNG(0), (5,))
  assert inputs.shape == (6, 4) and answer.shape == (5, 3) and set(answer.ravel()) == {0, 1}
  assert np.array_equal(inputs[:5], np.pad(answer, ((0, 0), (0, 1)))) and inputs[5].tolist() == [0, 0, 0, 1]


def test_repeat_copy_shows_the_number_of_repeats():
  task = make_recall_task('repeat_copy(bits=3, repeats=4)')
  for times in (1, 2, 3, 4):
    inputs, answer = task.draw(RNG(0), (2, times))
    vectors = inputs[1:3, :3]
    assert inputs[0].tolist() == [0, 0, 0, 1, 0] and not inputs[1:3, 3:].any()
    np.testing.assert_allclose(inputs[3], [0, 0, 0, 0, (times - 2.5) / np.sqrt(5 / 4)], rtol=1e-6)
    assert np.array_equal(answer[:-1, :3], np.tile(vectors, (times, 1))) and not answer[:-1, 3].any()
    assert answer[-1].tolist() == [0, 0, 0, 1]


def test_associative_recall_answers_with_the_next_item():
  task = make_recall_task('associative_recall(bits=4, vectors=2)')
  positions = set()
  for i in range(40):
    inputs, answer = task.draw(RNG(i), (3,))
    assert inputs[:, 4].nonzero()[0].tolist() == [0, 3, 6] and inputs[:, 5].nonzero()[0].tolist() == [9, 12]
    items = [inputs[mark + 1 : mark + 3, :4] for mark in (0, 3, 6)]
    query = inputs[10:12, :4]
    (position,) = (i for i, item in enumerate(items) if np.array_equal(item, query))
    assert np.array_equal(answer, items[position + 1])
    positions.add(position)
  assert positions == {0, 1}


@pytest.mark.parametrize('name', RECALL)
def test_batches_are_a_function_of_seed_and_step(name):
  task = make_recall_task(name)
  batches, same, other = (RecallBatches(task, 4, seed) for seed in (0, 0, 1))
  halves = [RecallBatches(task, 4, 0, Share(i, 2)) for i in range(2)]
  for step in (0, 3, 11):
    batch = batches[step]
    assert all(np.array_equal(x, y) for x, y in zip(batch, same[step], strict=True))
    assert (
      batch.inputs.shape[:2] == batches.shape(step) in batches.shapes and batch.inputs.shape == other[step].inputs.shape
    )
    assert not np.array_equal(batch.target, other[step].target)
    for i, half in enumerate(halves):
      assert all(np.array_equal(x[2 * i : 2 * i + 2], y) for x, y in zip(batch, half[step], strict=True))
    num_shown = batch.target_mask.argmax(1)
    # All episodes of a batch have one size, and inputs end where the answer begins.
    assert len(set(num_shown)) == 1 and not batch.inputs[:, num_shown[0] :].any()
    assert not batch.target[~batch.target_mask].any()


def test_unseen_episodes_are_larger_and_each_is_evaluated_once():
  task = make_recall_task('copy(longest=4, beyond=9)')
  assert {len(e.target) for e in eval_episodes(task, 'test')} == {1, 2, 3, 4}
  assert {len(e.target) for e in eval_episodes(task, 'unseen')} == {9}
  batches = eval_recall_batches(task, 'validation', 100)
  assert np.concatenate([b.index for b in batches]).tolist() == [*range(256), *[-1] * 44]
  filler = batches[-1].index < 0
  assert not batches[-1].target_mask[filler].any()
  assert any(
    not np.array_equal(x.target, y.target)
    for x, y in zip(eval_episodes(task, 'test'), eval_episodes(task, 'validation'), strict=True)
  )


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('cpy', "unknown task 'cpy' .*did you mean 'copy'"),
    ('copy(longest=0)', "task 'copy': option longest must be at least 1, got 0"),
    ('copy(longest=60)', "task 'copy': option beyond must be at least 61, got 50"),
    ('repeat_copy(repeats=3)', r'option repeats must be even \(a count in the middle would be encoded as 0\), got 3'),
    ('repeat_copy(longest=20, repeats=20)', 'option beyond_repeats must be at least 21, got 10'),
    ('associative_recall(max_items=12)', 'option beyond must be at least 13, got 12'),
    ('copy(length=3)', "option of task 'copy': 'length'"),
    ('associative_recall(min_items=1)', 'option min_items must be at least 2, got 1'),
    ('associative_recall(min_items=4, max_items=3)', 'option max_items must be at least 4, got 3'),
    ('associative_recall(bits=1, vectors=3)', '3 bits of an item are too few for 12 items that differ'),
  ],
)
def test_invalid_specs_are_reported(spec, message):
  with pytest.raises(UserError, match=message):
    make_recall_task(spec)
