"""Text that still arrives: the lines and errors of a whole file, however it is cut, and nothing taken too early."""

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data import incremental, vocab
from attention_jax.data.files import split_lines
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, UNK

LINES = ['the cat sat on the mat', 'a cat and a dog', 'schöne Grüße 漢字 Ω', 'e\u0301 ▁ 👩‍👩‍👧'] * 3


def reader(chunks):
  """A read1 that gives one chunk after the other."""
  chunks = iter(chunks)
  return lambda most: next(chunks, b'')


def both(data: bytes, cuts):
  """What split_lines and incremental.iter_lines make of the data: lines, or the error."""
  chunks = [data[start:stop] for start, stop in itertools.pairwise([0, *sorted({c for c in cuts if c}), len(data) + 1])]
  found = []
  for read in (
    lambda: split_lines(data, 'x'),
    lambda: [''.join(line) for line in incremental.iter_lines(reader(chunks), 'x')],
  ):
    try:
      found.append(read())
    except UserError as error:
      found.append(str(error))
  return found


CUTS = st.lists(st.integers(0, 30))
TEXT = st.text(st.sampled_from('ab é漢\r\n\u2028\ufeff'), max_size=20)


@given(TEXT, CUTS)
def test_lines_are_those_of_the_whole_file(text, cuts):
  whole, arrived = both(text.encode(), [c for c in cuts if c < len(text.encode())])
  assert arrived == whole


@given(st.lists(st.sampled_from([b'a', b'\n', 'é'.encode(), '漢'.encode()[:2], b'\xff']), max_size=12), CUTS)
def test_what_is_not_utf8_is_found_where_it_is(parts, cuts):
  data = b''.join(parts)
  whole, arrived = both(data, [c for c in cuts if c < len(data)])
  assert arrived == whole


def test_no_more_is_taken_than_is_read():
  taken = []
  chunks = (taken.append(chunk) or chunk for chunk in (b'ab', b'c\nd', b'e\nf'))
  lines = incremental.iter_lines(reader(chunks), 'x')
  first = next(lines)
  assert next(first) == 'a' and taken == [b'ab']
  assert ''.join(next(lines)) == 'de' and taken == [b'ab', b'c\nd', b'e\nf']  # the rest of the first line is skipped
  assert list(first) == [] and [''.join(line) for line in lines] == ['f']


def test_lines_of_a_stream_of_bytes():
  assert [''.join(line) for line in incremental.iter_lines(io.BytesIO('é\n\nb'.encode()).read1, 'x')] == ['é', '', 'b']


@pytest.mark.parametrize(('line', 'expected'), [('', ''), (' \t ', ''), (' a b ', ' a b '), ('a', 'a')])
def test_nothing_of_a_blank_line(line, expected):
  assert ''.join(incremental.skip_blank_line(iter(line))) == expected


VOCABULARIES = [vocab.train(spec, LINES) for spec in ('char', 'word', 'subword(size=80)')]


@given(st.sampled_from(VOCABULARIES), st.lists(st.integers(UNK, 79)))
def test_what_tokens_add_is_what_they_are_decoded_to(vocabulary, ids):
  ids = [id for id in ids if id < len(vocabulary)]
  spell = incremental.make_incremental_decoder(vocabulary)
  assert ''.join(map(spell, [*ids, EOS])) == vocabulary.decode(ids)
