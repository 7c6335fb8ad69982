"""Batches of recall tasks, as a function of (seed, step) or of the split."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.data.batching import WHOLE_BATCH, Share
from attention_jax.errors import UserError
from attention_jax.systems.recall.tasks import Episode, EpisodeSize, RecallTask

NUM_EPISODES = {'validation': 256, 'test': 256, 'unseen': 256}
NUM_LENGTHS = 2  # largest number of lengths that training episodes are padded to


class RecallBatch(NamedTuple):
  """B episodes of up to T steps; I and O are the sizes of vectors, see recall_tasks.RecallTask.

  Attributes:
    inputs: float32 [B, T, I], 0 after the vectors shown.
    target: int32 [B, T, O], bits.
    target_mask: bool [B, T], True = a step of the answer.
    index: int32 [B], the row in the evaluation split, or in the whole batch of training; -1 = a filler row.
  """

  inputs: np.ndarray
  target: np.ndarray
  target_mask: np.ndarray
  index: np.ndarray


def eval_episodes(task: RecallTask, split: str) -> list[Episode]:
  """Returns the episodes of an evaluation split, a function of the task and the split alone."""
  rng = np.random.default_rng((0, *split.encode()))
  sizes = [task.unseen_size if split == 'unseen' else task.draw_size(rng) for _ in range(NUM_EPISODES[split])]
  return [task.draw(rng, size) for size in sizes]


class RecallBatches:
  """Endless training batches: `batches[step]` has new episodes, all of one size, and is a function of (seed, step).

  The size of the episodes is a function of the step alone, so that several seeds can be trained side by side.
  """

  shape_names = 'rows, steps'
  min_row_positions = sum  # (steps,) -> the number of steps of a row; see systems.base.BatchSequence

  def __init__(self, task: RecallTask, size: int, seed: int = 0, share: Share = WHOLE_BATCH):
    """Defines the batches of a task.

    Args:
      task: draws the episodes.
      size: rows of a batch.
      seed: seed of the episodes.
      share: the rows of every batch that this process reads.

    Raises:
      UserError: if there are no rows, or if they cannot be divided among the processes.
    """
    if size < 1:
      raise UserError(f'the rows of a batch must be at least 1, got {size}')
    self._task = task
    self._seed = seed
    self._rows = share.select(np.arange(size))
    shortest, longest = map(task.num_steps, zip(*task.size_ranges, strict=True))
    lengths = {-(-longest * part // NUM_LENGTHS) for part in range(1, NUM_LENGTHS + 1)}
    self._lengths = sorted(length for length in lengths if length >= shortest)

  def __len__(self) -> int:
    """Number of batches in an epoch: 1, because every episode is new and there are no epochs."""
    return 1

  @property
  def shapes(self) -> list[tuple[int, int]]:
    """The (rows, steps of an episode) that occur, each of which is compiled once."""
    return [(len(self._rows), length) for length in self._lengths]

  def shape(self, step: int) -> tuple[int, int]:
    """Returns the (rows, steps of an episode) of `batches[step]`."""
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
    index: as RecallBatch.index.
    length: the number of steps to pad to.
  """
  inputs = np.zeros((len(episodes), length, task.input_features), np.float32)
  target = np.zeros((len(episodes), length, task.output_features), np.int32)
  target_mask = np.zeros((len(episodes), length), bool)
  for row, episode in enumerate(episodes):
    if episode is None:
      continue
    answer = slice(episode.answer_start, episode.num_steps)
    inputs[row, : len(episode.inputs)] = episode.inputs
    target[row, answer] = episode.target
    target_mask[row, answer] = True
  return RecallBatch(inputs, target, target_mask, np.asarray(index, np.int32))
