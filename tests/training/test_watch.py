"""Long evaluations log their progress, at intervals that double."""

from attention_jax.training.peers import map_batches
from attention_jax.training.watch import BatchProgress


def evaluate(time, batches, watch):
  for _ in map_batches(lambda batch: {}, batches, watch):
    time.now += 1


def test_long_evaluations_have_lines_with_the_time_left_if_the_number_of_batches_is_known(time):
  lines = []
  evaluate(time, range(14), BatchProgress('evaluating test', lines.append))
  assert not lines
  watch = BatchProgress('evaluating test', lines.append)
  evaluate(time, range(100), watch)
  evaluate(time, (i for i in range(200)), watch)
  assert lines == [
    'evaluating test: batch 15 of 100, 1.4 min left',
    'evaluating test: batch 45 of 100, 0.9 min left',
    'evaluating test: 5 batches',
    'evaluating test: 125 batches',
  ]
