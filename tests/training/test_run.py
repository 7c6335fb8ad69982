"""A run during training: checks of its losses, spikes, its best evaluation, and when it stops."""

import functools
import types

import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.training import run as run_module
from attention_jax.training.config import Training
from attention_jax.training.interrupts import Interrupted, StopSignals
from attention_jax.training.run import MAX_SPIKES, SPIKE_WINDOW, BestEvaluation, SpikeDetector, TrainedRun
from attention_jax.training.writers import read_metrics


@pytest.fixture
def make_run(tmp_path):
  """Makes a run, and closes it after the test; its lines of progress are in `lines`."""
  runs = []

  def make(name='', direction='min', **fields):
    lines = []
    run = TrainedRun(tmp_path, Training(**fields), name, direction, lines.append)
    run.lines = lines
    runs.append(run)
    return run

  yield make
  for run in runs:
    run.close()


def evaluate(run, *values):
  """Evaluates a run after steps 1, 2, ...; saves nothing."""
  run._checkpoints.save = lambda *args: None
  for step, value in enumerate(values, 1):
    run.evaluate(step, types.SimpleNamespace(), lambda state, watch, value=value: {'loss': value}, StopSignals())


def test_a_loss_or_gradient_that_is_not_finite_stops_the_run(make_run):
  run = make_run()
  run.check(1, 1.0, 1.0)
  message = r'^loss is nan at step 2; there is no checkpoint yet; try a lower learning rate.*, or skip such updates by'
  with pytest.raises(UserError, match=message):
    run.check(2, float('nan'), 1.0)
  with pytest.raises(UserError, match=r'^gradient norm of seed 6 is inf at step 3; .*replay --step=3 examines'):
    make_run('seed 6').check(3, 1.0, float('inf'))


def test_skipped_updates_are_logged_until_there_are_too_many(make_run, monkeypatch):
  monkeypatch.setattr(run_module, 'MAX_SKIPPED', 2)
  run = make_run(on_nonfinite='skip')
  for step, loss in enumerate([float('nan'), float('inf'), 1.0, float('nan'), float('nan')], 1):
    run.check(step, loss, 1.0)
  expected = [(1, 'nan'), (2, 'inf'), (4, 'nan'), (5, 'nan')]
  skipped = 'update skipped; replay --step'
  assert run.lines == [f'loss is {x} at step {n}: {skipped}={n} examines it' for n, x in expected]
  with pytest.raises(UserError, match='loss is nan at step 6; there is no checkpoint yet'):
    run.check(6, float('nan'), 1.0)


def test_spikes_are_records_and_print_nothing(make_run, tmp_path, capsys):
  run = make_run()
  run.open_writers(lambda step, record: pytest.fail('a spike is no line of progress'), [])
  for step in range(1, 61):
    run.check(step, 2.0 + 0.01 * (step % 3), 1.0)
  run.check(61, 9.0, 1.0)
  mean = pytest.approx(2.01, abs=1e-3)
  assert read_metrics(tmp_path) == [{'step': 61, 'train/spike': 9.0, 'train/spike_mean': mean}]
  assert capsys.readouterr().out == ''


def test_a_run_stops_when_patience_is_exhausted(make_run):
  run = make_run(patience=2)
  evaluate(run, 3.0, 1.0, 2.0)
  assert not run.reason and run.best == BestEvaluation(1.0, 2, 1) and run.is_live(4)
  evaluate(run, 2.0)
  assert run.reason == 'no improvement since step 2, evaluations: 2' and not run.is_live(5)


def test_a_signal_stops_an_evaluation_without_a_result(make_run):
  class Stopped(StopSignals):
    def reason(self):
      return 'SIGTERM'

  run = make_run()
  with pytest.raises(Interrupted, match=r'^SIGTERM$'):
    run.evaluate(1, types.SimpleNamespace(), lambda state, watch: watch(0, 0), Stopped())
  assert run.awaits_evaluation and run.best == BestEvaluation()


def test_an_unknown_direction_is_an_error(make_run):
  with pytest.raises(UserError, match='direction'):
    make_run(direction='down')


def best_of(direction, values):
  def evaluate(best, evaluation):
    return best.with_evaluation(*evaluation, direction)

  return functools.reduce(evaluate, enumerate(values, 1), BestEvaluation())


def test_the_best_evaluation_depends_on_the_direction_and_equal_values_and_nan_are_no_improvement():
  assert best_of('max', (2.0, 3.0, 1.0)) == BestEvaluation(3.0, 2, 1)
  assert best_of('min', (2.0, 3.0, 1.0)) == BestEvaluation(1.0, 3, 0)
  assert best_of('min', (2.0, 2.0)) == best_of('max', (2.0, 2.0)) == BestEvaluation(2.0, 1, 1)
  assert best_of('min', (float('nan'),)) == BestEvaluation(None, None, 1)
  assert best_of('min', (float('nan'), 5.0, float('nan'))) == BestEvaluation(5.0, 2, 1)


def test_patience_counts_evaluations_without_improvement():
  assert BestEvaluation(stale=5).stop_reason(0) == ''
  assert BestEvaluation(1.0, 4, 2).stop_reason(3) == ''
  assert BestEvaluation(1.0, 4, 3).stop_reason(3) == 'no improvement since step 4, evaluations: 3'
  nan = float('nan')
  assert best_of('min', (nan, nan)).stop_reason(2) == 'the metric to select by was NaN in all 2 evaluations'


def test_a_loss_far_above_its_recent_mean_is_a_spike_and_noise_is_not():
  noise = np.random.default_rng(0).normal(size=400)
  detector = SpikeDetector()
  decreasing = [3.0 * 0.99**i + 0.1 * x for i, x in enumerate(noise)]
  assert not any(detector(loss) for loss in decreasing)
  mean = detector(5.0)
  assert mean is not None and abs(mean - np.mean(decreasing[-SPIKE_WINDOW:])) < 1e-9
  assert detector(5.0) == mean  # the first spike is no part of the mean


def test_a_spike_exceeds_a_multiple_of_the_mean_even_without_noise():
  detector = SpikeDetector()
  assert [detector(loss) for loss in [2.0] * SPIKE_WINDOW] == [None] * SPIKE_WINDOW
  assert detector(2.9) is None
  assert detector(3.2) == pytest.approx(2.0 + 0.9 / SPIKE_WINDOW)


def test_only_the_first_losses_at_a_new_level_are_spikes():
  detector = SpikeDetector()
  levels = [1.0, 7.0, 30.0]
  spikes = [[detector(level + 0.01 * (i % 3)) for i in range(200)] for level in levels]
  assert [sum(mean is not None for mean in means) for means in spikes] == [0, MAX_SPIKES, MAX_SPIKES]
  assert spikes[2][0] == pytest.approx(7.01, abs=0.01)


def test_the_first_updates_are_no_spikes():
  detector = SpikeDetector()
  assert not any(detector(loss) for loss in [1.0, 100.0, 1e6])
