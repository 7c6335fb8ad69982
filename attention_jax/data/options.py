"""Calls the row of a table that a spec string such as `word(min_count=2)` means."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attention_jax.errors import UserError, choose
from attention_jax.functional.table import parse_spec


def bind(spec: str, table: Mapping[str, Callable], what: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
  """`spec` -> (its name, the table's function, the options given): those are the function's keyword-only arguments.

  Raises: UserError for a spec that cannot be read, an unknown name or option, or an option that is missing.
  """
  name, given = parse_spec(spec)
  fn = table[choose(name, table, what)]
  keywords = {k: p for k, p in inspect.signature(fn).parameters.items() if p.kind is p.KEYWORD_ONLY}
  for option in given:
    if not keywords:
      raise UserError(f"{what} '{name}' has no options, got '{option}'")
    choose(option, keywords, f"option of {what} '{name}':")
  missing = [k for k, p in keywords.items() if p.default is p.empty and k not in given]
  if missing:
    raise UserError(f"{what} '{name}' needs {' and '.join(missing)}; its options: {', '.join(keywords)}")
  return name, fn, given
