"""Recall tasks: a sequence of bit vectors is shown, then the model has to reproduce an answer from memory.

Graves, Wayne & Danihelka 2014, sections 4.1 to 4.3. The size of an episode is a tuple of numbers (how many vectors, how
many repeats ...); the split 'unseen' has larger episodes than any in training.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from attention_jax.data.batching import EVERYTHING, Share
from attention_jax.errors import UserError
from attention_jax.specs import Range, Size, bind

EpisodeSize = tuple[int, ...]
NUM_EPISODES = {'validation': 256, 'test': 256, 'unseen': 256}
NUM_LENGTHS = 2  # number of lengths that training episodes are padded to


class Episode(NamedTuple):
  """One sequence: the vectors shown [N, I], and the answer in the A steps after them, bits [A, O]."""

  inputs: np.ndarray
  target: np.ndarray

  @property
  def num_steps(self) -> int:
    """N + A."""
    return len(self.inputs) + len(self.target)


class RecallTask(NamedTuple):
  """A row of RECALL with its options.

  Attributes:
    input_features: I.
    output_features: O.
    draw: (random numbers, size) -> Episode; the number of steps is a function of the size alone.
    size_ranges: lowest and highest value of each number in a size, in training.
    unseen_size: the size of the episodes of the split 'unseen'.
  """

  input_features: int
  output_features: int
  draw: Callable[[np.random.Generator, EpisodeSize], Episode]
  size_ranges: tuple[tuple[int, int], ...]
  unseen_size: EpisodeSize

  def draw_size(self, rng: np.random.Generator) -> EpisodeSize:
    """Draws a size of training episodes, uniformly."""
    return tuple(int(rng.integers(low, high + 1)) for low, high in self.size_ranges)

  def num_steps(self, size: EpisodeSize) -> int:
    """Returns the number of steps of every episode of this size."""
    return self.draw(np.random.default_rng(0), size).num_steps


class RecallBatch(NamedTuple):
  """B episodes of up to T steps.

  Attributes:
    inputs: float32 [B, T, I], 0 after the vectors shown.
    target: int32 [B, T, O], bits.
    target_mask: bool [B, T], True = a step of the answer.
    index: int32 [B], the row in its split; -1 = a filler row.
  """

  inputs: np.ndarray
  target: np.ndarray
  target_mask: np.ndarray
  index: np.ndarray


def copy(*, bits: Size = 8, longest: Size = 20, beyond: int = 50) -> RecallTask:
  """Vectors, then a mark; the answer is the vectors. Section 4.1.

  Args:
    bits: bits of a vector.
    longest: highest number of vectors in training.
    beyond: number of vectors of the split 'unseen'.

  Raises:
    UserError: if `beyond` is not greater than `longest`.
  """
  _check_minimum('copy', 'beyond', beyond, longest + 1)

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    vectors = _draw_bits(rng, size[0], bits)
    return Episode(_concatenate([_add_channels(vectors, 1), _mark(bits, 1, 0)]), vectors)

  return RecallTask(bits + 1, bits, draw, ((1, longest),), (beyond,))


def repeat_copy(
  *, bits: Size = 8, longest: Size = 10, repeats: Size = 10, beyond: int = 20, beyond_repeats: int = 10
) -> RecallTask:
  """A mark, vectors, then a number; the answer is the vectors repeated that many times, and a final mark. Section 4.2.

  Numbers are normalised to mean 0 and variance 1 over those of training.

  Args:
    bits: bits of a vector.
    longest: highest number of vectors in training.
    repeats: highest number of repeats in training.
    beyond: number of vectors of the split 'unseen'.
    beyond_repeats: number of repeats of the split 'unseen'.

  Raises:
    UserError: if a number of the split 'unseen' is below that of training, if both are equal to those of training, or
      if `repeats` is odd.
  """
  _check_minimum('repeat_copy', 'beyond', beyond, longest)
  min_beyond_repeats = repeats + 1 if beyond == longest else repeats
  _check_minimum('repeat_copy', 'beyond_repeats', beyond_repeats, min_beyond_repeats)
  if repeats % 2:
    raise UserError(
      f"task 'repeat_copy': option repeats must be even (a count in the middle would be encoded as 0), got {repeats}"
    )
  counts = np.arange(1, repeats + 1)
  mean = counts.mean()
  deviation = counts.std()

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    length, times = size
    vectors = _draw_bits(rng, length, bits)
    number = _mark(bits, 2, 1) * (times - mean) / deviation
    answer = _concatenate([_add_channels(np.tile(vectors, (times, 1)), 1), _mark(bits, 1, 0)])
    return Episode(_concatenate([_mark(bits, 2, 0), _add_channels(vectors, 2), number]), answer)

  return RecallTask(bits + 2, bits + 1, draw, ((1, longest), (1, repeats)), (beyond, beyond_repeats))


def associative_recall(
  *, bits: Size = 6, vectors: Size = 3, min_items: Annotated[int, Range(2)] = 2, max_items: int = 6, beyond: int = 12
) -> RecallTask:
  """Items of several vectors, each after a mark, then one of them between query marks; the answer is the item after it.

  Section 4.3. The items of an episode differ, so that the next item is unambiguous.

  Args:
    bits: bits of a vector.
    vectors: vectors of an item.
    min_items: lowest number of items in training.
    max_items: highest number of items in training.
    beyond: number of items of the split 'unseen'.

  Raises:
    UserError: if `max_items` is below `min_items`, if `beyond` is not greater than `max_items`, or if the bits of an
      item are too few for items that differ.
  """
  _check_minimum('associative_recall', 'max_items', max_items, min_items)
  _check_minimum('associative_recall', 'beyond', beyond, max_items + 1)
  item_bits = bits * vectors
  most_items = max(max_items, beyond)
  if 2**item_bits < 4 * most_items:
    raise UserError(
      f"task 'associative_recall': {item_bits} bits of an item are too few for {most_items} items that differ"
    )

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    num_items = size[0]
    items = _draw_bits(rng, num_items * vectors, bits).reshape(num_items, vectors, bits)
    while len(np.unique(items.reshape(num_items, -1), axis=0)) < num_items:
      items = _draw_bits(rng, num_items * vectors, bits).reshape(num_items, vectors, bits)
    query = int(rng.integers(num_items - 1))
    shown = [part for item in items for part in (_mark(bits, 2, 0), _add_channels(item, 2))]
    shown += [_mark(bits, 2, 1), _add_channels(items[query], 2), _mark(bits, 2, 1)]
    return Episode(_concatenate(shown), items[query + 1])

  return RecallTask(bits + 2, bits, draw, ((min_items, max_items),), (beyond,))


RECALL: Mapping[str, Callable[..., RecallTask]] = {
  'associative_recall': associative_recall,
  'copy': copy,
  'repeat_copy': repeat_copy,
}


def make_recall_task(spec: str) -> RecallTask:
  """Returns the task of `config.data.task`, a spec of RECALL.

  Raises:
    UserError: for an unknown task or an invalid option.
  """
  _, row, options = bind(spec, RECALL, 'task')
  return row(**options)


def _check_minimum(task: str, option: str, value: int, minimum: int) -> None:
  """Raises UserError for an option below a minimum that depends on other options."""
  if value < minimum:
    raise UserError(f"task '{task}': option {option} must be at least {minimum}, got {value}")


def _draw_bits(rng: np.random.Generator, rows: int, bits: int) -> np.ndarray:
  return rng.integers(0, 2, (rows, bits)).astype(np.float32)


def _add_channels(vectors: np.ndarray, channels: int) -> np.ndarray:
  """Vectors with channels for marks appended, all 0."""
  return np.pad(vectors, ((0, 0), (0, channels)))


def _mark(bits: int, channels: int, channel: int) -> np.ndarray:
  """A vector of zeros with a 1 in one of the channels for marks, [1, bits + channels]."""
  return np.eye(bits + channels, dtype=np.float32)[None, bits + channel]


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(parts).astype(np.float32)


def eval_episodes(task: RecallTask, split: str) -> list[Episode]:
  """Returns the episodes of an evaluation split, a function of the task and the split alone."""
  rng = np.random.default_rng((0, *split.encode()))
  sizes = [task.unseen_size if split == 'unseen' else task.draw_size(rng) for _ in range(NUM_EPISODES[split])]
  return [task.draw(rng, size) for size in sizes]


class RecallBatches:
  """Endless training batches: `batches[step]` has new episodes, all of one size, and is a function of (seed, step).

  The size is a function of the step alone, so that several seeds can be trained side by side.
  """

  shape_names = 'rows, steps'

  def __init__(self, task: RecallTask, size: int, seed: int = 0, share: Share = EVERYTHING):
    """Defines the batches of a task.

    Args:
      task: draws the episodes.
      size: rows of a batch.
      seed: seed of the episodes.
      share: the rows of every batch that this process reads.

    Raises:
      UserError: if the rows cannot be divided among the processes.
    """
    if size < 1:
      raise UserError(f'the rows of a batch must be at least 1, got {size}')
    self._task = task
    self._seed = seed
    self._rows = share.select(np.arange(size))
    longest = task.num_steps(tuple(high for _, high in task.size_ranges))
    self._lengths = sorted({-(-longest * part // NUM_LENGTHS) for part in range(1, NUM_LENGTHS + 1)})

  def __len__(self) -> int:
    """Batches in an epoch: 1, as every episode is new and there are no epochs."""
    return 1

  @property
  def shapes(self) -> list[tuple[int, int]]:
    """The (rows, steps) that occur, each of which is compiled once."""
    return [(len(self._rows), length) for length in self._lengths]

  def shape(self, step: int) -> tuple[int, int]:
    """Returns the (rows, steps) of a step."""
    num_steps = self._task.num_steps(self._draw_size(step))
    return len(self._rows), next(length for length in self._lengths if length >= num_steps)

  def __getitem__(self, step: int) -> RecallBatch:
    size = self._draw_size(step)
    episodes = [self._draw(step, int(row), size) for row in self._rows]
    return gather_episodes(self._task, episodes, self._rows, self.shape(step)[1])

  def _draw_size(self, step: int) -> EpisodeSize:
    return self._task.draw_size(np.random.default_rng(step))

  def _draw(self, step: int, row: int, size: EpisodeSize) -> Episode | None:
    """Draws the episode of a row; None for a filler row."""
    return None if row < 0 else self._task.draw(np.random.default_rng((self._seed, step, row)), size)


def eval_recall_batches(task: RecallTask, split: str, size: int) -> list[RecallBatch]:
  """Returns batches of `size` rows for evaluation: every episode once, padded to the longest of the split.

  Args:
    task: the task of the episodes.
    split: a key of NUM_EPISODES.
    size: rows of a batch, with filler rows in the last batch.
  """
  episodes = eval_episodes(task, split)
  longest = max(episode.num_steps for episode in episodes)
  batches = []
  for start in range(0, len(episodes), size):
    rows = np.arange(start, start + size)
    batch = [episodes[row] if row < len(episodes) else None for row in rows]
    batches.append(gather_episodes(task, batch, np.where(rows < len(episodes), rows, -1), longest))
  return batches


def gather_episodes(
  task: RecallTask, episodes: Sequence[Episode | None], index: np.ndarray, length: int
) -> RecallBatch:
  """Returns episodes as a batch.

  Args:
    task: the task of the episodes.
    episodes: the rows; None = a filler row.
    index: the row of each episode in its split; -1 = a filler row.
    length: the number of steps to pad to.
  """
  inputs = np.zeros((len(episodes), length, task.input_features), np.float32)
  target = np.zeros((len(episodes), length, task.output_features), np.int32)
  target_mask = np.zeros((len(episodes), length), bool)
  for row, episode in enumerate(episodes):
    if episode is None:
      continue
    num_shown = len(episode.inputs)
    inputs[row, :num_shown] = episode.inputs
    target[row, num_shown : episode.num_steps] = episode.target
    target_mask[row, num_shown : episode.num_steps] = True
  return RecallBatch(inputs, target, target_mask, np.asarray(index, np.int32))
