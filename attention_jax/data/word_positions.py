"""Words of a line by position: the word of each character, and segments of a line that is still arriving.

Words are separated by spaces and tabs alone, as gold links count them; other white space, such as a no-break space, is
part of a word.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

WORD_SEPARATORS = ' \t'
_WORD = re.compile(f'[^{WORD_SEPARATORS}]+')


def split_words(text: str) -> list[str]:
  """Returns the words of a line."""
  return _WORD.findall(text)


def following_words(text: str) -> list[int]:
  """Returns for each character the index of its word or, for a separator, of the next word; -1 if there is none."""
  words = []
  num_started = 0
  for previous, character in itertools.pairwise(f' {text}'):
    if previous in WORD_SEPARATORS and character not in WORD_SEPARATORS:
      num_started += 1
    words.append(num_started if character in WORD_SEPARATORS else num_started - 1)
  return [-1 if word == num_started else word for word in words]


def words_of_characters(text: str) -> list[int]:
  """Returns for each character the index of its word, -1 for a separator."""
  return [
    -1 if character in WORD_SEPARATORS else word for character, word in zip(text, following_words(text), strict=True)
  ]


def iter_segments(characters: Iterable[str], is_separator: Callable[[str, str], bool]) -> Iterator[str]:
  """Yields the non-empty segments between separators, which belong to no segment.

  Args:
    characters: the characters of a line, while they arrive.
    is_separator: (segment so far, next character) -> whether the character ends the segment.
  """
  segment = ''
  for character in characters:
    if not is_separator(segment, character):
      segment += character
    elif segment:
      yield segment
      segment = ''
  if segment:
    yield segment
