"""Text that still arrives: its lines, character by character, and what each token adds to a text that is written."""

import codecs
from collections.abc import Callable, Iterable, Iterator

from attention_jax.data.files import BYTE_ORDER_MARK, empty_file_error, invalid_utf8_error
from attention_jax.data.vocab import Vocabulary

MOST = 1 << 16  # bytes taken at once, of those that are there


def iter_lines(read: Callable[[int], bytes], path: str) -> Iterator[Iterator[str]]:
  """The lines that `files.split_lines` would give, each as its characters while they arrive.

  Args:
    read: gives at most so many bytes as soon as there are any, and none at the end, as `BufferedReader.read1` does.
    path: what errors call it.

  What is not taken of a line is skipped before the next one. Raises: UserError as split_lines, once it is that far.
  """
  characters = _unmarked(_decoded(read, path), path)
  for first in characters:
    line = _line(first, characters)
    yield line
    for _ in line:
      pass


def skip_blank_line(line: Iterable[str]) -> Iterator[str]:
  """The characters of a line, none of a blank one: leading white space waits for what follows it."""
  line, waiting = iter(line), ''
  for character in line:
    waiting += character
    if not character.isspace():
      yield from waiting
      break
  yield from line


def make_incremental_decoder(vocabulary: Vocabulary) -> Callable[[int], str]:
  """A function of the ids of one text, one after the other: what each adds to vocabulary.decode(those before)."""
  context: list[int] = []

  def spell(id: int) -> str:
    before = vocabulary.decode(context)
    added = vocabulary.decode([*context, id]).removeprefix(before)
    # How a token is joined to a text depends on the last one that shows.
    if vocabulary.decode([id]):
      context.clear()
    context.append(id)
    return added

  return spell


def _line(character: str, characters: Iterator[str]) -> Iterator[str]:
  """The line that begins with `character`, without the '\\r' of a CRLF line end."""
  held = ''
  while character != '\n':
    yield from held
    held = character if character == '\r' else ''
    yield from character.removesuffix('\r')
    character = next(characters, '\n')


def _decoded(read: Callable[[int], bytes], path: str) -> Iterator[str]:
  """The characters of UTF-8, those of a chunk that are whole at once."""
  line, column, rest, data = 1, 0, b'', b'?'
  while data:
    data = read(MOST)
    chunk = rest + data
    try:
      text, used = codecs.utf_8_decode(chunk, 'strict', not data)
    except UnicodeDecodeError as error:
      good = chunk[: error.start]
      yield from good.decode()
      line, column = _moved(line, column, good)
      raise invalid_utf8_error(path, line, column + 1, chunk[error.start]) from None
    yield from text
    line, column = _moved(line, column, chunk[:used])
    rest = chunk[used:]


def _moved(line: int, column: int, data: bytes) -> tuple[int, int]:
  """Where one is after these bytes: the line, counted from 1, and the bytes of it that have been."""
  before, newline, last = data.rpartition(b'\n')
  return (line + before.count(b'\n') + 1, len(last)) if newline else (line, column + len(last))


def _unmarked(characters: Iterator[str], path: str) -> Iterator[str]:
  """The characters of a file that is not empty, without its byte order mark."""
  first = next(characters, '')
  if first == BYTE_ORDER_MARK:
    first = next(characters, '')
  if not first:
    raise empty_file_error(path)
  yield first
  yield from characters
