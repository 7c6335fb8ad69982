"""Progress of a sweep: a line per event, and on a terminal a display of the running units that is redrawn."""

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import rich.console
import rich.live
import rich.text

from attention_jax.sweeps.ledger import FAILED, FINISHED, UnitState
from attention_jax.sweeps.plan import run_folders
from attention_jax.training.writers import last_step

REPORT_EVERY = 60.0  # seconds after which a line is printed without an event, if the output is not a terminal


class SweepProgress:
  """Reports the progress of a sweep.

  Args:
    folder: the folder of the sweep.
    slots: number of processes at a time.
    console: where to print; by default standard output.
  """

  def __init__(self, folder: Path, slots: int, console: rich.console.Console | None = None):
    self._folder = folder
    self._slots = slots
    self._console = console or rich.console.Console(highlight=False)
    self._live = rich.live.Live(console=self._console, auto_refresh=False, transient=True)
    if self._console.is_terminal:
      self._live.start()
    self._last_print = time.monotonic()

  def log(self, line: str) -> None:
    """Prints a line."""
    self._console.print(line, markup=False, soft_wrap=True)
    self._last_print = time.monotonic()

  def log_with_counts(self, entries: Sequence[UnitState], running: Mapping[str, float], line: str) -> None:
    """Prints a line with the time and the counts of units.

    Args:
      entries: the units of the sweep.
      running: ids of the units that run, and seconds since their start.
      line: what happened, or what is running.
    """
    clock = datetime.datetime.now().strftime('%H:%M:%S')
    self.log(f'{clock}  {self._counts(entries, running)}  {line}')

  def update(self, entries: Sequence[UnitState], running: Mapping[str, float]) -> None:
    """Redraws the display of a terminal; elsewhere, prints a line if there was none for REPORT_EVERY seconds.

    Args:
      entries: the units of the sweep.
      running: ids of the units that run, and seconds since their start.
    """
    if self._console.is_terminal:
      lines = [self._counts(entries, running), *self._running_lines(entries, running)]
      self._live.update(rich.text.Text('\n'.join(lines)), refresh=True)
    elif time.monotonic() - self._last_print > REPORT_EVERY:
      self.log_with_counts(entries, running, '; '.join(self._running_lines(entries, running)))

  def close(self) -> None:
    """Ends the live display."""
    self._live.stop()

  def _counts(self, entries: Sequence[UnitState], running: Mapping[str, float]) -> str:
    states = [entry.state for entry in entries]
    left = time_left(entries, running, self._slots)
    left_text = '-:--:--' if left is None else str(datetime.timedelta(seconds=round(left)))
    return (
      f'{states.count(FINISHED)}/{len(entries)} done, {len(running)} running, {states.count(FAILED)} failed, '
      f'left {left_text}'
    )

  def _running_lines(self, entries: Sequence[UnitState], running: Mapping[str, float]) -> list[str]:
    lines = []
    for entry in entries:
      if entry.unit.id in running:
        step = last_step(next(iter(run_folders(entry.unit, self._folder).values())))
        position = 'starting' if step is None else f'step {step}'
        lines.append(f'{entry.unit.id}: {position}, {running[entry.unit.id]:.0f} s')
    return lines


def time_left(entries: Sequence[UnitState], running: Mapping[str, float], slots: int) -> float | None:
  """Estimates the seconds until all units have ended, from the mean time of a seed in those that finished.

  An interrupted unit is resumed, not repeated. A unit is one process: free slots do not shorten it.

  Args:
    entries: the units.
    running: ids of the units that run, and seconds since their start.
    slots: number of processes at a time.

  Returns:
    The estimate; None until a unit that this sweep has trained has finished. Runs of --adopt have no recorded time.
  """
  finished = [entry for entry in entries if entry.state == FINISHED and entry.seconds]
  if not finished:
    return None
  per_seed = sum(entry.seconds for entry in finished) / sum(len(entry.unit.seeds) for entry in finished)
  remaining = [0.0]
  for entry in entries:
    if entry.state not in (FINISHED, FAILED):
      seconds = running.get(entry.unit.id, 0.0) + entry.seconds
      remaining.append(max(0.0, per_seed * len(entry.unit.seeds) - seconds))
  return max(sum(remaining) / slots, *remaining)


def read_tail(path: Path, size: int) -> bytes:
  """Returns the last bytes of a file, `size` at most."""
  with open(path, 'rb') as file:
    file.seek(max(0, path.stat().st_size - size))
    return file.read()
