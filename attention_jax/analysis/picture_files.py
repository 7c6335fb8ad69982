"""Checks the paths of pictures and pages, and selects their writers by the suffix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_jax.errors import UserError


def check_png_path(path: str | Path) -> None:
  """Raises UserError for a path that does not end with .png."""
  select_by_suffix(path, {'.png': None})


def select_by_suffix(path: str | Path, writers: Mapping[str, Any]) -> Any:
  """Returns the entry for the suffix of a path; raises UserError if there is none."""
  suffix = Path(path).suffix.lower()
  if suffix not in writers:
    raise UserError(f'{path}: expected a path that ends with {" or ".join(writers)}')
  return writers[suffix]
