"""User errors: one line that states what is wrong, the value, and what is expected."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """A mistake in an argument, flag, config or file. Programs print `str(error)`, one line, and exit with code 2."""


def choose(name: str, options: Iterable[str], kind: str) -> str:
  """Returns `name` if it is one of `options`.

  Args:
    name: the value to check.
    options: the values that are expected.
    kind: what the value is, as the error names it.

  Raises:
    UserError: naming the nearest match and every option.
  """
  options = sorted(options)
  if name in options:
    return name
  nearest = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
  hint = f" (did you mean '{nearest[0]}'?)" if nearest else ''
  raise UserError(f"unknown {kind} '{name}'{hint}; expected one of: {', '.join(options)}")
