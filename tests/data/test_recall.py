"""Tasks of remembering: what is shown, what answers it, and batches as a function of seed and step."""

import numpy as np
import pytest

from attention_jax.data.recall import RECALL, RecallBatches, eval_episodes, eval_recall_batches, make_recall_task
from attention_jax.errors import UserError

RNG = np.random.default_rng


def test_copy_shows_vectors_and_a_mark():
  shown, answer = make_recall_task('copy(bits=3)').draw(RNG(0), (5,))
  assert shown.shape == (6, 4) and answer.shape == (5, 3) and set(answer.ravel()) == {0, 1}
  assert np.array_equal(shown[:5], np.pad(answer, ((0, 0), (0, 1)))) and shown[5].tolist() == [0, 0, 0, 1]


def test_repeat_copy_tells_how_often():
  task = make_recall_task('repeat_copy(bits=3, repeats=4)')
  for times in (1, 2, 3, 4):
    shown, answer = task.draw(RNG(0), (2, times))
    vectors = shown[1:3, :3]
    assert shown[0].tolist() == [0, 0, 0, 1, 0] and not shown[1:3, 3:].any()
    np.testing.assert_allclose(shown[3], [0, 0, 0, 0, (times - 2.5) / np.sqrt(5 / 4)], rtol=1e-6)
    assert np.array_equal(answer[:-1, :3], np.tile(vectors, (times, 1))) and not answer[:-1, 3].any()
    assert answer[-1].tolist() == [0, 0, 0, 1]


def test_associative_recall_asks_for_what_comes_next():
  task = make_recall_task('associative_recall(bits=4, each=2)')
  asked = set()
  for i in range(40):
    shown, answer = task.draw(RNG(i), (3,))
    assert shown[:, 4].nonzero()[0].tolist() == [0, 3, 6] and shown[:, 5].nonzero()[0].tolist() == [9, 12]
    items, query = [shown[at + 1 : at + 3, :4] for at in (0, 3, 6)], shown[10:12, :4]
    (place,) = (i for i, item in enumerate(items) if np.array_equal(item, query))
    assert np.array_equal(answer, items[place + 1])
    asked.add(place)
  assert asked == {0, 1}


@pytest.mark.parametrize('name', RECALL)
def test_batches_are_a_function_of_seed_and_step(name):
  task = make_recall_task(name)
  batches, same, other = (RecallBatches(task, 4, seed) for seed in (0, 0, 1))
  halves = [RecallBatches(task, 4, 0, shard, 2) for shard in (0, 1)]
  for step in (0, 3, 11):
    batch = batches[step]
    assert all(np.array_equal(x, y) for x, y in zip(batch, same[step], strict=True))
    assert batch.inputs.shape[:2] in batches.shapes and batch.inputs.shape == other[step].inputs.shape
    assert not np.array_equal(batch.target, other[step].target)
    for shard, half in enumerate(halves):
      assert all(np.array_equal(x[shard::2], y) for x, y in zip(batch, half[step], strict=True))
    shown = batch.target_mask.argmax(1)
    assert len(set(shown)) == 1 and not batch.inputs[:, shown[0] :].any()  # all of one size; nothing is shown any more
    assert not batch.target[~batch.target_mask].any()


def test_unseen_episodes_are_larger_and_every_one_is_measured_once():
  task = make_recall_task('copy(longest=4, beyond=9)')
  assert {len(e.target) for e in eval_episodes(task, 'test')} == {1, 2, 3, 4}
  assert {len(e.target) for e in eval_episodes(task, 'unseen')} == {9}
  found = eval_recall_batches(task, 'validation', 100)
  assert np.concatenate([b.index for b in found]).tolist() == [*range(256), *[-1] * 44]
  filler = found[-1].index < 0
  assert not found[-1].target_mask[filler].any()
  assert any(
    not np.array_equal(x.target, y.target)
    for x, y in zip(eval_episodes(task, 'test'), eval_episodes(task, 'validation'), strict=True)
  )


@pytest.mark.parametrize(
  ('spec', 'said'),
  [
    ('cpy', "unknown task 'cpy' .*did you mean 'copy'"),
    ('copy(longest=0)', 'copy: longest is 0; possible: 1 or more'),
    ('copy(longest=60)', 'copy: beyond is 50; possible: 61 or more'),
    ('repeat_copy(repeats=3)', 'repeats is 3, whose middle would be shown as 0; possible: even numbers'),
    ('repeat_copy(longest=20, repeats=20)', 'beyond_repeats is 10; possible: 21 or more'),
    ('associative_recall(most=12)', 'beyond is 12; possible: 13 or more'),
    ('copy(length=3)', "option of task 'copy': 'length'"),
    ('associative_recall(fewest=1)', 'fewest is 1; possible: 2 or more'),
    ('associative_recall(fewest=4, most=3)', 'most is 3; possible: 4 or more'),
    ('associative_recall(bits=1, each=3)', '3 bits of an item are too few for 12 items'),
  ],
)
def test_wrong_specs_are_one_line(spec, said):
  with pytest.raises(UserError, match=said):
    make_recall_task(spec)
