"""Subword regularisation: training lines are cut into pieces anew in each epoch."""

from collections.abc import Callable

import numpy as np

from attention_jax.data.encoding import EncodedCorpus
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import Vocabulary
from attention_jax.tokens import EOS

Resegment = Callable[[int, np.ndarray, tuple[int, int]], EncodedCorpus]


def make_resegmenter(
  encoded: EncodedCorpus, corpus: Corpus, source_vocab: Vocabulary, target_vocab: Vocabulary, seed: int
) -> Resegment | None:
  """(epoch, rows, bucket) -> those rows of a split, cut anew; None where neither vocabulary does (`Vocabulary.sample`).

  How a row is cut is a function of (seed, epoch, row) and of the side, whatever was cut before and by which thread. A
  pair that would no longer fit its bucket stays as it is in `encoded`. A row of -1 has no tokens.

  A piece that the vocabulary does not know is UNK here, without its place in the source (`encoding.encode`): layers
  that copy can write it when they translate, and have not learned to by these lines.

  What it costs: every line of every batch is cut when its batch is made, on the threads that prefetch; 0.4 ms for a
  line of 14 pieces on one core that did other things too, nine times what cutting it once takes.
  """
  sides = [
    (vocabulary, lines, flat, offsets)
    for vocabulary, lines, flat, offsets in (
      (source_vocab, corpus.source, encoded.source, encoded.source_offsets),
      (target_vocab, corpus.target, encoded.target, encoded.target_offsets),
    )
  ]
  if not any(vocabulary.sample for vocabulary, *_ in sides):
    return None

  def cut(epoch: int, row: int, bucket: tuple[int, int]) -> list[np.ndarray]:
    plain = [flat[offsets[row] : offsets[row + 1]] for _, _, flat, offsets in sides]
    found = list(plain)
    for side, (vocabulary, lines, _, _) in enumerate(sides):
      if vocabulary.sample:
        drawn = np.random.SeedSequence((seed, epoch, row, side)).generate_state(1)[0]
        found[side] = np.array([*vocabulary.sample(lines[row], int(drawn)), EOS], np.int32)
    fits = all(len(ids) <= size for ids, size in zip(found, bucket, strict=True))
    return found if fits else plain

  def of_rows(epoch: int, rows: np.ndarray, bucket: tuple[int, int]) -> EncodedCorpus:
    nothing = np.zeros(0, np.int32)
    pairs = [cut(epoch, int(row), bucket) if row >= 0 else [nothing, nothing] for row in rows]
    flat = []
    for ids in zip(*pairs, strict=True):
      flat += [np.concatenate(ids), np.cumsum([0, *map(len, ids)], dtype=np.int64)]
    return EncodedCorpus(*flat)

  return of_rows
