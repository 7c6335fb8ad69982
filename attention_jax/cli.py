"""The console script: `attention-jax PROGRAM --flag=value` runs experiments/PROGRAM.py, with or without a clone."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from attention_jax.errors import UserError, choose

PACKAGE = Path(__file__).parent


def programs_folder() -> Path:
  """Returns the folder of experiments/ and configs/: `programs` of an installed package, or the root of the clone."""
  installed = PACKAGE / 'programs'
  return installed if installed.is_dir() else PACKAGE.parent


def program_names() -> list[str]:
  """Returns the names of the programs: modules of experiments/ that run as scripts."""
  files = (programs_folder() / 'experiments').glob('*.py')
  return sorted(file.stem for file in files if "__name__ == '__main__'" in file.read_text('utf-8'))


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the program named by the first argument, with the remaining arguments; prints the usage without a program.

  Args:
    argv: arguments without the name of the script; by default those of the process.

  Raises:
    SystemExit: with status 2 if there is no such program, or if it needs a package that is not installed.
  """
  arguments = list(sys.argv[1:] if argv is None else argv)
  if not arguments or arguments[0] in ('-h', '--help'):
    print('usage: attention-jax PROGRAM [--flag=value ...]; attention-jax PROGRAM --help lists the flags')
    print(f'programs: {", ".join(program_names())}')
    return
  try:
    program = choose(arguments[0], program_names(), 'program')
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
  sys.path.insert(0, str(programs_folder()))
  sys.argv = [f'attention-jax {program}', *arguments[1:]]
  try:
    runpy.run_module(f'experiments.{program}', run_name='__main__', alter_sys=True)
  except ModuleNotFoundError as error:
    if (error.name or '').partition('.')[0] in ('attention_jax', 'experiments', 'configs'):
      raise
    print(f"error: {program} needs the package {error.name}; pip install 'attention_jax[train]'", file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  main()
