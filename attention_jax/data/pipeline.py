"""Stream of training batches: grain prefetches on threads and keeps their order."""

from collections.abc import Iterator
from typing import Any


def stream(batches: Any, start: int, stop: int, threads: int = 2, ahead: int = 8) -> Iterator[Any]:
  """Yields `batches[start]` to `batches[stop - 1]` in order.

  No process is spawned. Closing or dropping the iterator ends the threads.

  Args:
    batches: batches by step.
    start: the first step.
    stop: the step after the last one.
    threads: number of threads that make batches.
    ahead: number of batches that are made before they are needed.
  """
  import grain

  dataset = grain.MapDataset.range(start, stop).map(batches.__getitem__)
  iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)))
  try:
    yield from iterator
  finally:
    iterator.close()
