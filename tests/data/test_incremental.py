"""Incremental reading: lines and errors equal those of a whole file, however it is split, and nothing is read early."""

import itertools
import os
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attention_jax.data import incremental, vocab
from attention_jax.data.files import split_lines
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, UNK

LINES = ['the cat sat on the mat', 'a cat and a dog', 'schöne Grüße 漢字 Ω', 'e\u0301 ▁ 👩‍👩‍👧'] * 3


def make_read1(chunks):
  """Returns a function like BytesIO.read1 that returns one chunk per call."""
  chunks = iter(chunks)
  return lambda size: next(chunks, b'')


def lines_or_error(read):
  try:
    return read()
  except UserError as error:
    return str(error)


def read_blocks(data: bytes, size: int, waits: bool):
  """The blocks of a pipe that has been closed."""
  reader, writer = os.pipe()
  with open(reader, 'rb') as file:
    with open(writer, 'wb') as pipe:
      pipe.write(data)
    return list(incremental.iter_line_blocks(file.fileno(), 'x', size, waits=waits))


CUTS = st.lists(st.integers(0, 30))
PARTS = [*(c.encode() for c in 'ab é漢\r\n\u2028\ufeff'), '漢'.encode()[:2], b'\xff']


@given(st.lists(st.sampled_from(PARTS[:-2]), max_size=20) | st.lists(st.sampled_from(PARTS), max_size=12), CUTS)
@example([], [])
@example([b'\xef\xbb\xbf'], [1])
@example([b'a', b'\n', b'\xff'], [1])
def test_lines_or_the_position_of_invalid_utf8_equal_those_of_the_whole_file(parts, cuts):
  """Checks that iter_lines on chunks of the data has the lines, or the error, of split_lines."""
  data = b''.join(parts)
  bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data) + 1]
  chunks = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
  expected = lines_or_error(lambda: split_lines(data, 'x'))
  lines = lines_or_error(lambda: [''.join(line) for line in incremental.iter_lines(make_read1(chunks), 'x')])
  assert lines == expected
  for size, waits in ((1, False), (2, True), (3, False)):
    with mock.patch.object(incremental, 'CHUNK_BYTES', 1 + len(cuts)):
      blocks = lines_or_error(lambda size=size, waits=waits: read_blocks(data, size, waits))
    if isinstance(blocks, str):
      assert blocks == expected
      continue
    assert [line for block in blocks for line in block] == expected
    assert all(len(block) == size for block in blocks[:-1]) and 0 < len(blocks[-1]) <= size


@pytest.mark.parametrize(
  ('waits', 'blocks'), [(False, [['a', ''], ['b'], ['c', 'd'], ['ef']]), (True, [['a', ''], ['b', 'c'], ['d', 'ef']])]
)
def test_blocks_of_an_open_pipe_are_what_has_arrived(waits, blocks):
  writes = iter([b'a\n\nb\n', b'c\nd\ne', b'f'])
  reader, writer = os.pipe()
  with open(reader, 'rb') as file, open(writer, 'wb', buffering=0) as pipe:
    read = os.read

    def write_and_read(descriptor, size):
      """Writes what arrives while the reader waits."""
      data = next(writes, b'')
      if data:
        pipe.write(data)
      else:
        pipe.close()
      return read(descriptor, size)

    with mock.patch.object(incremental.os, 'read', write_and_read):
      assert list(incremental.iter_line_blocks(file.fileno(), 'x', 2, waits=waits)) == blocks


def test_chunks_are_read_on_demand():
  num_read = 0

  def read_chunks():
    nonlocal num_read
    for chunk in (b'ab', b'c\nd', b'e\nf'):
      num_read += 1
      yield chunk

  lines = incremental.iter_lines(make_read1(read_chunks()), 'x')
  first = next(lines)
  assert next(first) == 'a' and num_read == 1
  assert ''.join(next(lines)) == 'de' and num_read == 3  # the remainder of the first line is skipped
  assert list(first) == [] and [''.join(line) for line in lines] == ['f']


@pytest.mark.parametrize('consumed', [0, 7], ids=['skipped', 'read'])
def test_a_line_without_an_end_is_an_error(monkeypatch, consumed):
  monkeypatch.setattr(incremental, 'MAX_LINE_LENGTH', 6)
  lines = incremental.iter_lines(make_read1(itertools.chain([b'sechs!\n'], itertools.repeat(b'ab'))), 'x')
  assert ''.join(next(lines)) == 'sechs!'
  endless = next(lines)
  with pytest.raises(UserError, match=r'^x:2: the line is too long; expected at most 6 characters of a line'):
    assert len(list(itertools.islice(endless, consumed))) <= 6
    next(lines)


@pytest.mark.parametrize(('line', 'expected'), [('', ''), (' \t ', ''), (' a b ', ' a b '), ('a', 'a')])
def test_skip_blank_line_removes_the_characters_of_blank_lines_only(line, expected):
  assert ''.join(incremental.skip_blank_line(iter(line))) == expected


VOCABULARIES = [vocab.train(spec, LINES) for spec in ('char', 'word', 'subword(size=80)')]


@given(st.sampled_from(VOCABULARIES), st.lists(st.integers(UNK, 79)))
def test_incremental_decoding_equals_decoding(vocabulary, ids):
  ids = [id for id in ids if id < len(vocabulary)]
  decode_next = incremental.make_incremental_decoder(vocabulary)
  assert ''.join(map(decode_next, [*ids, EOS])) == vocabulary.decode(ids)
