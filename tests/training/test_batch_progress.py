"""Long evaluations log their progress, at intervals that double."""

from attention_jax.training import batch_progress
from attention_jax.training.batch_progress import with_progress
from attention_jax.training.peers import map_batches


def test_lines_have_the_time_left_if_the_number_of_batches_is_known(time):
  lines = []
  with batch_progress.batch_progress('evaluating test', lines.append):
    for _ in map_batches(lambda batch: {}, range(100)):
      time.now += 1
    for _ in with_progress(range(200), 0):
      time.now += 1
  assert lines == [
    'evaluating test: batch 15 of 100, 1.4 min left',
    'evaluating test: batch 45 of 100, 0.9 min left',
    'evaluating test: 5 batches',
    'evaluating test: 125 batches',
  ]


def test_short_evaluations_and_batches_outside_of_evaluations_log_nothing(time):
  lines = []
  with batch_progress.batch_progress('evaluating test', lines.append):
    assert list(with_progress([1, 2], 2)) == [1, 2]
  time.now += 1000
  assert list(with_progress([1, 2], 2)) == [1, 2] and not lines
