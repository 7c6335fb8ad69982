"""Errors are one line that names the nearest match and every option."""

import pytest

from attention_jax.errors import MAX_LINE, UserError, UserErrors, choose


def test_a_name_is_returned_or_reported_with_the_nearest_one():
  assert choose('b', {'b': 1, 'a': 2}, 'letter') == 'b'
  with pytest.raises(UserError, match=r"^unknown norm 'rmss' \(did you mean 'rms'\?\); expected one of: layer, rms$"):
    choose('rmss', ['rms', 'layer'], 'norm')
  with pytest.raises(
    UserError, match=r"^unknown score 'x'; expected one of: dot; a plug-in may be missing: --plugins="
  ):
    choose('x', ['dot'], 'score')


def test_printed_errors_are_single_lines_of_bounded_length():
  assert UserError('a\nb\t c').lines == ['a b c']
  (line,) = UserError('x' * 10**6).lines
  assert MAX_LINE <= len(line) < MAX_LINE + 10 and ' ... ' in line
  assert UserErrors(['first\nline', 'second']).lines == ['first line', 'second']
