"""Checks and errors that all writers of pictures share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from attention_jax.errors import UserError


def check_png_path(path: str | Path) -> None:
  """Raises UserError for a path that does not end with .png."""
  if Path(path).suffix.lower() != '.png':
    raise UserError(f'{path}: pictures are PNG; expected a path that ends with .png')


@contextlib.contextmanager
def report_write_errors(path: str | Path) -> Iterator[None]:
  """Turns an OSError of its block into a UserError that names the path."""
  try:
    yield
  except OSError as error:
    raise UserError(f'{path}: cannot write the picture: {error.strerror}') from error
