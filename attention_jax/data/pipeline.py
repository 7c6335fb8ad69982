"""The stream of batches that training reads: grain prefetches on threads, the order stays exact."""

from collections.abc import Iterator
from typing import Any


def stream(batches: Any, start: int, stop: int, threads: int = 2, ahead: int = 8) -> Iterator[Any]:
  """Yields `batches[start]` to `batches[stop - 1]` in order, up to `ahead` of them made beforehand by threads.

  No process is spawned. Closing the iterator, or dropping it, ends the threads.
  """
  import grain

  dataset = grain.MapDataset.range(start, stop).map(batches.__getitem__)
  iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)))
  try:
    yield from iterator
  finally:
    iterator.close()
