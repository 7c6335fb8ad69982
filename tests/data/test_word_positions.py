"""Words by position in a line."""

from hypothesis import given
from hypothesis import strategies as st

from attention_jax.data.word_positions import following_words, iter_segments, words_of_characters


def test_characters_belong_to_their_word_and_white_space_to_none_or_the_next():
  assert words_of_characters(' ab  c ') == [-1, 0, 0, -1, -1, 1, -1]
  assert following_words(' ab  c ') == [0, 0, 0, 1, 1, 1, -1]
  assert words_of_characters('') == []


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
