"""Targets that are predicted from their last token to their first (Liu et al. 2016): a vocabulary in that order."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError
from attention_jax.tokens import content_ids

T = TypeVar('T', list, np.ndarray)


class RightToLeft:
  """A vocabulary that reads a line from its end: its tokens, in the reverse order.

  Args:
    vocabulary: a vocabulary that reads from the beginning; both have the same file.
  """

  right_to_left = True

  def __init__(self, vocabulary: Vocabulary):
    self._left_to_right = vocabulary
    self.kind = vocabulary.kind
    self.sample = self._sample if vocabulary.sample else None

  def _sample(self, text: str, seed: int) -> list[int]:
    return self._left_to_right.sample(text, seed)[::-1]

  def tokenize(self, text: str) -> list[str]:
    return self._left_to_right.tokenize(text)[::-1]

  def word_ids(self, text: str) -> list[int]:
    return self._left_to_right.word_ids(text)[::-1]

  def encode(self, text: str) -> list[int]:
    return self._left_to_right.encode(text)[::-1]

  def iter_segments(self, characters: Iterable[str]) -> Iterator[str]:
    raise UserError('a line that is still arriving cannot be read from its end')

  def decode(self, ids: Iterable[int], copied_tokens: Sequence[str] = ()) -> str:
    return self._left_to_right.decode(content_ids(ids)[::-1], copied_tokens)

  def id_to_token(self, id: int) -> str:
    return self._left_to_right.id_to_token(id)

  def __len__(self) -> int:
    return len(self._left_to_right)

  def save(self, folder: str, side: str) -> str:
    return self._left_to_right.save(folder, side)


def in_text_order(vocabulary: Vocabulary, entries: T, length: int) -> T:
  """Returns entries for the tokens of a line in the order of its text.

  Args:
    vocabulary: the vocabulary, in whose order the entries are.
    entries: entries of the tokens, a list or an array [T, ...].
    length: number of tokens; later entries, such as that of EOS, stay at the end.
  """
  if not vocabulary.right_to_left:
    return entries
  reversed_entries = entries[:length][::-1]
  if isinstance(entries, list):
    return reversed_entries + entries[length:]
  return np.concatenate([reversed_entries, entries[length:]])
