"""Recall tasks: a sequence of vectors is shown, and the model has to produce an answer from memory.

Graves, Wayne & Danihelka 2014, sections 4.1 to 4.5. The size of an episode is a tuple of numbers (how many vectors, how
many repeats ...); the split 'unseen' has larger episodes than any in training.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from attention_jax.errors import UserError
from attention_jax.specs import Range, Size, bind

EpisodeSize = tuple[int, ...]
MAX_ORDER = 24  # every episode of an N-gram task draws a table of 2^(N - 1) probabilities


class Episode(NamedTuple):
  """One sequence of T steps.

  Attributes:
    inputs: the vectors shown in the first N steps, [N, I].
    target: the answer in the last A steps, bits [A, O].
    answer_start: number of steps before the answer, T - A. It is N unless the answer begins while vectors are shown.
  """

  inputs: np.ndarray
  target: np.ndarray
  answer_start: int

  @property
  def num_steps(self) -> int:
    """Number of steps, T."""
    return self.answer_start + len(self.target)


class RecallTask(NamedTuple):
  """A row of RECALL with its options.

  Attributes:
    input_features: I, the features of an input vector.
    output_features: O, the bits of an answer vector.
    draw: (random generator, size) -> Episode; the number of steps is a function of the size alone.
    size_ranges: lowest and highest value of each number in a size, in training.
    unseen_size: the size of the episodes of the split 'unseen'.
    estimate: episode -> the probability [A, O] that each bit of the answer is 1: the best possible prediction from the
      bits before it. None if the inputs before the answer determine it.
  """

  input_features: int
  output_features: int
  draw: Callable[[np.random.Generator, EpisodeSize], Episode]
  size_ranges: tuple[tuple[int, int], ...]
  unseen_size: EpisodeSize
  estimate: Callable[[Episode], np.ndarray] | None = None

  def draw_size(self, rng: np.random.Generator) -> EpisodeSize:
    """Draws a size of training episodes, uniformly."""
    return tuple(int(rng.integers(low, high + 1)) for low, high in self.size_ranges)

  def num_steps(self, size: EpisodeSize) -> int:
    """Returns the number of steps of every episode of this size."""
    return self.draw(np.random.default_rng(0), size).num_steps


def copy(*, bits: Size = 8, longest: Size = 20, beyond: int = 50) -> RecallTask:
  """Vectors, then a mark; the answer is the vectors. Section 4.1.

  Args:
    bits: bits of a vector.
    longest: highest number of vectors of an episode in training.
    beyond: number of vectors of an episode of the split 'unseen'.

  Raises:
    UserError: if `beyond` is not greater than `longest`.
  """
  _check_minimum('copy', 'beyond', beyond, longest + 1)

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    vectors = _draw_bits(rng, size[0], bits)
    return _make_episode([_add_channels(vectors, 1), _mark(bits, 1, 0)], vectors)

  return RecallTask(bits + 1, bits, draw, ((1, longest),), (beyond,))


def repeat_copy(
  *, bits: Size = 8, longest: Size = 10, repeats: Size = 10, beyond: int = 20, beyond_repeats: int = 10
) -> RecallTask:
  """A mark, vectors, then a number; the answer is the vectors repeated that many times, and a final mark. Section 4.2.

  Numbers are normalised to mean 0 and variance 1 over those of training.

  Args:
    bits: bits of a vector.
    longest: highest number of vectors of an episode in training.
    repeats: highest number of repeats in training.
    beyond: number of vectors of an episode of the split 'unseen'.
    beyond_repeats: number of repeats in the split 'unseen'.

  Raises:
    UserError: if `beyond` is below `longest` or `beyond_repeats` below `repeats`, if both are equal to these, or if
      `repeats` is odd.
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
    return _make_episode([_mark(bits, 2, 0), _add_channels(vectors, 2), number], answer)

  return RecallTask(bits + 2, bits + 1, draw, ((1, longest), (1, repeats)), (beyond, beyond_repeats))


def associative_recall(
  *, bits: Size = 6, vectors: Size = 3, min_items: Annotated[int, Range(2)] = 2, max_items: int = 6, beyond: int = 12
) -> RecallTask:
  """Items of several vectors, each after a mark, then one of them between query marks; the answer is the item after it.

  Section 4.3. The items of an episode differ, so that the next item is unambiguous.

  Args:
    bits: bits of a vector.
    vectors: vectors of an item.
    min_items: lowest number of items of an episode in training.
    max_items: highest number of items of an episode in training.
    beyond: number of items of an episode of the split 'unseen'.

  Raises:
    UserError: if `max_items` is below `min_items`, if `beyond` is not greater than `max_items`, or if an item has so
      few bits that random items are seldom all different.
  """
  _check_minimum('associative_recall', 'max_items', max_items, min_items)
  _check_minimum('associative_recall', 'beyond', beyond, max_items + 1)
  item_bits = bits * vectors
  # `draw` repeats until all n items differ: about exp(n² / 2 / 2^item_bits) times on average, at most about 70.
  min_values = max(4 * beyond, beyond**2 // 8)
  min_bits = (min_values - 1).bit_length()
  if item_bits < min_bits:
    raise UserError(
      f"task 'associative_recall': {item_bits} bits of an item are too few for {beyond} items that differ; "
      f'expected at least {min_bits} for bits * vectors'
    )

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    num_items = size[0]
    items = _draw_bits(rng, num_items * vectors, bits).reshape(num_items, vectors, bits)
    while len(np.unique(items.reshape(num_items, -1), axis=0)) < num_items:
      items = _draw_bits(rng, num_items * vectors, bits).reshape(num_items, vectors, bits)
    query = int(rng.integers(num_items - 1))
    shown = [part for item in items for part in (_mark(bits, 2, 0), _add_channels(item, 2))]
    shown += [_mark(bits, 2, 1), _add_channels(items[query], 2), _mark(bits, 2, 1)]
    return _make_episode(shown, items[query + 1])

  return RecallTask(bits + 2, bits, draw, ((min_items, max_items),), (beyond,))


def ngrams(*, order: Annotated[int, Range(2)] = 6, length: int = 200, beyond: int = 400) -> RecallTask:
  """Random bits whose probabilities depend on the bits before; the answer is the next bit, at every step. Section 4.4.

  Every episode has a table of its own: for each context of `order` - 1 bits, the probability of a 1, drawn from
  Beta(1/2, 1/2). The bits of the first context are fair coins and not predicted.

  Args:
    order: number of bits N of an N-gram.
    length: number of bits of an episode in training.
    beyond: number of bits of an episode of the split 'unseen'.

  Raises:
    UserError: if `order` exceeds MAX_ORDER, if `length` is below `order`, or if `beyond` is not greater than `length`.
  """
  if order > MAX_ORDER:
    raise UserError(f"task 'ngrams': option order must be at most {MAX_ORDER}, got {order}")
  _check_minimum('ngrams', 'length', length, order)
  _check_minimum('ngrams', 'beyond', beyond, length + 1)
  context_length = order - 1
  place_values = 2 ** np.arange(context_length)[::-1]

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    table = rng.beta(0.5, 0.5, 2**context_length)
    coins = rng.random(size[0])
    bits = (coins < 0.5).astype(int)
    for t in range(context_length, size[0]):
      bits[t] = coins[t] < table[place_values @ bits[t - context_length : t]]
    vectors = bits[:, None].astype(np.float32)
    return Episode(vectors[:-1], vectors[context_length:], context_length - 1)

  def estimate(episode: Episode) -> np.ndarray:
    bits = np.concatenate([episode.inputs[:context_length], episode.target])[:, 0].astype(int)
    counts = np.full((2**context_length, 2), 0.5)
    probabilities = []
    for t in range(context_length, len(bits)):
      context_counts = counts[place_values @ bits[t - context_length : t]]
      probabilities.append(context_counts[1] / context_counts.sum())  # equation 10
      context_counts[bits[t]] += 1
    return np.array(probabilities)[:, None]

  return RecallTask(1, 1, draw, ((length, length),), (beyond,), estimate)


def priority_sort(*, bits: Size = 8, items: Size = 20, highest: Size = 16, beyond: int = 30) -> RecallTask:
  """Vectors with priorities in a channel of their own, then a mark; the answer is those of highest priority, sorted.

  Section 4.5, which has no mark. Priorities are uniform from -1 to 1; the answer begins with the highest one.

  Args:
    bits: bits of a vector.
    items: number of vectors of an episode in training.
    highest: number of vectors of the answer.
    beyond: number of vectors of an episode of the split 'unseen'.

  Raises:
    UserError: if `items` is below `highest`, or if `beyond` is not greater than `items`.
  """
  _check_minimum('priority_sort', 'items', items, highest)
  _check_minimum('priority_sort', 'beyond', beyond, items + 1)

  def draw(rng: np.random.Generator, size: EpisodeSize) -> Episode:
    vectors = _draw_bits(rng, size[0], bits)
    priorities = rng.uniform(-1, 1, size[0])
    shown = _add_channels(vectors, 2)
    shown[:, bits] = priorities
    order = np.argsort(-priorities)
    return _make_episode([shown, _mark(bits, 2, 1)], vectors[order[:highest]])

  return RecallTask(bits + 2, bits, draw, ((items, items),), (beyond,))


RECALL: Mapping[str, Callable[..., RecallTask]] = {
  'associative_recall': associative_recall,
  'copy': copy,
  'ngrams': ngrams,
  'priority_sort': priority_sort,
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


def _make_episode(shown: Sequence[np.ndarray], answer: np.ndarray) -> Episode:
  """An episode whose answer begins after the vectors shown, which are passed in one or several parts."""
  inputs = _concatenate(shown)
  return Episode(inputs, answer, len(inputs))


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(parts).astype(np.float32)
