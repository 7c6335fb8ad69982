"""Units of a sweep as commands of any queue: a template of a shell command puts each into it."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence

from attention_jax.errors import UserError
from attention_jax.sweeps.ledger import STARTED, SUBMITTED, Ledger, Unit
from attention_jax.sweeps.plan import format_command
from attention_jax.systems.base import Log
from attention_jax.systems.provenance import code_version
from attention_jax.training.interrupts import StopRequest

COMMAND = '{command}'
MAX_NAME = 50  # characters of a unit in {name}: queues allow 63


def check_template(template: str) -> None:
  """Raises UserError for a template without {command}."""
  if COMMAND not in template:
    raise UserError(
      f"--submit={template!r} has no {COMMAND}; expected a command of the shell, 'sky jobs launch --yes {COMMAND}'"
    )


def fill_template(template: str, command: Sequence[str], unit_id: str) -> str:
  """Returns the line for the shell that puts a unit into a queue.

  Args:
    template: the line, with {command}, which becomes one quoted word, and {name}, of letters, digits and '-'.
    command: the command that trains the unit.
    unit_id: its id, from which the name is made.
  """
  name = re.sub(r'[^a-z0-9]+', '-', unit_id.lower())[-MAX_NAME:].strip('-')
  values = {'command': shlex.quote(format_command(command)), 'name': f'ablate-{name}'}
  return re.sub(r'\{(command|name)\}', lambda match: values[match[1]], template)


def submit_units(
  ledger: Ledger,
  ids: Sequence[str],
  make_command: Callable[[Unit], list[str]],
  template: str,
  stop: StopRequest,
  log: Log,
) -> None:
  """Puts units into a queue, until a signal arrives, and records each.

  Args:
    ledger: the ledger of the sweep.
    ids: the units.
    make_command: unit -> the command that trains it.
    template: see `fill_template`.
    stop: the request to stop.
    log: called with a line for each unit: the last one that its command has printed.

  Raises:
    UserError: for a command that fails, with its exit status and the last line of its errors.
  """
  for unit_id in ids:
    if stop.reason:
      return
    line = fill_template(template, make_command(ledger.state.units[unit_id].unit), unit_id)
    result = subprocess.run(line, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
      raise UserError(f'--submit: {unit_id}: exit status {result.returncode}: {_last_line(result.stderr)}')
    ledger.append(STARTED, unit=unit_id, command=line, job={SUBMITTED: True}, commit=code_version())
    log(f'submitted {unit_id} {_last_line(result.stdout)}'.rstrip())


def _last_line(text: str) -> str:
  return text.strip().rpartition('\n')[2]
