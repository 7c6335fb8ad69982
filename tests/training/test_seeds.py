"""Runs side by side: each equals the run of its seed alone, and interrupted runs are resumed exactly."""

import collections
import contextlib
import functools
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.losses.sequence import sequence_loss
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.config import Training
from attention_jax.training.interrupts import StopSignals
from attention_jax.training.partition import make_mesh
from attention_jax.training.run import InterruptReason
from attention_jax.training.seeds import make_updates
from attention_jax.training.train import fit, fit_seeds
from attention_jax.training.writers import read_metrics
from tests.training import helpers
from tests.training.helpers import Toy, validate

FIELDS = {
  'steps': 12,
  'seed': 3,
  'average': 0.9,
  'accumulate': 2,
  'log_every': 2,
  'evaluate_every': 5,
  'checkpoint_every': 6,
  'auxiliary': 'coverage(weight=0.1)',
  'anneal': 'temperature: linear(peak=2.0, end=0.5, steps=12)',
}
RUNS = 2
SEEDS = [3 + i for i in range(RUNS)]
LOSS = sequence_loss(
  Toy(required_loss='reinforce'), 0.1, FIELDS['auxiliary'], 'scheduled_sampling(schedule="linear(slope=0.02)")'
)
ALL_STEPS = 'all 12 steps are done'


def scale_params(seed, init=helpers.init_params):
  """Initial parameters that differ from run to run."""
  return jax.tree.map(lambda x: x * (1 + 0.1 * seed), init())


# Options of fit_all that compile faster; the state has all its fields.
LIGHT = {
  'loss': helpers.LIGHT_LOSS,
  'params': functools.partial(scale_params, init=lambda: helpers.LIGHT_PARAMS),
  'evaluate': helpers.evaluate_light,
  'accumulate': 1,
  'anneal': '',
}


def stream_of_seed(seed, start, stop):
  for step in range(start, stop):
    yield helpers.make_batch(1000 * seed + step)


def stream_of_all(start, stop):
  """The batches of all seeds."""
  return zip(*(stream_of_seed(seed, start, stop) for seed in SEEDS), strict=True)


def folders_in(folder):
  """The folder of each run."""
  return [folder / f'seed_{seed}' for seed in SEEDS]


def fit_all(folder, *, devices=4, loss=LOSS, params=scale_params, stream=stream_of_all, evaluate=validate, **fields):
  for run_folder in folders_in(folder):
    run_folder.mkdir(parents=True, exist_ok=True)
  return fit_seeds(
    folders_in(folder),
    SEEDS,
    Training(**FIELDS | fields),
    loss=loss,
    init_params=params,
    stream=stream,
    evaluate=evaluate,
    mesh=make_mesh(jax.devices()[:devices], RUNS),
  )


def steps_of(results):
  return {int(result.state.step) for result in results}


def reasons_of(results):
  return [result.reason for result in results]


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """The result of uninterrupted runs, and their folder."""
  folder = tmp_path_factory.mktemp('seeds')
  return fit_all(folder), folder


def values_of(folder, name='train/loss'):
  """[(step, value), ...] of one metric."""
  return [(record['step'], record[name]) for record in read_metrics(folder) if name in record]


def latest_step(folder, kind=LATEST):
  with contextlib.closing(Checkpoints(folder, read_only=True)) as reader:
    return reader.latest(kind)


def stored_steps(folder):
  with contextlib.closing(Checkpoints(folder, read_only=True)) as reader:
    return reader.steps()


@pytest.mark.long
@pytest.mark.parametrize('seed', SEEDS)
def test_each_run_equals_the_run_of_its_seed_alone(uninterrupted, tmp_path, seed):
  results, folder = uninterrupted
  assert steps_of(results) == {12} and reasons_of(results) == [ALL_STEPS] * RUNS and results[0].compilations == 1
  alone = fit(
    tmp_path,
    Training(**FIELDS | {'seed': seed}),
    loss=LOSS,
    init_params=scale_params,
    stream=functools.partial(stream_of_seed, seed),
    evaluate=validate,
    mesh=make_mesh(jax.devices()[:2]),
  )
  run_folder = folder / f'seed_{seed}'
  for name in ('train/loss', 'train/reinforce', 'validation/loss'):
    np.testing.assert_allclose(values_of(run_folder, name), values_of(tmp_path, name), rtol=1e-4, atol=1e-6)
  with contextlib.closing(Checkpoints(run_folder, read_only=True)) as reader:
    state, host = reader.restore(alone.state)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), state, alone.state)
  assert host['best']['step'] == alone.best.step
  first_losses = {values_of(run_folder)[0][1] for run_folder in folders_in(folder)}
  assert len(first_losses) == RUNS  # all runs differ


@pytest.mark.long
def test_interrupted_runs_are_resumed_exactly(uninterrupted, tmp_path):
  expected, expected_folder = uninterrupted
  evaluated_steps = []

  def interrupted_evaluation(state, watch):
    """Fails during the second evaluation, when the first run has finished its own."""
    evaluated_steps.append(int(state.step))
    if len(evaluated_steps) == RUNS + 2:
      raise KeyboardInterrupt
    return validate(state, watch)

  def interrupted_stream(start, stop):
    for step, batch in enumerate(stream_of_all(start, stop), start):
      if step == 8:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  with pytest.raises(KeyboardInterrupt):
    fit_all(tmp_path, evaluate=interrupted_evaluation)
  assert evaluated_steps[-1] == 10 and {latest_step(folder) for folder in folders_in(tmp_path)} == {6}
  interrupted = fit_all(tmp_path, stream=interrupted_stream)
  assert steps_of(interrupted) == {9} and set(reasons_of(interrupted)) == {'stopped by SIGTERM'}
  assert all(isinstance(result.reason, InterruptReason) for result in interrupted)
  assert_equal_runs(fit_all(tmp_path), tmp_path, expected, expected_folder)
  repeated = fit_all(tmp_path)
  assert reasons_of(repeated) == reasons_of(expected) and repeated[0].compilations == 0  # not trained again


@pytest.fixture(scope='module', params=[1, 4], ids=['in turn', 'in one program'])
def light(request, tmp_path_factory):
  """Options of light runs, and the result of uninterrupted ones and their folder."""
  options = LIGHT | {'devices': request.param, 'checkpoint_every': 4, 'keep': 3}
  folder = tmp_path_factory.mktemp('light')
  return options, fit_all(folder, **options), folder


def assert_equal_runs(results, folder, expected, expected_folder):
  for result, expected_result in zip(results, expected, strict=True):
    jax.tree.map(np.testing.assert_array_equal, result.state, expected_result.state)
    assert (result.reason, result.best) == (expected_result.reason, expected_result.best)
  for run_folder, expected_run_folder in zip(folders_in(folder), folders_in(expected_folder), strict=True):
    for name in ('train/loss', 'validation/loss'):
      assert values_of(run_folder, name) == values_of(expected_run_folder, name)
    for kind in (LATEST, BEST):
      assert latest_step(run_folder, kind) == latest_step(expected_run_folder, kind)


@pytest.mark.long
def test_runs_whose_last_checkpoints_differ_continue_from_their_own(light, tmp_path):
  """A run may be killed when the checkpoints of some seeds are written, and those of the others are not."""
  options, *expected = light
  shutil.copytree(expected[1], tmp_path, dirs_exist_ok=True)
  for run_folder, removed in zip(folders_in(tmp_path), (['12'], ['8', '12']), strict=True):
    for path in (run_folder / BEST, *(run_folder / LATEST / step for step in removed)):
      shutil.rmtree(path)
  assert_equal_runs(fit_all(tmp_path, **options), tmp_path, *expected)


@pytest.mark.long
def test_evaluations_that_a_signal_stops_are_made_before_the_next_update(light, tmp_path):
  options, *expected = light
  steps = []

  def interrupted_evaluation(state, watch):
    """Stops the second evaluation and the last one, when the first run has finished its own."""
    step = int(state.step)
    steps.append(step)
    if step > 5 and steps.count(step) == 2:
      signal.raise_signal(signal.SIGTERM)
    watch(0, 0)
    return helpers.evaluate_light(state)

  options |= {'evaluate': interrupted_evaluation}
  for step in (10, 12):
    interrupted = fit_all(tmp_path, **options)
    assert {latest_step(folder) for folder in folders_in(tmp_path)} == steps_of(interrupted) == {step}
    assert set(reasons_of(interrupted)) == {'stopped by SIGTERM'}
  assert_equal_runs(fit_all(tmp_path, **options), tmp_path, *expected)
  assert steps == [5] * RUNS + [10] * (1 + RUNS) + [12] * (1 + RUNS)


def test_evaluations_after_the_last_step_that_a_signal_stops_are_made_although_steps_is_raised(tmp_path):
  steps = []

  def interrupted_evaluation(state, watch):
    steps.append(int(state.step))
    if len(steps) == 2:  # when the first run has finished its own
      signal.raise_signal(signal.SIGTERM)
    watch(0, 0)
    return helpers.evaluate_light(state)

  options = LIGHT | {'evaluate': interrupted_evaluation, 'evaluate_every': 0, 'devices': 1}
  assert set(reasons_of(fit_all(tmp_path, steps=2, **options))) == {'stopped by SIGTERM'}
  assert steps_of(fit_all(tmp_path, steps=3, **options)) == {3}
  assert steps == [2] * (1 + RUNS) + [3] * RUNS
  for run_folder in folders_in(tmp_path):
    assert [step for step, _ in values_of(run_folder, 'validation/loss')] == [2, 3]


@pytest.mark.long
def test_the_number_of_devices_does_not_matter(uninterrupted, tmp_path):
  _, expected_folder = uninterrupted
  assert steps_of(fit_all(tmp_path, devices=1, steps=4)) == {4}
  for run_folder, expected_run_folder in zip(folders_in(tmp_path), folders_in(expected_folder), strict=True):
    np.testing.assert_allclose(values_of(run_folder)[:2], values_of(expected_run_folder)[:2], rtol=1e-5)


@pytest.mark.long
def test_a_run_that_stops_early_stays_as_it_is_while_the_others_continue(tmp_path):
  evaluations = collections.Counter()

  def distance(state, seed):
    """Distance of the parameters from the initial ones of a seed."""
    differences = jax.tree.map(lambda x, y: float(abs(x - y).sum()), state.params, scale_params(seed))
    return sum(jax.tree.leaves(differences))

  def evaluate(state, watch):
    """Run 1 gets worse, run 0 better."""
    run = min(range(RUNS), key=lambda i: distance(state, SEEDS[i]))
    evaluations[run] += 1
    return {'loss': float(state.step) if run == 1 else -float(state.step)}

  intervals = {'evaluate_every': 2, 'log_every': 1, 'checkpoint_every': 4}
  run = functools.partial(fit_all, tmp_path, evaluate=evaluate, steps=8, keep=3, **intervals)
  folders = folders_in(tmp_path)
  results = run(patience=2)
  finished = 'all 8 steps are done'
  assert steps_of(results) == {6, 8}
  assert reasons_of(results) == [finished, 'no improvement since step 2, evaluations: 2']
  assert [latest_step(folder) for folder in folders] == [8, 6]
  assert [latest_step(folder, BEST) for folder in folders] == [8, 2]
  assert stored_steps(folders[0]) == [4, 8] and stored_steps(folders[1]) == [4, 6]
  assert values_of(folders[1])[-1][0] == 6 and values_of(folders[0])[-1][0] == 8
  assert evaluations == {0: 4, 1: 3}
  continued = run(patience=2, steps=10)  # the stopped run stays as it is
  assert reasons_of(continued)[1] == reasons_of(results)[1] and evaluations[1] == 3
  assert [latest_step(folder) for folder in folders] == [10, 6]


@pytest.mark.long
def test_a_signal_at_the_update_after_which_every_run_stops_is_the_reason(tmp_path, monkeypatch):
  """Several processes learn of their signal once, from `reason`: it would be lost."""
  monkeypatch.setattr(StopSignals, 'reason', lambda self: 'SIGTERM')
  fields = LIGHT | {'evaluate': lambda state, watch: {'loss': float('nan')}, 'evaluate_every': 1, 'patience': 1}
  results = fit_all(tmp_path, devices=1, **fields)
  assert steps_of(results) == {1} and all(isinstance(result.reason, InterruptReason) for result in results)
  assert fit_all(tmp_path, devices=1, **fields)[0].reason.startswith('the metric to select by was NaN')


@pytest.mark.long
def test_nan_is_reported_with_its_seed(tmp_path):
  def poisoned_params(seed):
    return jax.tree.map(lambda x: x * np.float32('nan' if seed == SEEDS[1] else 1), LIGHT['params'](seed))

  def interrupted_stream(start, stop):
    for step, batch in enumerate(stream_of_all(start, stop), start):
      if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  options = LIGHT | {'devices': 1, 'params': poisoned_params, 'evaluate': None}
  for fields in ({}, {'stream': interrupted_stream, 'log_every': 100, 'checkpoint_every': 100}):
    with pytest.raises(UserError, match='loss of seed 4 is nan at step 1; there is no checkpoint yet'):
      fit_all(tmp_path, **options | fields)


@pytest.mark.long
def test_the_progress_line_is_the_mean_of_the_records(tmp_path, capsys):
  fit_all(tmp_path, steps=2, **LIGHT | {'devices': 1, 'evaluate': None})
  losses = [value for folder in folders_in(tmp_path) for step, value in values_of(folder) if step == 2]
  assert f'loss {np.mean(losses):.4g}' in capsys.readouterr().out and len(set(losses)) == RUNS


@pytest.mark.long
@pytest.mark.parametrize('devices', [1, 4])
def test_an_update_leaves_stopped_runs_unchanged(devices):
  mesh = make_mesh(jax.devices()[:devices], RUNS)
  update = make_updates(Training(average=0.9), LIGHT['loss'], LIGHT['params'], mesh, SEEDS)
  (batches,) = stream_of_all(0, 1)

  def states_after(live):
    states, metrics = update(update.load([None] * RUNS), batches, live)
    return [jax.device_get(update.select(states, i)) for i in range(RUNS)], jax.device_get(dict(metrics))

  initial = update.load([None] * RUNS)
  before = [jax.device_get(update.select(initial, i)) for i in range(RUNS)]
  updated, all_metrics = states_after([True] * RUNS)
  states, metrics = states_after([i != 1 for i in range(RUNS)])
  for i, expected in enumerate([updated[0], before[1]]):
    jax.tree.map(np.testing.assert_array_equal, states[i], expected)
    assert all(metrics[name][i] == all_metrics[name][i] * (i != 1) for name in all_metrics)
