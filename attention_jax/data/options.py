"""Calls the row of a table that a spec string such as `word(min_count=2)` means."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from beartype import BeartypeConf
from beartype.door import is_bearable

from attention_jax.errors import UserError, choose
from attention_jax.functional.table import parse_spec


def bind(spec: str, table: Mapping[str, Callable], what: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
  """`spec` -> (its name, the table's function, the options given): those are the function's keyword-only arguments.

  Raises: UserError for a spec that cannot be read, an unknown name or option, or an option that is missing or is not
    of the type that it is annotated with.
  """
  name, given = parse_spec(spec)
  fn = table[choose(name, table, what)]
  keywords = {k: p for k, p in inspect.signature(fn).parameters.items() if p.kind is p.KEYWORD_ONLY}
  for option, value in given.items():
    if not keywords:
      raise UserError(f"{what} '{name}' has no options, got '{option}'")
    kind = keywords[choose(option, keywords, f"option of {what} '{name}':")].annotation
    if not _is_of(value, kind):
      raise UserError(f"{what} '{name}': option {option} is of type {inspect.formatannotation(kind)}, got {value!r}")
  missing = [k for k, p in keywords.items() if p.default is p.empty and k not in given]
  if missing:
    raise UserError(f"{what} '{name}' needs {' and '.join(missing)}; its options: {', '.join(keywords)}")
  return name, fn, given


def _is_of(value: Any, kind: Any) -> bool:
  """Whole numbers are numbers; True and False are not."""
  fits = is_bearable(value, kind, conf=BeartypeConf(is_pep484_tower=True))
  return fits and (not isinstance(value, bool) or kind in (bool, Any))
