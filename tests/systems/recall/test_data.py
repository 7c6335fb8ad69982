"""Batches of recall tasks as a function of (seed, step)."""

import numpy as np
import pytest

from attention_jax.data.batching import Share
from attention_jax.systems.recall.data import RecallBatches, eval_episodes, eval_recall_batches
from attention_jax.systems.recall.tasks import RECALL, make_recall_task


@pytest.mark.parametrize('name', RECALL)
def test_batches_are_a_function_of_seed_and_step(name):
  task = make_recall_task(name)
  batches, same, other = (RecallBatches(task, 4, seed) for seed in (0, 0, 1))
  halves = [RecallBatches(task, 4, 0, Share(i, 2)) for i in range(2)]
  for step in (0, 3, 11):
    batch = batches[step]
    assert all(np.array_equal(x, y) for x, y in zip(batch, same[step], strict=True))
    assert batch.inputs.shape[:2] == batches.shape(step) in batches.shapes
    assert batch.inputs.shape == other[step].inputs.shape
    assert not np.array_equal(batch.target, other[step].target)
    for i, half in enumerate(halves):
      assert all(np.array_equal(x[2 * i : 2 * i + 2], y) for x, y in zip(batch, half[step], strict=True))
    # All episodes of a batch have one size, and are padded with zeros.
    assert (batch.target_mask == batch.target_mask[0]).all() and not batch.target[~batch.target_mask].any()
    assert not batch.inputs[:, batch.target_mask[0].nonzero()[0][-1] + 1 :].any()


def test_unseen_episodes_are_larger_and_every_episode_is_evaluated_once():
  task = make_recall_task('copy(longest=4, beyond=9)')
  assert {len(e.target) for e in eval_episodes(task, 'test')} == {1, 2, 3, 4}
  assert {len(e.target) for e in eval_episodes(task, 'unseen')} == {9}
  batches = eval_recall_batches(task, 'validation', 100)
  assert np.concatenate([b.index for b in batches]).tolist() == [*range(256), *[-1] * 44]
  assert not batches[-1].target_mask[batches[-1].index < 0].any()
  episodes = (eval_episodes(task, split) for split in ('test', 'validation'))
  assert any(not np.array_equal(x.target, y.target) for x, y in zip(*episodes, strict=True))


def test_a_task_of_one_size_has_one_shape():
  batches = RecallBatches(make_recall_task('priority_sort'), 4)
  assert batches.shapes == [(4, 37)] == [batches.shape(7)]  # 20 vectors, a mark, and 16 of the vectors as the answer
