"""The ledger of a sweep: one JSON object per event, appended to `ledger.jsonl` and never changed.

The state of a sweep is a fold over its events, so that a sweep can be continued, extended and reported at any moment,
even after its process was killed.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from attention_jax.atomic import to_json, write_all
from attention_jax.errors import UserError

LEDGER = 'ledger.jsonl'
LOCK = '.lock'

# States of a unit.
PLANNED = 'planned'
STARTED = 'started'
FINISHED = 'finished'
FAILED = 'failed'
INTERRUPTED = 'interrupted'
UNIT_EVENTS = (PLANNED, STARTED, FINISHED, FAILED, INTERRUPTED)
# Other events.
OPENED = 'opened'  # an ablate process has started: command, commit, workers
COSTS = 'costs'  # parameters and FLOP of a setting
SUBMITTED = 'submitted'  # key of the job of a unit that --submit has put into a queue


@dataclasses.dataclass(frozen=True)
class Unit:
  """One process of a sweep: a setting with one seed, or with several that are trained side by side.

  Attributes:
    id: its name in the ledger.
    setting_id: hash of the config, see resolve.config_id.
    setting: the fields that the sweep varies, with their values.
    path: config file and preset.
    overrides: the fields of the config that differ from `path`; the command sets them.
    seeds: consecutive seeds.
    folder: the run folder, relative to the folder of the sweep; absolute for an adopted run and with --runs.
    plugins: the value of --plugins, or ''.
  """

  id: str
  setting_id: str
  setting: dict[str, Any]
  path: str
  overrides: dict[str, Any]
  seeds: tuple[int, ...]
  folder: str
  plugins: str = ''


@dataclasses.dataclass(frozen=True)
class UnitState:
  """The state of a unit according to the ledger.

  Attributes:
    unit: the unit.
    state: the name of its last event.
    seconds: recorded duration of its processes, summed over all attempts.
    attempts: number of times that it was started.
    started: when it was last started, seconds since 1970.
    error: the message of the last failure; '' once it has been started again.
    log: the file with the output of its processes, relative to the folder of the sweep.
    commit: commit of the code at its last start.
    job: data with which its process can be found again, as recorded at its last start.
  """

  unit: Unit
  state: str = PLANNED
  seconds: float = 0.0
  attempts: int = 0
  started: float = 0.0
  error: str = ''
  log: str = ''
  commit: str = ''
  job: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_submitted(self) -> bool:
    """Whether --submit has put it into a queue; its results have not been found since."""
    return self.state == STARTED and SUBMITTED in self.job


@dataclasses.dataclass(frozen=True)
class SweepState:
  """The state of a sweep.

  Attributes:
    units: by id, in the order in which they were planned.
    costs: setting id -> its 'costs' event.
    opened: the 'opened' events.
  """

  units: Mapping[str, UnitState] = dataclasses.field(default_factory=dict)
  costs: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  opened: tuple[Mapping[str, Any], ...] = ()

  @property
  def finished(self) -> list[UnitState]:
    """The units that have finished, which reports read."""
    return [entry for entry in self.units.values() if entry.state == FINISHED]

  def covered_seeds(self, setting_id: str) -> set[int]:
    """Returns the seeds of a setting for which there is a unit, in any state."""
    return {seed for entry in self.units.values() if entry.unit.setting_id == setting_id for seed in entry.unit.seeds}


def fold(events: Iterable[Mapping[str, Any]]) -> SweepState:
  """Returns the state after all events; events of unknown kinds are ignored."""
  state = SweepState()
  for event in events:
    state = _apply(state, event)
  return state


def _apply(state: SweepState, event: Mapping[str, Any]) -> SweepState:
  kind = event.get('event')
  if kind in UNIT_EVENTS:
    return dataclasses.replace(state, units=dict(state.units) | {event['unit']: _apply_to_unit(state, event)})
  if kind == COSTS:
    return dataclasses.replace(state, costs=dict(state.costs) | {event['setting_id']: event})
  if kind == OPENED:
    return dataclasses.replace(state, opened=(*state.opened, event))
  return state


def _apply_to_unit(state: SweepState, event: Mapping[str, Any]) -> UnitState:
  if event['event'] == PLANNED:
    fields = {field.name for field in dataclasses.fields(Unit)} - {'id', 'seeds'}
    return UnitState(Unit(event['unit'], seeds=tuple(event['seeds']), **{name: event[name] for name in fields}))
  entry = state.units[event['unit']]
  changes: dict[str, Any] = {'state': event['event'], 'seconds': entry.seconds + event.get('seconds', 0.0)}
  if event['event'] == STARTED:
    changes |= {'attempts': entry.attempts + 1, 'started': event.get('time', 0.0), 'error': ''}
  copied = {name: event[name] for name in ('error', 'log', 'commit', 'job') if name in event}
  return dataclasses.replace(entry, **changes | copied)


def planned_event(unit: Unit) -> dict[str, Any]:
  """Returns the fields of the event that plans a unit."""
  fields = dataclasses.asdict(unit)
  return {'unit': fields.pop('id'), **fields}


# Fields that an event must have: `read_events` leaves out an event that lacks one.
REQUIRED_FIELDS = {kind: {'unit'} for kind in UNIT_EVENTS} | {
  PLANNED: {'unit', *(field.name for field in dataclasses.fields(Unit))} - {'id'},
  COSTS: {'setting_id', 'parameters', 'update_flop'},
}


class Ledger:
  """The ledger of one sweep, open for appending.

  Args:
    folder: the folder of the sweep.

  Attributes:
    state: the state after the events so far.
    report: one line for each line of the file that is left out, such as a truncated last line, and one if the folder
      cannot be locked.
  """

  def __init__(self, folder: Path):
    self.folder = folder
    events, self.report = read_events(folder)
    self.state = fold(events)
    path = folder / LEDGER
    is_truncated = path.exists() and not path.read_bytes().endswith(b'\n') and path.stat().st_size > 0
    self._file = open(path, 'ab', buffering=0)  # noqa: SIM115 - closed by close()
    if is_truncated:  # the truncated line is kept; the next event begins on a new line
      self._file.write(b'\n')

  def append(self, event: str, **fields: Any) -> None:
    """Writes one event to the disk, and applies it to `state`."""
    record = {'event': event, 'time': round(time.time(), 3), **fields}
    line = to_json(record, ensure_ascii=False)
    write_all(self._file, line.encode() + b'\n')
    os.fsync(self._file.fileno())
    self.state = _apply(self.state, json.loads(line))

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read_events(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
  """Reads the events of a sweep.

  Args:
    folder: the folder of the sweep.

  Returns:
    The events, and a message for each line of the file that is left out: one that is no event, such as one that a
    killed process truncated, and an event of a unit that is not planned.
  """
  path = folder / LEDGER
  if not path.is_file():
    return [], []
  events = []
  report = []
  planned = set()
  for number, line in enumerate(path.read_bytes().split(b'\n'), 1):
    if not line.strip():
      continue
    event = _parse_event(line)
    reason = '' if event else 'not a whole event'
    if event and event['event'] == PLANNED:
      planned.add(event['unit'])
    elif event and event['event'] in UNIT_EVENTS and event['unit'] not in planned:
      reason = 'an event of a unit that is not planned'
    if reason:
      report.append(f'{path}:{number}: {reason}, left out: {line[:60].decode(errors="replace")!r}')
    else:
      events.append(event)
  return events, report


def _parse_event(line: bytes) -> dict[str, Any] | None:
  """The event of a line; None if it is no event, or lacks a field."""
  try:
    event = json.loads(line)
  except ValueError:
    return None
  if not isinstance(event, dict) or 'event' not in event:
    return None
  return event if REQUIRED_FIELDS.get(event['event'], set()) <= event.keys() else None


def read_state(folder: Path) -> SweepState:
  """Returns the state of a sweep without opening its ledger for appending.

  Raises:
    UserError: if the folder has no ledger.
  """
  if not (folder / LEDGER).is_file():
    raise UserError(f'{folder} holds no {LEDGER}; expected the folder of a sweep')
  return fold(read_events(folder)[0])


@contextlib.contextmanager
def open_ledger(folder: Path) -> Iterator[Ledger]:
  """Opens the ledger of a sweep for this process alone.

  Args:
    folder: the folder of the sweep; created if it does not exist.

  Raises:
    UserError: if another process runs the sweep, if the folder belongs to a training run, or if it cannot be created.
  """
  if (folder / 'config.json').exists():
    raise UserError(f'{folder} holds a training run; choose another folder for the sweep, and add the run with --adopt')
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'cannot use {folder} as the folder of a sweep: {error.strerror}') from error
  lock = filelock.FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
  report = []
  try:
    lock.acquire()
  except filelock.Timeout as error:
    raise UserError(
      f'another process runs the sweep in {folder}; wait until it ends, or choose another folder'
    ) from error
  except (NotImplementedError, OSError) as error:
    report.append(f'cannot lock {folder} ({error}): another process that runs the sweep would not be detected')
  try:
    with contextlib.closing(Ledger(folder)) as ledger:
      ledger.report += report
      yield ledger
  finally:
    lock.release()
