"""Text that arrives piece by piece: blocks of lines, streams of characters, and decoding of one id after another."""

import codecs
import os
import select
from collections.abc import Callable, Iterable, Iterator

from attention_jax.data.files import BYTE_ORDER_MARK, empty_file_error, invalid_utf8_error, split_lines
from attention_jax.data.vocab import Vocabulary
from attention_jax.errors import UserError

CHUNK_BYTES = 1 << 16  # the most that is read at once
MAX_PAUSE = 0.02  # seconds between two writes to a pipe, up to which the lines of both are read together
MAX_LINE_LENGTH = 100_000  # characters: a word or white space without an end would fill the memory


def iter_line_blocks(file: int, path: str, size: int, *, waits: bool) -> Iterator[list[str]]:
  """Yields the lines of `files.split_lines` in blocks while they arrive.

  Args:
    file: a file descriptor that is open for reading, such as that of a pipe.
    path: its name in errors.
    size: maximum number of lines of a block.
    waits: whether each block but the last has `size` lines; otherwise a block has the lines that can be read without
      waiting for more.

  Raises:
    UserError: as `split_lines` does, when the iteration reaches the mistake.
  """
  lines = []
  number = 1  # of the next line
  incomplete = bytearray()
  is_end = False
  while not is_end:
    data = os.read(file, CHUNK_BYTES)
    is_end = not data
    before, newline, after = data.rpartition(b'\n')
    if newline or (is_end and (incomplete or number == 1)):
      added = split_lines(bytes(incomplete) + before + newline, path, number)
      lines += added
      number += len(added)
      incomplete.clear()
    incomplete += after
    while len(lines) >= size or (lines and (is_end or not (waits or _is_readable(file)))):
      yield lines[:size]
      del lines[:size]


def iter_lines(read: Callable[[int], bytes], path: str) -> Iterator[Iterator[str]]:
  """Yields the lines of `files.split_lines`, each as an iterator of its characters while they arrive.

  The characters of a line that are not consumed are skipped before the next line.

  Args:
    read: returns at most the requested number of bytes as soon as there are any, and b'' at the end, as
      `BufferedReader.read1` does.
    path: the name of the stream in errors.

  Raises:
    UserError: as `split_lines` does, when the iteration reaches the mistake; for a line of more than MAX_LINE_LENGTH
      characters, even if they are skipped.
  """
  characters = _without_byte_order_mark(_iter_characters(read, path), path)
  for number, first in enumerate(characters, 1):
    line = _iter_bounded(_iter_line(first, characters), f'{path}:{number}')
    yield line
    for _ in line:
      pass


def skip_blank_line(line: Iterable[str]) -> Iterator[str]:
  """Yields the characters of a line, and none of a blank one: leading white space is held back until text follows."""
  line = iter(line)
  white_space = ''
  for character in line:
    if not character.isspace():
      yield from white_space + character
      break
    white_space += character
  yield from line


def make_incremental_decoder(vocabulary: Vocabulary) -> Callable[[int], str]:
  """Returns a function that is called with the ids of one text in order, and returns the text that each id adds."""
  context: list[int] = []

  def decode_next(id: int) -> str:
    before = vocabulary.decode(context)
    added = vocabulary.decode([*context, id]).removeprefix(before)
    # Only the last token with visible text decides how the next one is joined to it.
    if vocabulary.decode([id]):
      context.clear()
    context.append(id)
    return added

  return decode_next


def _is_readable(file: int) -> bool:
  """Whether there is more to read, or the end of the file, within MAX_PAUSE."""
  return bool(select.select([file], [], [], MAX_PAUSE)[0])


def _iter_bounded(line: Iterator[str], name: str) -> Iterator[str]:
  """The characters of a line; raises UserError if there are more than MAX_LINE_LENGTH."""
  for count, character in enumerate(line):
    if count == MAX_LINE_LENGTH:
      limit = f'at most {MAX_LINE_LENGTH:,} characters of a line that is read while it arrives'
      raise UserError(f'{name}: the line is too long; expected {limit}')
    yield character


def _iter_line(character: str, characters: Iterator[str]) -> Iterator[str]:
  """The line that begins with `character`, without a '\\r' at its end."""
  carriage_return = ''
  while character != '\n':
    yield from carriage_return
    carriage_return = character if character == '\r' else ''
    yield from character.removesuffix('\r')
    character = next(characters, '\n')


def _iter_characters(read: Callable[[int], bytes], path: str) -> Iterator[str]:
  """The characters of a UTF-8 stream, each as soon as all of its bytes have arrived."""
  decoder = codecs.getincrementaldecoder('utf-8')()
  line = 1
  column = 0
  is_end = False
  while not is_end:
    data = read(CHUNK_BYTES)
    is_end = not data
    try:
      text = decoder.decode(data, final=is_end)
    except UnicodeDecodeError as error:
      valid = error.object[: error.start]
      yield from valid.decode()
      line, column = _advance(line, column, valid)
      raise invalid_utf8_error(path, line, column + 1, error.object[error.start]) from None
    yield from text
    line, column = _advance(line, column, text.encode())


def _advance(line: int, column: int, data: bytes) -> tuple[int, int]:
  """The position after these bytes: the line, counted from 1, and the number of bytes of that line before it."""
  before, newline, last_line = data.rpartition(b'\n')
  if newline:
    return line + before.count(b'\n') + 1, len(last_line)
  return line, column + len(last_line)


def _without_byte_order_mark(characters: Iterator[str], path: str) -> Iterator[str]:
  """The characters without a leading byte order mark. Raises UserError if there are none."""
  first = next(characters, '')
  if first == BYTE_ORDER_MARK:
    first = next(characters, '')
  if not first:
    raise empty_file_error(path)
  yield first
  yield from characters
