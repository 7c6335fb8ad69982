"""What a user did wrong, said in one line: what was given, where, and what is possible."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """A mistake in what the user gave. `str(error)` is one whole line; programs print it and exit with code 2."""


def choose(name: str, options: Iterable[str], what: str) -> str:
  """Returns `name` if it is one of `options`; else raises UserError naming the nearest match and every option."""
  options = sorted(options)
  if name in options:
    return name
  near = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
  hint = f" (did you mean '{near[0]}'?)" if near else ''
  raise UserError(f"unknown {what} '{name}'{hint}; possible: {', '.join(options)}")
