"""Runs the units of a sweep: starts processes, records how each ends, and stops in an orderly way."""

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from attention_jax.sweeps.ledger import FAILED, FINISHED, INTERRUPTED, STARTED, Ledger, Unit, UnitState
from attention_jax.sweeps.plan import format_command, has_results, unit_folder
from attention_jax.sweeps.progress import SweepProgress, read_tail
from attention_jax.sweeps.workers import Executor, Job, Request, is_training
from attention_jax.systems.experiment import RESULTS
from attention_jax.systems.provenance import code_version
from attention_jax.training.interrupts import StopRequest

POLL_SECONDS = 0.5
EXIT_INTERRUPTED = 75  # of train.py: a signal stopped it, the same command resumes
# Of a process that was stopped before it could save its state, or took too long, see workers.KILL_AFTER.
STOPPED = (-signal.SIGTERM, -signal.SIGKILL)
LOG_TAIL_BYTES = 20_000
ERROR_LINE = re.compile(r'^error: (.+)$', re.MULTILINE)
EXCEPTION_LINE = re.compile(r'^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?$', re.MULTILINE)


class Driver:
  """Runs units and writes the ledger.

  Args:
    ledger: the ledger of the sweep.
    executor: where processes run.
    make_command: unit -> the command that trains it.
    progress: reports the start and the end of each unit.
    stop: the request to stop; its reason is the signal that has arrived.
  """

  def __init__(
    self,
    ledger: Ledger,
    executor: Executor,
    make_command: Callable[[Unit], list[str]],
    progress: SweepProgress,
    stop: StopRequest,
  ):
    self._ledger = ledger
    self._executor = executor
    self._make_command = make_command
    self._progress = progress
    self._stop = stop
    self._ids: frozenset[str] = frozenset()  # of the units of `run`
    self._jobs: dict[str, Job] = {}
    self._start_times: dict[str, float] = {}  # time.monotonic() by the id of a unit
    self._waiting: set[str] = set()  # units whose wait for another process is in the log

  def run(self, ids: Sequence[str]) -> None:
    """Runs units until each has finished, failed or been interrupted, or until a signal arrives.

    Args:
      ids: the units, in this order; one whose folder another process still uses is started later.
    """
    queue = deque(ids)
    self._ids = frozenset(ids)
    self._find_jobs(queue)
    while queue or self._jobs:
      if self._stop.reason:
        self._finish_early()
        return
      self._start(queue)
      self._collect()
      self._progress.update(self._entries(), self._running_seconds())
      if queue or self._jobs:
        time.sleep(POLL_SECONDS)

  def _finish_early(self) -> None:
    """Stops the processes of this machine and records them; jobs of a cluster continue, to be found again."""
    self._jobs = {unit_id: job for unit_id, job in self._jobs.items() if job.ends_with_sweep}
    self._progress.log(f'{self._stop.reason}: {len(self._jobs)} processes save their state and end')
    for job in self._jobs.values():
      job.stop()
    while self._jobs:
      self._collect()
      time.sleep(POLL_SECONDS)

  def _find_jobs(self, queue: deque[str]) -> None:
    """Takes over jobs of a cluster that an earlier process of the sweep started."""
    for unit_id in list(queue):
      entry = self._ledger.state.units[unit_id]
      job = self._executor.find(entry.job) if entry.state == STARTED else None
      if job is not None:
        queue.remove(unit_id)
        has_ended = job.poll() is not None  # the duration of such a job was not measured
        self._track(unit_id, job, 0.0 if has_ended else time.time() - entry.started)

  def _start(self, queue: deque[str]) -> None:
    """Starts as many units as there are free slots; one whose folder is still locked goes to the end of the queue."""
    ready: list[str] = []
    for _ in range(len(queue)):
      if len(self._jobs) + len(ready) >= self._executor.slots:
        break
      unit_id = queue.popleft()
      folder = unit_folder(self._ledger.state.units[unit_id].unit, self._ledger.folder)
      if is_training(folder):
        queue.append(unit_id)
        if unit_id not in self._waiting:
          self._waiting.add(unit_id)
          self._progress.log(f'{unit_id} waits until another process that trains in {folder} has ended')
      else:
        ready.append(unit_id)
    if not ready:
      return
    units = [self._ledger.state.units[unit_id].unit for unit_id in ready]
    commands = [self._make_command(unit) for unit in units]
    logs = [self._open_log(unit, command) for unit, command in zip(units, commands, strict=True)]
    jobs = self._executor.start([Request(*pair) for pair in zip(commands, logs, strict=True)])
    for unit, command, log, job in zip(units, commands, logs, jobs, strict=True):
      self._ledger.append(
        STARTED,
        unit=unit.id,
        command=format_command(command),
        log=str(log.relative_to(self._ledger.folder)),
        job=dict(job.record),
        commit=code_version(),
      )
      self._track(unit.id, job)
      self._progress.log_with_counts(self._entries(), self._running_seconds(), f'started {unit.id}')

  def _open_log(self, unit: Unit, command: Sequence[str]) -> Path:
    """Returns the log of a unit, to which its command has been appended."""
    log = self._ledger.folder / f'{unit.id}.log'
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, 'a', encoding='utf-8') as file:
      file.write(f'$ {format_command(command)}\n')
    return log

  def _track(self, unit_id: str, job: Job, seconds: float = 0.0) -> None:
    """Follows a job that was started `seconds` ago."""
    self._jobs[unit_id] = job
    self._start_times[unit_id] = time.monotonic() - seconds

  def _collect(self) -> None:
    """Records the units whose process has ended."""
    for unit_id, job in list(self._jobs.items()):
      code = job.poll()
      if code is None:
        continue
      del self._jobs[unit_id]
      seconds = round(time.monotonic() - self._start_times.pop(unit_id), 1)
      unit = self._ledger.state.units[unit_id].unit
      if code == 0 and has_results(unit, self._ledger.folder):
        self._ledger.append(FINISHED, unit=unit_id, seconds=seconds)
        line = f'finished {unit_id} ({seconds:.0f} s)'
      elif code == EXIT_INTERRUPTED or (self._stop.reason and code in STOPPED):
        self._ledger.append(INTERRUPTED, unit=unit_id, seconds=seconds)
        line = f'interrupted {unit_id} ({seconds:.0f} s)'
      else:
        error = describe_failure(code, self._ledger.folder / f'{unit.id}.log', job.failure)
        self._ledger.append(FAILED, unit=unit_id, seconds=seconds, code=code, error=error)
        line = f'failed {unit_id} ({seconds:.0f} s): {error}'
      self._progress.log_with_counts(self._entries(), self._running_seconds(), line)

  def _entries(self) -> list[UnitState]:
    """The units that the progress counts: those of `run`, and those that have ended; no other will be started."""
    entries = self._ledger.state.units.values()
    return [entry for entry in entries if entry.unit.id in self._ids or entry.state in (FINISHED, FAILED)]

  def _running_seconds(self) -> dict[str, float]:
    return {unit_id: time.monotonic() - start for unit_id, start in self._start_times.items()}


def describe_failure(code: int, log: Path, failure: str = '') -> str:
  """Returns one line that explains why a process failed.

  Args:
    code: its exit status; negative for a signal, 0 for a process that ended without its results.
    log: the file with its output; only the part that the last attempt wrote is read.
    failure: the reason of a failure that the log does not show, see workers.Job.
  """
  try:
    text = read_tail(log, LOG_TAIL_BYTES).decode(errors='replace').rpartition('\n$ ')[2]
  except OSError:
    text = ''
  for pattern in (ERROR_LINE, EXCEPTION_LINE):
    if lines := pattern.findall(text):
      return ' '.join(lines[-1].split())
  if failure:
    return failure
  if code < 0:
    hint = '; the memory of the machine may be too small' if code == -signal.SIGKILL else ''
    return f'ended by {_signal_name(-code)}{hint}'
  if code == 0:
    return f'exit status 0, but {RESULTS} is missing; see {log}'
  return f'exit status {code} without a message; see {log}'


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:  # Python names only the first and the last real-time signal
    return f'signal {number}'
