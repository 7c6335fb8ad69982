"""Runs a program of experiments/ as its command line would, within this process, and says what came of it."""

import io
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from absl import flags, logging

ROOT = Path(__file__).parents[2]


class Ran(NamedTuple):
  code: int
  out: str
  err: str


class Stdin:
  """What a program reads from sys.stdin."""

  def __init__(self, data: bytes):
    self.buffer = io.BytesIO(data)


def run(capsys, program: str, *args: str, stdin: bytes = b'') -> Ran:
  """`python -m experiments.PROGRAM ARGS` from the repository's root, as far as one process can do it."""
  before = set(flags.FLAGS)
  verbosity = logging.get_verbosity()
  capsys.readouterr()
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(sys, 'argv', [program, *args])
    patch.setattr(sys, 'stdin', Stdin(stdin))
    try:
      runpy.run_module(f'experiments.{program}', run_name='__main__', alter_sys=True)
      code = 0
    except SystemExit as error:
      code = error.code or 0
    finally:
      logging.set_verbosity(verbosity)
      for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
      flags.FLAGS.unparse_flags()
  return Ran(code, *capsys.readouterr())
