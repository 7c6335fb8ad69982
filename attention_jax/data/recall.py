"""Tasks of remembering: a sequence of vectors of bits is shown, then its answer is asked for. RECALL.

Graves, Wayne & Danihelka 2014, sections 4.1 to 4.3. An episode is of some size (how many vectors, how often ...); the
split 'unseen' has larger ones than any that was trained on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError
from attention_jax.specs import bind

Draw = np.random.Generator
Sizes = tuple[int, ...]
NUM_EPISODES = {'validation': 256, 'test': 256, 'unseen': 256}
SHAPES = 2  # lengths that training episodes are padded to


class Episode(NamedTuple):
  """What is shown [N, I], and the bits [A, O] that answer it in the A steps after that."""

  inputs: np.ndarray
  target: np.ndarray


class RecallTask(NamedTuple):
  """A row of RECALL with its options.

  Attributes:
    input_features, output_features: I and O.
    draw: (random numbers, size) -> Episode; how many steps it takes is a function of the size alone.
    sizes: lowest and highest of each number in a size, while training.
    beyond: the size of the episodes of the split 'unseen'.
  """

  input_features: int
  output_features: int
  draw: Callable[[Draw, Sizes], Episode]
  sizes: tuple[tuple[int, int], ...]
  beyond: Sizes

  def size(self, draw: Draw) -> Sizes:
    """A size as training has them, each alike."""
    return tuple(int(draw.integers(low, high + 1)) for low, high in self.sizes)

  def steps(self, size: Sizes) -> int:
    shown, answer = self.draw(np.random.default_rng(0), size)
    return len(shown) + len(answer)


class RecallBatch(NamedTuple):
  """B episodes of up to T steps.

  Attributes:
    inputs: float32 [B, T, I], 0 after what is shown.
    target: int32 [B, T, O], bits.
    target_mask: bool [B, T], where an answer is asked for.
    index: int32 [B], the row in its split; -1 = a filler row.
  """

  inputs: np.ndarray
  target: np.ndarray
  target_mask: np.ndarray
  index: np.ndarray


def copy(*, bits: int = 8, longest: int = 20, beyond: int = 50) -> RecallTask:
  """Vectors, then a mark; the answer is the vectors. Section 4.1."""
  _check('copy', 1, bits=bits, longest=longest)
  _check('copy', longest + 1, beyond=beyond)

  def draw(rng: Draw, size: Sizes) -> Episode:
    vectors = _bits(rng, size[0], bits)
    return Episode(_joined([_wide(vectors, 1), _mark(bits, 1, 0)]), vectors)

  return RecallTask(bits + 1, bits, draw, ((1, longest),), (beyond,))


def repeat_copy(
  *, bits: int = 8, longest: int = 10, repeats: int = 10, beyond: int = 20, beyond_repeats: int = 10
) -> RecallTask:
  """A mark, vectors, then a number; the answer is the vectors as often as that, and a mark at the end. Section 4.2.

  Numbers are brought to mean 0 and variance 1 over those that training has.
  """
  _check('repeat_copy', 1, bits=bits, longest=longest, repeats=repeats)
  _check('repeat_copy', longest, beyond=beyond)
  _check('repeat_copy', repeats + (beyond == longest), beyond_repeats=beyond_repeats)
  if repeats % 2:
    raise UserError(f'repeat_copy: repeats is {repeats}, whose middle would be shown as 0; possible: even numbers')
  counts = np.arange(1, repeats + 1)
  mean, deviation = counts.mean(), counts.std()

  def draw(rng: Draw, size: Sizes) -> Episode:
    length, times = size
    vectors = _bits(rng, length, bits)
    number = _mark(bits, 2, 1) * (times - mean) / deviation
    answer = _joined([_wide(np.tile(vectors, (times, 1)), 1), _mark(bits, 1, 0)])
    return Episode(_joined([_mark(bits, 2, 0), _wide(vectors, 2), number]), answer)

  return RecallTask(bits + 2, bits + 1, draw, ((1, longest), (1, repeats)), (beyond, beyond_repeats))


def associative_recall(*, bits: int = 6, each: int = 3, fewest: int = 2, most: int = 6, beyond: int = 12) -> RecallTask:
  """Items of `each` vectors, a mark before each; then one of them again between other marks; the answer is the next.

  Section 4.3. Items of an episode differ, so that what comes next is never in doubt.
  """
  _check('associative_recall', 1, bits=bits, each=each)
  _check('associative_recall', 2, fewest=fewest)
  _check('associative_recall', fewest, most=most)
  _check('associative_recall', most + 1, beyond=beyond)
  if 2 ** (bits * each) < 4 * max(most, beyond):
    raise UserError(f'associative_recall: {bits * each} bits of an item are too few for {max(most, beyond)} items')

  def draw(rng: Draw, size: Sizes) -> Episode:
    items = _bits(rng, size[0] * each, bits).reshape(size[0], each, bits)
    while len(np.unique(items.reshape(size[0], -1), axis=0)) < size[0]:
      items = _bits(rng, size[0] * each, bits).reshape(size[0], each, bits)
    asked = int(rng.integers(size[0] - 1))
    shown = [part for item in items for part in (_mark(bits, 2, 0), _wide(item, 2))]
    query = [_mark(bits, 2, 1), _wide(items[asked], 2), _mark(bits, 2, 1)]
    return Episode(_joined(shown + query), items[asked + 1])

  return RecallTask(bits + 2, bits, draw, ((fewest, most),), (beyond,))


RECALL: Mapping[str, Callable[..., RecallTask]] = {
  'associative_recall': associative_recall,
  'copy': copy,
  'repeat_copy': repeat_copy,
}


def make_recall_task(spec: str) -> RecallTask:
  """The task of `config.data.task`. Raises: UserError for one that does not exist."""
  _, row, options = bind(spec, RECALL, 'task')
  return row(**options)


def _check(task: str, least: int, **numbers: int) -> None:
  for option, value in numbers.items():
    if value < least:
      raise UserError(f'{task}: {option} is {value}; possible: {least} or more')


def _bits(rng: Draw, rows: int, bits: int) -> np.ndarray:
  return rng.integers(0, 2, (rows, bits)).astype(np.float32)


def _wide(vectors: np.ndarray, channels: int) -> np.ndarray:
  """Vectors with channels of marks beside them, all 0."""
  return np.pad(vectors, ((0, 0), (0, channels)))


def _mark(bits: int, channels: int, channel: int) -> np.ndarray:
  """A vector of zeros with a 1 in one channel of marks."""
  return np.eye(bits + channels, dtype=np.float32)[None, bits + channel]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(parts).astype(np.float32)


def eval_episodes(task: RecallTask, split: str) -> list[Episode]:
  """The episodes of a split that is measured, always the same."""
  rng = np.random.default_rng((0, *split.encode()))
  sizes = [task.beyond if split == 'unseen' else task.size(rng) for _ in range(NUM_EPISODES[split])]
  return [task.draw(rng, size) for size in sizes]


class RecallBatches:
  """Training batches without end: `batches[step]`, new episodes in each, all of one size, a function of (seed, step).

  The size is a function of the step alone, so that several seeds can be trained side by side.
  """

  shape_names = 'rows, steps'

  def __init__(self, task: RecallTask, size: int, seed: int = 0, shard: int = 0, shards: int = 1):
    """Args: size, rows of a batch; this process gets the rows `shard::shards`."""
    if size < 1 or size % shards:
      raise UserError(f'the {size} rows of a batch cannot be divided among {shards} processes')
    self._task, self._size, self._seed, self._rows = task, size, seed, np.arange(size)[shard::shards]
    longest = task.steps(tuple(high for _, high in task.sizes))
    self._lengths = sorted({-(-longest * part // SHAPES) for part in range(1, SHAPES + 1)})

  def __len__(self) -> int:
    """Batches in an epoch: there is none, every episode is new."""
    return 1

  @property
  def shapes(self) -> list[tuple[int, int]]:
    """The (rows, steps) that occur, each one compilation."""
    return [(len(self._rows), length) for length in self._lengths]

  def __getitem__(self, step: int) -> RecallBatch:
    size = self._task.size(np.random.default_rng(step))
    drawn = [self._task.draw(np.random.default_rng((self._seed, step, int(row))), size) for row in self._rows]
    steps = len(drawn[0].inputs) + len(drawn[0].target)
    length = next(length for length in self._lengths if length >= steps)
    return gather_episodes(self._task, drawn, self._rows, length)


def eval_recall_batches(task: RecallTask, split: str, size: int) -> list[RecallBatch]:
  """Batches for evaluation: every episode once, as long as the longest of the split."""
  drawn = eval_episodes(task, split)
  longest = max(len(episode.inputs) + len(episode.target) for episode in drawn)
  parts = [np.arange(start, start + size) for start in range(0, len(drawn), size)]
  of = lambda rows: [drawn[row] if row < len(drawn) else None for row in rows]
  return [gather_episodes(task, of(rows), np.where(rows < len(drawn), rows, -1), longest) for rows in parts]


def gather_episodes(task: RecallTask, drawn: Sequence[Episode | None], index: np.ndarray, length: int) -> RecallBatch:
  """Episodes side by side, padded to a length; None is a filler row."""
  inputs = np.zeros((len(drawn), length, task.input_features), np.float32)
  target = np.zeros((len(drawn), length, task.output_features), np.int32)
  real = np.zeros((len(drawn), length), bool)
  for row, episode in enumerate(drawn):
    if episode is None:
      continue
    shown, steps = len(episode.inputs), len(episode.inputs) + len(episode.target)
    inputs[row, :shown] = episode.inputs
    target[row, shown:steps], real[row, shown:steps] = episode.target, True
  return RecallBatch(inputs, target, real, np.asarray(index, np.int32))
