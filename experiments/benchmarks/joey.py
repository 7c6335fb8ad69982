"""The same work by Joey NMT, in an interpreter that has it: its packages do not go together with ours."""

import atexit
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from attention_jax.errors import UserError
from experiments.benchmarks.measure import Side

CHILD = Path(__file__).with_name('joey_child.py')


class Joey:
  """A process that has one model of Joey NMT and one batch; `side(command)` has it work.

  Raises: UserError where the interpreter is none or has no Joey NMT.
  """

  def __init__(self, python: str, name: str, sizes: dict, source: np.ndarray, target: np.ndarray):
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    arrays = Path(folder.name) / 'arrays.npz'
    np.savez(arrays, source=source, target=target)
    pipe = subprocess.PIPE
    command = [python, str(CHILD), str(arrays), name, json.dumps(sizes)]
    try:
      self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
      raise UserError(f'--joey={python}: cannot be run ({error.strerror})') from error
    atexit.register(self._child.kill)
    ready, _, self.parameters = self._child.stdout.readline().strip().partition(' ')
    if ready != 'ready':
      raise UserError(f'--joey={python}: has no Joey NMT (pip install joeynmt==2.3.0 in its own environment)')

  def side(self, command: str) -> Side:
    """Raises: UserError where the process ends in the middle of its work."""

    def run() -> None:
      print(command, file=self._child.stdin, flush=True)
      if self._child.stdout.readline() != 'done\n':
        raise UserError(f'Joey NMT failed at {command!r}')

    return Side(run)

  def close(self) -> None:
    self._child.kill()
