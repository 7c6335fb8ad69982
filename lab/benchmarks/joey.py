"""Joey NMT as a side of benchmarks, in a separate interpreter: its dependencies conflict with those of this project."""

import atexit
import contextlib
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from attention_jax.errors import UserError
from lab.benchmarks.measure import Side

CHILD = Path(__file__).with_name('joey_child.py')


class Joey:
  """A process with one model of Joey NMT and one batch.

  Attributes:
    parameters: the number of parameters of the model, as text.
  """

  def __init__(self, python: str, name: str, sizes: dict, source: np.ndarray, target: np.ndarray):
    """Starts the process.

    Args:
      python: an interpreter with Joey NMT.
      name: a key of joey_child.CONFIGS.
      sizes: sizes of the model.
      source: source ids [B, S], 0 for padding.
      target: target ids [B, T], 0 for padding.

    Raises:
      UserError: if the interpreter cannot run, or cannot build the model with Joey NMT.
    """
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    arrays = Path(folder.name) / 'arrays.npz'
    np.savez(arrays, source=source, target=target)
    command = [python, str(CHILD), str(arrays), name, json.dumps(sizes)]
    try:
      self._child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
      )
    except OSError as error:
      raise UserError(f'--joey={python}: cannot be run ({error.strerror})') from error
    atexit.register(self._child.kill)
    status, _, self.parameters = self._child.stdout.readline().strip().partition(' ')
    if status != 'ready':
      raise UserError(f'--joey={python}: cannot start Joey NMT; expected an environment of its own with joeynmt==2.3.0')

  def side(self, command: str) -> Side:
    """Returns a side that runs a command of joey_child.py; it raises UserError if the process ends during the work."""

    def run() -> None:
      # A process that has ended breaks the pipe, which `launch` would take for a closed output of this program.
      with contextlib.suppress(BrokenPipeError):
        print(command, file=self._child.stdin, flush=True)
      if self._child.stdout.readline() != 'done\n':
        raise UserError(f'Joey NMT failed at {command!r}')

    return Side(run)

  def close(self) -> None:
    """Ends the process."""
    self._child.kill()
