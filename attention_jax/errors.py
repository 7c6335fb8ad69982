"""User errors: one line that states what is wrong, the value, and what is expected."""

import contextlib
import difflib
import os
import runpy
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# Kinds of names, as in messages, to whose tables plug-ins add rows (docs/plugins.md).
PLUGIN_KINDS = {
  'score',
  'alignment',
  'rnn',
  'decoder',
  'encoder',
  'output',
  'task',
  'metric',
  'metric in training.select:',
  'optimizer',
  'tracker',
}
MAX_LINE = 4000  # printed characters of a message, which may repeat what a file or a flag contains


class UserError(ValueError):
  """A mistake in an argument, flag, config or file. Programs print its `lines` and exit with status 2."""

  @property
  def lines(self) -> list[str]:
    """The lines to print: each message on one line, without its middle if it is longer than MAX_LINE."""
    return [_one_line(str(self))]


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
    return [_one_line(mistake) for mistake in self._mistakes]


def _one_line(text: str) -> str:
  line = ' '.join(text.split())
  return line if len(line) <= MAX_LINE else f'{line[: MAX_LINE * 3 // 4]} ... {line[-MAX_LINE // 4 :]}'


def choose(name: str, options: Iterable[str], kind: str) -> str:
  """Returns `name` if it is one of `options`.

  Args:
    name: the value to check.
    options: the values that are expected.
    kind: a noun for the value in the error message, such as 'decoder'.

  Raises:
    UserError: naming every option and, if one of them is similar, the nearest match; for PLUGIN_KINDS it says that a
      plug-in may be missing.
  """
  options = sorted(options)
  if name in options:
    return name
  hint = '; a plug-in may be missing: --plugins=FILE' if kind in PLUGIN_KINDS else ''
  raise UserError(f"unknown {kind} '{name}'{suggest(str(name), options)}; expected one of: {', '.join(options)}{hint}")


def suggest(name: str, options: Iterable[str]) -> str:
  """Returns " (did you mean 'x'?)", x the option that starts with the word `name`, or the most similar one; or ''."""
  completions = [option for option in options if option.startswith(f'{name}_')]
  nearest = completions or difflib.get_close_matches(name, options, n=1, cutoff=0.5)
  return f" (did you mean '{nearest[0]}'?)" if nearest else ''


@contextlib.contextmanager
def report_write_errors(path: str | os.PathLike) -> Iterator[None]:
  """Turns an error of its block into a UserError that names the path."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:  # not OSError alone: clients of buckets raise their own kinds
    raise UserError(f'{path}: cannot be written ({getattr(error, "strerror", None) or error})') from error


def run_user_file(path: str, use: Callable[[dict[str, Any]], Any], purpose: str) -> Any:
  """Runs a Python file that a user wrote.

  Args:
    path: the file.
    use: a function of the names that the file defines; its errors are reported like those of the file.
    purpose: what such a file is expected to define, appended to errors other than SyntaxError and UserError.

  Returns:
    The result of `use`.

  Raises:
    UserError: with the line of a mistake in the file. A UserError that the file or `use` raises is unchanged.
  """
  try:
    return use(runpy.run_path(path))
  except UserError:
    raise
  except SyntaxError as error:
    location = f'{error.filename}:{error.lineno}' if error.filename else path  # no name for a file that is not text
    raise UserError(f'{location}: {error.msg}') from error
  except Exception as error:  # user code may raise anything
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    location = f'{path}:{lines[-1]}' if lines else path
    raise UserError(f'{location}: {type(error).__name__}: {error}; {purpose}') from error
