"""Hooks one by one: when they are due, what they record and save, and when they stop training."""

import functools
import itertools
import os
import signal
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from attention_jax.training.hooks import (
  BestEvaluation,
  CheckpointSaver,
  Evaluator,
  FiniteGuard,
  InterruptHandler,
  InterruptReason,
  MetricsLogger,
  is_due,
)
from attention_jax.training.incidents import BatchRecorder

from attention_jax.errors import UserError
from attention_jax.training import hooks, interrupts
from attention_jax.training.checkpoint import BEST, LATEST
from attention_jax.training.clock import TrainingClock
from attention_jax.training.interrupts import StopSignals, check_stop

STATE = {'step': jnp.int32(0)}


class FakeCheckpoints:
  """Records what is saved; `writing` selects whether the last checkpoint is still being written."""

  def __init__(self):
    self.saved = []
    self.writing = False

  def save(self, state, host_values, kind=LATEST):
    self.saved.append((kind, host_values))

  def is_writing(self):
    return self.writing

  def wait(self):
    self.writing = False

  def describe(self):
    return 'there is no checkpoint yet'


@pytest.fixture
def checkpoints():
  return FakeCheckpoints()


def make_metrics(loss=1.0, grad_norm=1.0, tokens=10):
  return {'loss': jnp.asarray(loss), 'grad_norm': jnp.asarray(grad_norm), 'tokens': jnp.asarray(tokens)}


def test_is_due_every_so_many_steps_and_after_the_last():
  assert [step for step in range(1, 8) if is_due(step, 3, step == 7)] == [3, 6, 7]
  assert not is_due(5, 0)
  assert is_due(5, 0, last=True)


def test_finite_guard_names_the_first_bad_update_once_a_hook_is_due(checkpoints):
  guard = FiniteGuard((0, 4, 6), checkpoints)
  for step, loss in ((1, 1.0), (2, jnp.nan), (3, jnp.inf)):
    guard(step, STATE, make_metrics(loss), False)
  message = r'^loss is nan at step 2; there is no checkpoint yet; try a lower learning rate.*, or skip such updates by'
  with pytest.raises(UserError, match=message):
    guard(4, STATE, make_metrics(), False)


def test_finite_guard_checks_gradients_and_the_last_update(checkpoints):
  guard = FiniteGuard((0,), checkpoints)
  guard(1, STATE, make_metrics(), False)
  with pytest.raises(UserError, match='gradient norm is inf at step 2'):
    guard(2, STATE, make_metrics(grad_norm=jnp.inf), True)


def test_finite_guard_names_the_seed(checkpoints):
  guard = FiniteGuard((1,), checkpoints, seeds=(5, 6, 7))
  guard(1, STATE, make_metrics(jnp.ones(3), jnp.ones(3)), False)
  with pytest.raises(UserError, match='loss of seed 6 is nan at step 2'):
    guard(2, STATE, make_metrics(jnp.array([1, jnp.nan, 1]), jnp.ones(3)), False)


def test_finite_guard_logs_skipped_updates_until_there_are_too_many(checkpoints, monkeypatch):
  monkeypatch.setattr(hooks, 'MAX_SKIPPED', 2)
  lines = []
  guard = FiniteGuard((1,), checkpoints, skips=True, log=lines.append)
  for step, loss in enumerate([jnp.nan, jnp.inf, 1.0, jnp.nan, jnp.nan], 1):
    guard(step, STATE, make_metrics(loss), False)
  assert lines == [
    f'loss is {x} at step {n}: update skipped' for n, x in ((1, 'nan'), (2, 'inf'), (4, 'nan'), (5, 'nan'))
  ]
  with pytest.raises(UserError, match='loss is nan at step 6; there is no checkpoint yet'):
    guard(6, STATE, make_metrics(jnp.nan), False)


def test_finite_guard_stores_the_first_bad_batches_in_a_row(checkpoints):
  stored = []
  recorder = types.SimpleNamespace(store=stored.append)
  guard = FiniteGuard((1,), checkpoints, recorder=recorder, skips=True, log=lambda line: None)
  for step, is_bad in enumerate([True] * 7 + [False] + [True] * 2, 1):
    guard(step, STATE, make_metrics(jnp.nan if is_bad else 1.0), False)
  assert stored == [1, 2, 3, 4, 5, 9, 10]


def test_finite_guard_writes_spikes_and_prints_nothing(checkpoints, capsys):
  records = []
  recorder = types.SimpleNamespace(rows=lambda update, run: [update, 7])
  file_writers = [[lambda *record: records.append(record)]]
  guard = FiniteGuard((1,), checkpoints, recorder=recorder, file_writers=file_writers)
  for step in range(1, 61):
    guard(step, STATE, make_metrics(2.0 + 0.01 * (step % 3)), False)
  guard(61, STATE, make_metrics(9.0), False)
  mean = pytest.approx(2.01, abs=1e-3)
  assert records == [(61, {'train/spike': 9.0, 'train/spike_mean': mean, 'train/spike_rows': [61, 7]})]
  assert capsys.readouterr().out == ''


def test_a_spike_is_written_with_its_seed_and_the_rows_of_that_seed(checkpoints):
  """The other run has stopped: its losses are 0, and its rows are not listed."""
  records = []
  index = np.array([[0, 1], [2, -1]])
  recorder = BatchRecorder('unused', lambda start, stop: [types.SimpleNamespace(index=index)], rows_axis=1)
  file_writers = [[pytest.fail], [lambda *record: records.append(record)]]
  guard = FiniteGuard((1,), checkpoints, seeds=(5, 6), recorder=recorder, file_writers=file_writers)
  for step in range(1, 61):
    guard(step, STATE, make_metrics(jnp.array([0.0, 2.0]), jnp.ones(2)), False)
  guard(61, STATE, make_metrics(jnp.array([0.0, 4.0]), jnp.ones(2)), False)
  assert records == [(61, {'train/spike': 4.0, 'train/spike_mean': 2.0, 'train/spike_rows': [2]})]


def test_metrics_are_logged_with_rates_over_the_interval(time):
  records = []
  logger = MetricsLogger(2, [lambda *record: records.append(record)], TrainingClock(), lambda: 7)
  for step, tokens in ((1, 10), (2, 30), (3, 5)):
    time.now += 2.0
    assert logger(step, STATE, make_metrics(0.5, 0.25, tokens), step == 3) is None
  first, last = records
  assert first == (
    2,
    {
      'train/loss': 0.5,
      'train/grad_norm': 0.25,
      'train/tokens_per_second': 10.0,
      'train/steps_per_second': 0.5,
      'train/compilations': 7,
    },
  )
  assert last[0] == 3 and last[1]['train/tokens_per_second'] == 2.5 and last[1]['train/steps_per_second'] == 0.5


def test_metrics_of_several_runs_are_lists_with_the_rates_of_all_together(time):
  records = []
  logger = MetricsLogger(1, [lambda step, record: records.append(record)], TrainingClock(), lambda: 1)
  time.now = 2.0
  logger(1, STATE, make_metrics(jnp.array([0.5, 1.5]), jnp.ones(2), jnp.array([10, 20])), False)
  assert records[0]['train/loss'] == [0.5, 1.5]
  assert records[0]['train/tokens_per_second'] == 15.0 and records[0]['train/steps_per_second'] == 0.5


def best_of(direction, values):
  def evaluate(best, evaluation):
    return best.with_evaluation(*evaluation, direction)

  return functools.reduce(evaluate, enumerate(values, 1), BestEvaluation())


def test_the_best_evaluation_depends_on_the_direction():
  assert best_of('max', (2.0, 3.0, 1.0)) == BestEvaluation(3.0, 2, 1)
  assert best_of('min', (2.0, 3.0, 1.0)) == BestEvaluation(1.0, 3, 0)


def test_equal_values_and_nan_are_no_improvement():
  assert best_of('min', (2.0, 2.0)) == best_of('max', (2.0, 2.0)) == BestEvaluation(2.0, 1, 1)
  assert best_of('min', (float('nan'),)) == BestEvaluation(None, None, 1)
  assert best_of('min', (float('nan'), 5.0, float('nan'))) == BestEvaluation(5.0, 2, 1)


def test_patience_counts_evaluations_without_improvement():
  assert BestEvaluation(stale=5).stop_reason(0) is None
  assert BestEvaluation(1.0, 4, 2).stop_reason(3) is None
  assert BestEvaluation(1.0, 4, 3).stop_reason(3) == 'no improvement since step 4, evaluations: 3'
  nan = float('nan')
  assert best_of('min', (nan, nan)).stop_reason(2) == 'the metric to select by was NaN in all 2 evaluations'


def make_evaluator(evaluate, checkpoints, **options):
  records = []
  defaults = {'select': 'loss', 'direction': 'min', 'patience': 0, 'best': BestEvaluation(), 'signals': StopSignals()}
  evaluator = Evaluator(
    2,
    evaluate,
    checkpoints=checkpoints,
    writers=[lambda *record: records.append(record)],
    clock=TrainingClock(),
    **defaults | options,
  )
  return evaluator, records


def test_evaluator_writes_every_evaluation_and_saves_each_best_state(checkpoints):
  values = iter([3.0, 1.0, 2.0])

  def evaluate(state):
    return {'loss': next(values), 'signature': 'v1'}

  evaluator, records = make_evaluator(evaluate, checkpoints)
  for step in range(1, 6):
    assert evaluator(step, STATE, {}, step == 5) is None
  assert [(step, record['validation/loss']) for step, record in records] == [(2, 3.0), (4, 1.0), (5, 2.0)]
  assert records[0][1]['validation/signature'] == 'v1'
  assert checkpoints.saved == [
    (BEST, {'best': {'value': 3.0, 'step': 2, 'stale': 0}}),
    (BEST, {'best': {'value': 1.0, 'step': 4, 'stale': 0}}),
  ]
  assert evaluator.best == BestEvaluation(1.0, 4, 1)


def test_evaluator_stops_when_patience_is_exhausted(checkpoints):
  evaluator, _ = make_evaluator(lambda state: {'bleu': 1.0}, checkpoints, select='bleu', direction='max', patience=1)
  assert evaluator(2, STATE, {}, False) is None
  assert evaluator(4, STATE, {}, False) == 'no improvement since step 2, evaluations: 1'


def test_evaluator_resumes_from_the_best_evaluation_so_far(checkpoints):
  evaluator, _ = make_evaluator(lambda state: {'loss': 5.0}, checkpoints, best=BestEvaluation(1.0, 10, 0))
  evaluator(12, STATE, {}, False)
  assert evaluator.best == BestEvaluation(1.0, 10, 1) and not checkpoints.saved


def test_a_signal_stops_an_evaluation_without_a_result(checkpoints):
  def evaluate(state):
    signal.raise_signal(signal.SIGTERM)
    check_stop()
    raise AssertionError

  with InterruptHandler() as handler:
    evaluator, records = make_evaluator(evaluate, checkpoints, best=BestEvaluation(1.0, 1, 0), signals=handler)
    reason = evaluator(2, STATE, {}, False)
  assert reason == 'stopped by SIGTERM' and isinstance(reason, InterruptReason)
  assert evaluator.is_interrupted and evaluator.best == BestEvaluation(1.0, 1, 0)
  assert not records and not checkpoints.saved


def test_evaluation_does_not_count_as_training_time(time, checkpoints):
  def evaluate(state):
    time.now += 100.0
    return {'loss': 1.0}

  clock = TrainingClock()
  evaluator = Evaluator(
    1,
    evaluate,
    select='loss',
    direction='min',
    patience=0,
    checkpoints=checkpoints,
    writers=[],
    clock=clock,
    best=BestEvaluation(),
    signals=StopSignals(),
  )
  evaluator(1, STATE, {}, False)
  time.now += 1.0
  assert clock.lap() == 1.0


def test_an_unknown_metric_or_direction_is_an_error(checkpoints):
  evaluator, _ = make_evaluator(lambda state: {'bleu': 1.0, 'loss': 2.0}, checkpoints, select='blue')
  with pytest.raises(UserError, match=r"unknown metric to select by 'blue' .*'bleu'.*expected one of: bleu, loss"):
    evaluator(2, STATE, {}, False)
  with pytest.raises(UserError, match=r"unknown direction 'up'; expected one of: max, min"):
    make_evaluator(lambda state: {}, checkpoints, direction='up')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_reason_to_stop(number):
  previous_handler = signal.getsignal(number)
  with InterruptHandler() as handler:
    assert handler(1, STATE, {}, False) is None
    os.kill(os.getpid(), number)
    reason = handler(2, STATE, {}, False)
    assert reason == f'stopped by {number.name}' and isinstance(reason, InterruptReason)
  assert signal.getsignal(number) == previous_handler


def test_a_second_interrupt_is_immediate():
  with InterruptHandler() as handler:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
    assert handler(1, STATE, {}, False) == 'stopped by SIGINT'


def test_other_threads_leave_signals_alone():
  previous_handler = signal.getsignal(signal.SIGTERM)
  reasons = []

  def run():
    with InterruptHandler() as handler:
      reasons.append(handler(1, STATE, {}, False))
      assert signal.getsignal(signal.SIGTERM) == previous_handler

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert reasons == [None]


def test_several_processes_stop_at_the_step_that_jax_selects(monkeypatch):
  previous_handler = signal.getsignal(signal.SIGTERM)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(interrupts, '_calls', itertools.count(1))
  monkeypatch.setattr(ocp.utils, 'reached_preemption', lambda call: call == 3)
  with InterruptHandler() as handler:
    assert signal.getsignal(signal.SIGTERM) == previous_handler
    reasons = [handler(step, STATE, {}, False) for step in (1001, 1002, 1003)]  # of a resumed run
  assert reasons == [None, None, 'stopped by SIGTERM'] and isinstance(reasons[2], InterruptReason)


def test_the_saver_stores_current_host_values_when_due_and_at_the_end(checkpoints):
  host = {}
  saver = CheckpointSaver(2, checkpoints, TrainingClock(), lambda: dict(host))
  for step in range(1, 6):
    host['value'] = step
    assert saver(step, STATE, {}, step == 5) is None
  assert checkpoints.saved == [(LATEST, {'value': 2}), (LATEST, {'value': 4}), (LATEST, {'value': 5})]


def test_the_saver_reports_a_best_state_that_cannot_be_written_after_the_current_update(checkpoints, monkeypatch):
  def fail():
    raise UserError('cannot save checkpoint best/1')

  saver = CheckpointSaver(100, checkpoints, TrainingClock(), dict)
  checkpoints.save(STATE, {}, BEST)
  checkpoints.writing = True
  monkeypatch.setattr(checkpoints, 'wait', fail)
  assert saver(1, STATE, {}, False) is None
  checkpoints.writing = False
  with pytest.raises(UserError, match=r'^cannot save checkpoint best/1$'):
    saver(2, STATE, {}, False)


def test_the_saver_calls_back_between_two_updates_when_a_checkpoint_is_on_disk(checkpoints):
  calls = []
  saver = CheckpointSaver(
    3, checkpoints, TrainingClock(), dict, after_save=lambda: calls.append((step, checkpoints.writing))
  )
  for step in range(1, 8):
    checkpoints.writing = step in (3, 4, 7)
    saver(step, STATE, {}, step == 7)
  assert calls == [(5, False), (6, False), (7, False)]  # after the last update, the saver waits
