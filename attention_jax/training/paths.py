"""Paths of run folders, checked before anything is created in them."""

import contextlib
from pathlib import Path

from attention_jax.errors import UserError


def run_path(folder: str | Path) -> Path:
  """Returns the path of a run folder, '~' expanded.

  Args:
    folder: the folder, which need not exist.

  Raises:
    UserError: for a name that can be no folder: '', a URL, '-', '@NAME', the home of an unknown user, one that is too
      long, has a null character or is in a folder that may not be accessed.
  """
  name = str(folder)
  if '://' in name or name.startswith(('http:', 'https:', 'file:')):
    raise UserError(f"'{name}' is a URL; expected a folder of a file system that is mounted")
  if name.startswith('@'):
    raise UserError(f"'{name}' names a ready-made model, which is only read; expected a folder")
  if not name:
    raise UserError("'' is the name of no folder; expected '.' for the current one")
  if name == '-':
    raise UserError("'-' stands for no folder; expected the path of one")
  try:
    path = Path(name).expanduser()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      path.stat()  # unlike `exists`, raises for every name that the file system does not accept
    return path
  except (OSError, ValueError, RuntimeError) as error:
    reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())
    shown = name if len(name) <= 80 else f'{name[:40]}...{name[-20:]}'
    raise UserError(f'cannot use {shown!r} as a folder: {reason}') from error
