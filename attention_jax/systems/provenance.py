"""The versions of the code that produced a result."""

import functools
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from etils import epath

from attention_jax.atomic import write_text

COMMITS = 'commits.txt'  # of a run folder: the version of the code at the start, and a line for each later change of it
ROOT = Path(__file__).resolve().parents[2]
UNCOMMITTED = '+changes'  # appended to the commit if tracked files differ from it, or cannot be compared with it


@functools.cache
def code_version(root: Path = ROOT) -> str:
  """Returns the commit of the code, or its version if it was installed without a repository.

  Args:
    root: the folder that contains the package.

  Returns:
    The first 12 digits of the commit, with '+changes' if tracked files differ from it, or if git cannot compare them;
    'version X' without a repository; 'unknown' if neither can be found.
  """
  top_level = _git(root, 'rev-parse', '--show-toplevel')
  # A wheel may lie inside the repository of another project.
  if top_level is None or Path(top_level).resolve() != root:
    return _installed_version()
  commit = _git(root, 'rev-parse', '--short=12', 'HEAD')
  changes = _git(root, 'status', '--porcelain', '--untracked-files=no')
  return f'{commit}{"" if changes == "" else UNCOMMITTED}' if commit else 'unknown'


def store_version(folder: epath.Path, log: Callable[[str], None]) -> None:
  """Appends the version of the code to commits.txt of a run if it differs from the last one there, and logs a change.

  Args:
    folder: the run folder.
    log: called with a line about the change.
  """
  stored = read_versions(folder)
  current = code_version()
  if stored[-1:] == [current]:
    return
  write_text(folder / COMMITS, ''.join(f'{version}\n' for version in [*stored, current]))
  if stored:
    log(f'the code of this run was {stored[-1]} and is now {current}')


def read_versions(folder: epath.Path) -> list[str]:
  """Returns the versions of the code in commits.txt of a run folder, the oldest first; [] without the file."""
  path = folder / COMMITS
  return path.read_text().splitlines() if path.exists() else []


def _git(root: Path, *arguments: str) -> str | None:
  """Returns the output of a git command, or None if it failed or git is missing."""
  try:
    result = subprocess.run(['git', '-C', str(root), *arguments], capture_output=True, text=True, timeout=30)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return result.stdout.strip() if result.returncode == 0 else None


def _installed_version() -> str:
  try:
    return f'version {metadata.version("attention_jax")}'
  except metadata.PackageNotFoundError:
    return 'unknown'
