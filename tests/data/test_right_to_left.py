"""A vocabulary that reads from right to left has the tokens of another one in the reverse order."""

import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.data.encoding import token_units
from attention_jax.data.right_to_left import RightToLeft, in_text_order
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD

LINES = ['ab cd ab', 'bc ef', 'a b c d e f']
SPECS = ['char', 'word', 'subword(size=16)', 'unigram(size=16)']


@pytest.mark.parametrize('spec', SPECS)
def test_lines_are_reversed_and_restored(spec):
  forward = vocab.train(spec, LINES)
  backward = RightToLeft(forward)
  for line in LINES:
    assert backward.tokenize(line) == forward.tokenize(line)[::-1]
    assert backward.word_ids(line) == forward.word_ids(line)[::-1]
    ids = backward.encode(line)
    assert ids == forward.encode(line)[::-1]
    assert backward.decode([BOS, *ids, EOS, 5, PAD]) == line
  assert (backward.kind, len(backward)) == (forward.kind, len(forward))
  assert backward.id_to_token(5) == forward.id_to_token(5)
  assert not vocab.same_entries(forward, backward) and vocab.same_entries(backward, RightToLeft(forward))
  with pytest.raises(UserError, match='cannot be read from its end'):
    backward.iter_segments('ab')


def test_copied_tokens_are_decoded_in_the_order_of_the_text():
  backward = RightToLeft(vocab.train('word', LINES))
  size = len(backward)
  ids = [*backward.encode('ab'), size + 1, size]
  assert backward.decode(ids, ['x', 'y']) == 'x y ab'


def test_sampled_segmentations_are_reversed():
  forward = vocab.train('subword(size=16, dropout=0.5)', LINES)
  backward = RightToLeft(forward)
  assert backward.sample(LINES[0], 3) == forward.sample(LINES[0], 3)[::-1]
  assert RightToLeft(vocab.train('word', LINES)).sample is None


def test_entries_of_tokens_are_put_into_the_order_of_the_text():
  forward = vocab.train('word', LINES)
  backward = RightToLeft(forward)
  entries = np.arange(8).reshape(4, 2)  # of three tokens and EOS
  assert in_text_order(forward, entries, 3) is entries
  assert in_text_order(backward, entries, 3).tolist() == [[4, 5], [2, 3], [0, 1], [6, 7]]
  assert in_text_order(backward, ['c', 'b', 'a'], 3) == ['a', 'b', 'c']
  assert list(token_units(backward, 'word')('ab cd ab')) == [2, 1, 0]
