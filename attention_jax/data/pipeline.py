"""Stream of training batches: grain prefetches on threads and keeps their order."""

from collections.abc import Iterator
from typing import Any

MAX_STEPS_WITHOUT_EPOCHS = 1000  # nearly every shape of data without epochs occurs within this many steps


def first_of_each_shape(batches: Any, start: int, stop: int) -> Iterator[Any]:
  """Yields the first batch of each shape. Arguments: see `first_step_of_each_shape`."""
  return (batches[step] for step in first_step_of_each_shape(batches, start, stop))


def first_step_of_each_shape(batches: Any, start: int, stop: int) -> Iterator[int]:
  """Yields the first step of each shape among `batches[start]` to `batches[stop - 1]`, in their order.

  Stops after an epoch, or, for data without epochs (of length 1), after MAX_STEPS_WITHOUT_EPOCHS steps.

  Args:
    batches: batches by step, such as batching.Batches: they have a length, `shapes` and `shape(step)`.
    start: the first step.
    stop: the step after the last one.
  """
  remaining_shapes = set(batches.shapes)
  steps = epoch_steps(batches, MAX_STEPS_WITHOUT_EPOCHS)
  for step in range(start, min(stop, start + steps)):
    shape = batches.shape(step)
    if shape in remaining_shapes:
      remaining_shapes.remove(shape)
      yield step
    if not remaining_shapes:
      return


def epoch_steps(batches: Any, otherwise: int) -> int:
  """Returns the number of steps of an epoch; `otherwise` for data without epochs, whose length is 1."""
  return len(batches) if len(batches) > 1 else otherwise


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
