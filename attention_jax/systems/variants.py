"""The file of --variants, which is stored with a run. Opening the run requires the same file."""

from pathlib import Path

from etils import epath

from attention_jax.atomic import write_bytes
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.testing import check_alignment, check_score

VARIANTS_FILE = 'variants.py'
# Tables, their rows before the file is executed, and the check of a row.
_CHECKS = ((SCORES, dict(SCORES), check_score), (ALIGNMENTS, dict(ALIGNMENTS), check_alignment))

_content: bytes | None = None  # of the file that this process has executed; its rows are in the tables of the process


def set_variants(path: str | None) -> None:
  """Declares the file that has added rows to the tables of this process; None if there is none."""
  global _content
  _content = Path(path).read_bytes() if path else None


def check_added_rows() -> None:
  """Checks quickly that scores and alignments of the file obey the contract of masks and weights.

  Raises:
    UserError: for the first law that one of them breaks.
  """
  if _content is None:
    return
  for table, initial_rows, check in _CHECKS:
    for name, row in table.items():
      if initial_rows.get(name) is not row:
        check(name, quick=True)


def store_variants(folder: epath.Path) -> list[str]:
  """Stores the file of this process in a run folder; returns the names of the files that it wrote."""
  if _content is None:
    return []
  write_bytes(folder / VARIANTS_FILE, _content)
  return [VARIANTS_FILE]


def check_variants(folder: epath.Path) -> None:
  """Raises UserError if a run was trained with a file of variants, and this process has executed another one or none.

  The stored file is never executed automatically: a run folder may come from another person.
  """
  path = folder / VARIANTS_FILE
  if not path.exists():
    return
  if _content is None:
    raise UserError(f'{folder} was trained with a file of variants; add --variants={path}')
  if path.read_bytes() != _content:
    raise UserError(f'{folder} was trained with another file of variants; use --variants={path}')
