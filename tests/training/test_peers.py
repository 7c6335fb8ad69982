"""Processes that train together agree on their inputs, and stop together."""

import signal
import threading

import jax
import pytest

from attention_jax.errors import UserError
from attention_jax.training import interrupts, peers
from attention_jax.training.peers import (
  check_agreement,
  copy_from_first,
  exchange,
  fail_together,
  map_batches,
  package_versions,
)
from tests.experiments.helpers import read_tree, start_together, wait_for_outputs
from tests.training.test_seeds import RUNS, folders_in, values_of

DIFFERENT = 'UserError b is 0 in process 0, 1 in process 1; all processes need the same command, packages and data'


def test_one_process_agrees_with_itself(tmp_path):
  assert exchange('a') == ['a']
  assert list(map_batches(lambda i: {'square': i * i}, range(3))) == [(i, {'square': i * i}) for i in range(3)]
  check_agreement(package_versions())
  copy_from_first(tmp_path)
  with pytest.raises(UserError, match=r'^no file$'), fail_together():
    raise UserError('no file')


def test_batches_that_are_computed_at_once_are_in_order_and_a_signal_ends_them(monkeypatch):
  monkeypatch.setattr(peers, 'program_threads', lambda: 2)
  meeting = threading.Barrier(2, timeout=60)

  def square(i):
    meeting.wait()  # returns only if two calls wait here
    return i * i

  with interrupts.StopSignals() as signals:
    assert list(map_batches(square, range(6), signals.check)) == [(i, i * i) for i in range(6)]
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(interrupts.Interrupted):
      list(map_batches(lambda i: i, range(6), signals.check))


def test_the_versions_are_those_of_the_packages():
  versions = package_versions()
  assert versions['the version of jax'] == jax.__version__ and 'the version of orbax-checkpoint' in versions


def test_two_processes_agree_or_stop_with_one_line(tmp_path):
  outputs = wait_for_outputs(start_together('tests.training.agree', tmp_path))
  for index, output in enumerate(outputs):
    lines = dict(line.split(': ', 1) for line in output.splitlines() if ': ' in line)
    assert lines['exchange'] == str(['', 'größer'])
    assert lines['nobody'] == lines['same'] == 'None'
    assert lines['second'] == 'UserError process 1 of 2: no file'
    assert lines['both'] == 'UserError no config'
    assert lines['different'] == DIFFERENT
    assert lines['absent'].startswith('UserError a is absent in process 0, ' + 'x' * 60 + '... (digest ')
    assert [lines[f'batch {i}'] for i in range(5)] == ["['int8', 'bool', 'float32']"] * 5
    assert lines['computed'] == ['[0, 2, 4]', '[1, 3, 4]'][index]
    assert lines['checkpoint'] == ['[0.0, 1.0]', '[2.0, 3.0]'][index]
    assert lines['evaluated'] == str(100 / 3)  # that of process 0, not rounded: a tie stays one on resuming
    assert lines['signal'].startswith('SIGTERM at step 10')
  assert len({line for output in outputs for line in output.splitlines() if line.startswith('signal: ')}) == 1
  assert read_tree(tmp_path / '0') == read_tree(tmp_path / '1') == {'words': b'eins\nzwei\n', 'empty': b''}


@pytest.mark.long
def test_two_processes_train_several_seeds(tmp_path):
  """The quick form, in one process, is that of tests/training/test_seeds.py."""
  outputs = wait_for_outputs(start_together('tests.training.agree', tmp_path, 'seeds'))
  assert all("seeds: ['all 4 steps are done'" in output for output in outputs)
  assert 'step 4/4' in outputs[0] and 'step 4/4' not in outputs[1]  # process 0 alone logs
  losses = {tuple(values_of(folder)) for folder in folders_in(tmp_path)}
  assert len(losses) == RUNS and {tuple(step for step, _ in run) for run in losses} == {(2, 4)}
