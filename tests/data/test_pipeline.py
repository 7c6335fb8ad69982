"""The stream of batches keeps their order and ends its threads."""

import threading

from attention_jax.data.batching import Batches
from attention_jax.data.pipeline import stream
from tests.data.test_batching import BUCKETS, assert_equal_batches, random_split


def test_stream_keeps_the_order_and_ends_its_threads():
  batches = Batches(random_split(), BUCKETS, 4)
  num_threads = threading.active_count()
  streamed = list(stream(batches, 5, 90))
  assert len(streamed) == 85
  for step, batch in enumerate(streamed, 5):
    assert_equal_batches(batch, batches[step])
  assert list(stream(batches, 5, 5)) == []
  running = stream(batches, 0, 10**9)
  assert_equal_batches(next(running), batches[0])
  running.close()
  for thread in threading.enumerate():
    if thread.name.startswith('grain'):
      thread.join(5)
  assert threading.active_count() == num_threads
