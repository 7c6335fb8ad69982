"""Words by position in a line."""

from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.word_positions import following_words, iter_segments, split_words, words_of_characters


def test_characters_belong_to_their_word_and_separators_to_none_or_the_next():
  assert words_of_characters(' ab  c ') == [-1, 0, 0, -1, -1, 1, -1]
  assert following_words(' ab  c ') == [0, 0, 0, 1, 1, 1, -1]
  assert words_of_characters('') == []


def test_other_white_space_is_part_of_a_word():
  assert split_words(' 10\u00a0000\teuros\u3000 \u202f ') == ['10\u00a0000', 'euros\u3000', '\u202f']
  assert words_of_characters('1\u00a02 \u3000') == [0, 0, 0, -1, 1]


@given(st.text(st.sampled_from('ab \t'), max_size=20))
def test_words_are_those_of_split(text):
  words = text.split()
  spelled = [''] * len(words)
  for character, word in zip(text, words_of_characters(text), strict=True):
    assert (word == -1) == character.isspace()
    if word >= 0:
      spelled[word] += character
  assert spelled == words


@given(st.text(st.sampled_from('ab '), max_size=20))
def test_segments_between_spaces_are_those_of_split(text):
  assert list(iter_segments(text, lambda segment, character: character == ' ')) == text.split()
