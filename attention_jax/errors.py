"""User errors: one line that states what is wrong, the value, and what is expected."""

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
  """A mistake in an argument, flag, config or file. Programs print `str(error)`, one line, and exit with code 2."""

  @property
  def lines(self) -> list[str]:
    """The lines to print, without line breaks of their own."""
    return [' '.join(str(self).split())]


class UserErrors(UserError):
  """Several mistakes at once, which programs print one per line.

  Args:
    mistakes: a message for each.
  """

  def __init__(self, mistakes: Sequence[str]):
    super().__init__('\n'.join(mistakes))
    self._mistakes = list(mistakes)

  @property
  def lines(self) -> list[str]:
    return [' '.join(mistake.split()) for mistake in self._mistakes]


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
