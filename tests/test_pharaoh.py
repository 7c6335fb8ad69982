"""The Pharaoh format: what is formatted is parsed back, and errors name the line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.errors import UserError
from attention_jax.pharaoh import format_pharaoh, parse_gold, parse_pharaoh

LINKS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


@given(LINKS)
def test_formatted_links_are_parsed_back(links):
  assert parse_pharaoh(format_pharaoh(links)) == tuple(sorted(set(links)))


@given(LINKS, LINKS)
def test_possible_links_round_trip(sure, possible):
  gold = parse_gold(format_pharaoh(sure, possible))
  assert gold == (tuple(sorted(set(sure))), tuple(sorted({*sure, *possible})))


def test_possible_links_that_are_not_sure_are_parsed_in_gold_lines_only():
  assert parse_gold('1-0 1?0 2?1') == (((1, 0),), ((1, 0), (1, 0), (2, 1)))
  assert parse_pharaoh('1-0') == parse_gold('1-0').sure
  with pytest.raises(UserError, match=r"^a: expected links such as '0-0', got the possible link '2\?1'$"):
    parse_pharaoh('1-0 2?1', 'a')


def test_links_keep_the_order_of_the_line_and_a_link_that_is_sure_and_possible_is_sure():
  assert parse_pharaoh('1-0 1?0 2-1') == ((1, 0), (2, 1))
  assert parse_pharaoh(' 2-1  0-0 2-1') == ((2, 1), (0, 0), (2, 1))
  assert parse_pharaoh('') == ()


@pytest.mark.parametrize('line', ['0-', '0-0 1:2', '0??1', 'a-b', '-1-2', '²-1', '٠-0', '0-0,1-1', '0-1234567890'])
def test_malformed_link_raises_with_its_line(line):
  message = r'^a\.tsv:7: a link must be source-target \(sure\) or .* counted from 0 with at most 9 digits, .* got '
  with pytest.raises(UserError, match=message):
    parse_pharaoh(line, where='a.tsv:7')


@pytest.mark.parametrize('line', ['2-0', '0-0 1-3'])
def test_link_out_of_range_raises(line):
  message = r"^a\.tsv:7: link '.-.' is out of range, counted from 0 in words: the source has 2, the target 3$"
  assert parse_pharaoh('1-2', lengths=(2, 3)) == ((1, 2),)
  with pytest.raises(UserError, match=message):
    parse_pharaoh(line, 'a.tsv:7', (2, 3), 'word')
