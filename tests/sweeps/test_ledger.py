"""The ledger: events, the state that they fold to, truncated lines, and one process at a time."""

import subprocess
import sys

import pytest

from attention_jax.errors import UserError
from attention_jax.sweeps.ledger import (
  FAILED,
  FINISHED,
  INTERRUPTED,
  LEDGER,
  PLANNED,
  STARTED,
  Unit,
  fold,
  open_ledger,
  planned_event,
  read_events,
  read_state,
)

UNIT = Unit('a/seed_0', 'abcd', {'x': 1}, 'f.py:p', {'x': 1}, (0,), 'a/seed_0')


def test_the_state_is_a_fold_over_the_events(tmp_path):
  with open_ledger(tmp_path) as ledger:
    ledger.append(PLANNED, **planned_event(UNIT))
    assert ledger.state.units[UNIT.id].unit == UNIT and ledger.state.units[UNIT.id].state == PLANNED
    ledger.append(STARTED, unit=UNIT.id, job={'pid': 3}, log='a.log', commit='c')
    ledger.append(INTERRUPTED, unit=UNIT.id, seconds=2.0)
    ledger.append(STARTED, unit=UNIT.id, job={'pid': 4}, log='a.log', commit='d')
    ledger.append(FAILED, unit=UNIT.id, seconds=3.0, error='loss is nan')
    entry = ledger.state.units[UNIT.id]
    assert (entry.state, entry.seconds, entry.attempts, entry.error) == (FAILED, 5.0, 2, 'loss is nan')
    assert (entry.commit, entry.job) == ('d', {'pid': 4})
    ledger.append(STARTED, unit=UNIT.id)
    assert ledger.state.units[UNIT.id].error == ''
    ledger.append(FINISHED, unit=UNIT.id, seconds=1.0)
    state = ledger.state
  assert read_state(tmp_path) == state
  assert state.finished == [state.units[UNIT.id]]
  assert state.covered_seeds('abcd') == {0} and state.covered_seeds('other') == set()


def test_every_prefix_of_the_file_is_a_state(tmp_path):
  with open_ledger(tmp_path) as ledger:
    ledger.append(PLANNED, **planned_event(UNIT))
    ledger.append(STARTED, unit=UNIT.id)
    ledger.append(FINISHED, unit=UNIT.id)
  data = (tmp_path / LEDGER).read_bytes()
  states = []
  for size in range(len(data) + 1):  # killed after any byte
    (tmp_path / LEDGER).write_bytes(data[:size])
    entry = read_state(tmp_path).units.get(UNIT.id)
    states.append(entry.state if entry else '')
  assert list(dict.fromkeys(states)) == ['', PLANNED, STARTED, FINISHED]


def test_a_truncated_line_is_reported_and_left_alone(tmp_path):
  with open_ledger(tmp_path) as ledger:
    ledger.append(PLANNED, **planned_event(UNIT))
  with open(tmp_path / LEDGER, 'ab') as file:
    file.write(b'{"event": "star')
  with open_ledger(tmp_path) as ledger:
    assert ledger.report == [f'{tmp_path / LEDGER}:2: not a whole event, left out: \'{{"event": "star\'']
    ledger.append(STARTED, unit=UNIT.id)
  events, report = read_events(tmp_path)
  assert [event['event'] for event in events] == [PLANNED, STARTED] and len(report) == 1
  assert fold(events).units[UNIT.id].state == STARTED


@pytest.mark.long
def test_a_second_process_cannot_open_the_ledger(tmp_path):
  imports = 'from pathlib import Path; from attention_jax.sweeps.ledger import open_ledger'
  command = [sys.executable, '-c', f'{imports}; open_ledger(Path({str(tmp_path)!r})).__enter__()']
  with open_ledger(tmp_path):
    result = subprocess.run(command, capture_output=True, text=True)
  assert f'another process runs the sweep in {tmp_path}' in result.stderr
  with open_ledger(tmp_path):
    pass


def test_opening_a_ledger_in_a_run_folder_raises_and_writes_nothing(tmp_path):
  with pytest.raises(UserError, match=r'holds no ledger\.jsonl; expected the folder of a sweep'):
    read_state(tmp_path)
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(UserError, match='holds a training run'), open_ledger(tmp_path):
    pass
  assert [path.name for path in tmp_path.iterdir()] == ['config.json']


def test_events_of_a_unit_whose_plan_is_damaged_are_left_out(tmp_path):
  with open_ledger(tmp_path) as ledger:
    ledger.append(PLANNED, **planned_event(UNIT))
    ledger.append(STARTED, unit=UNIT.id)
  path = tmp_path / LEDGER
  planned, started = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(planned[:20] + b'\n' + started + b'{"event": "finished"}\n' + planned + started)
  with open_ledger(tmp_path) as ledger:
    assert ledger.state.units[UNIT.id].attempts == 1
    reasons = ['not a whole event', 'an event of a unit that is not planned', 'not a whole event']
    expected = [f'{path}:{number}: {reason}' for number, reason in enumerate(reasons, 1)]
    assert [line.split(', left out: ')[0] for line in ledger.report] == expected
