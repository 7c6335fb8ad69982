"""Progress: what is printed to a file or a terminal, and the time left."""

import io

import rich.console

from attention_jax.sweeps.ledger import FAILED, FINISHED, INTERRUPTED, PLANNED, STARTED, Unit, UnitState
from attention_jax.sweeps.progress import SweepProgress, time_left
from tests.sweeps.helpers import base_config, write_run


def entry(name, state, seconds=0.0, seeds=(0,)):
  return UnitState(Unit(name, 'id', {}, '', {}, seeds, name), state, seconds=seconds)


def test_time_left_counts_seeds_and_what_has_run_already():
  entries = [
    entry('a', FINISHED, 30.0, (0, 1, 2)),
    entry('b', FINISHED, 0.0),  # adopted
    entry('c', STARTED),
    entry('d', PLANNED, seeds=(0, 1)),
    entry('e', PLANNED),
    entry('f', PLANNED),
    entry('g', FAILED),
  ]
  assert time_left(entries, {'c': 4.0}, slots=2) == ((10 - 4) + 20 + 10 + 10) / 2
  assert time_left(entries[1:], {}, 1) is None


def test_time_left_is_that_of_the_longest_unit_if_slots_are_free_without_the_time_of_interrupted_processes():
  entries = [entry('a', FINISHED, 10.0), entry('b', STARTED), entry('c', STARTED, seeds=(0, 1))]
  assert time_left(entries, {'b': 4.0, 'c': 4.0}, slots=4) == 20 - 4
  assert time_left(entries[:1], {}, slots=4) == 0
  entries = [entry('a', FINISHED, 10.0), entry('b', INTERRUPTED, 7.0), entry('c', STARTED, 3.0)]
  assert time_left(entries, {'c': 2.0}, slots=1) == (10 - 7) + (10 - 3 - 2)


def test_a_file_receives_a_line_for_each_event_and_then_at_most_each_minute(tmp_path):
  out = io.StringIO()
  progress = SweepProgress(tmp_path, 2, rich.console.Console(file=out, width=40))
  entries = [entry('a', FINISHED, 60.0), entry('b', STARTED), entry('c', FAILED)]
  write_run(tmp_path / 'b', base_config(), {})
  progress.log_with_counts(entries, {'b': 10.0}, 'finished a')
  progress.update(entries, {'b': 10.0})  # nothing: less than a minute has passed
  progress._last_print -= 100
  progress.update(entries, {'b': 10.0})
  progress.close()
  first, second = out.getvalue().splitlines()
  assert first.endswith('1/3 done, 1 running, 1 failed, left 0:00:50  finished a')
  assert second.endswith('left 0:00:50  b: step 30, 10 s') and '\x1b' not in out.getvalue()


def test_a_terminal_shows_what_runs(tmp_path):
  out = io.StringIO()
  progress = SweepProgress(tmp_path, 1, rich.console.Console(file=out, width=80, force_terminal=True))
  progress.update([entry('b', STARTED)], {'b': 3.0})
  progress.close()
  assert '0/1 done, 1 running, 0 failed' in out.getvalue() and 'b: starting, 3 s' in out.getvalue()
