"""Runs side by side: each equals the run of its seed alone, and interrupted runs are resumed exactly."""

import collections
import contextlib
import functools
import os
import signal

import jax
import numpy as np
import pytest
from attention_jax.training.hooks import BestEvaluation, InterruptHandler, InterruptReason

from attention_jax.data.batching import Batches, StackedBatches
from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import train as train_vocabulary
from attention_jax.errors import UserError
from attention_jax.losses.sequence import sequence_loss
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.clock import TrainingClock
from attention_jax.training.config import Training
from attention_jax.training.interrupts import check_stop
from attention_jax.training.partition import make_mesh
from attention_jax.training.seeds import SeedRuns, fit_seeds
from attention_jax.training.train import fit
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
RUNS = 4
SEEDS = [3 + i for i in range(RUNS)]
LOSS = sequence_loss(
  Toy(required_loss='reinforce'), 0.1, FIELDS['auxiliary'], 'scheduled_sampling(schedule="linear(slope=0.02)")'
)
ALL_STEPS = 'all 12 steps are done'


def init_params(seed):
  """Initial parameters that differ from run to run."""
  return jax.tree.map(lambda x: x * (1 + 0.1 * seed), helpers.init_params())


def stream_of_seed(seed, start, stop):
  for step in range(start, stop):
    yield helpers.make_batch(1000 * seed + step)


def stacked_stream(start, stop):
  """Batches of all seeds, with a leading axis of runs."""
  for batches in zip(*(stream_of_seed(seed, start, stop) for seed in SEEDS), strict=True):
    yield type(batches[0])(*(np.stack(arrays) for arrays in zip(*batches, strict=True)))


def folders_in(folder):
  """The folder of each run."""
  return [folder / f'seed_{seed}' for seed in SEEDS]


def fit_all(
  folder, *, devices=4, params=init_params, stream=stacked_stream, evaluate=validate, after_save=None, **fields
):
  for run_folder in folders_in(folder):
    run_folder.mkdir(parents=True, exist_ok=True)
  return fit_seeds(
    folder,
    folders_in(folder),
    Training(**FIELDS | fields),
    loss=LOSS,
    init_params=params,
    stream=stream,
    evaluate=evaluate,
    mesh=make_mesh(jax.devices()[:devices], RUNS),
    after_save=after_save,
  )


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """The result of uninterrupted runs, and their folder."""
  folder = tmp_path_factory.mktemp('seeds')
  return fit_all(folder), folder


def values_of(folder, name='train/loss'):
  """[(step, value), ...] of one metric."""
  return [(record['step'], record[name]) for record in read_metrics(folder) if name in record]


def latest_step(folder, kind=LATEST):
  reader = Checkpoints(folder, read_only=True)
  step = reader.latest(kind)
  reader.close()
  return step


def stored_steps(folder):
  reader = Checkpoints(folder, read_only=True)
  steps = reader.steps()
  reader.close()
  return steps


@pytest.mark.parametrize('seed', [pytest.param(SEEDS[0], marks=pytest.mark.long), SEEDS[-1]])
def test_each_run_equals_the_run_of_its_seed_alone(uninterrupted, tmp_path, seed):
  results, folder = uninterrupted
  assert results == (12, [ALL_STEPS] * RUNS, 1)
  alone = fit(
    tmp_path,
    Training(**FIELDS | {'seed': seed}),
    loss=LOSS,
    init_params=init_params,
    stream=functools.partial(stream_of_seed, seed),
    evaluate=validate,
    mesh=make_mesh(jax.devices()[:2]),
  )
  run_folder = folder / f'seed_{seed}'
  for name in ('train/loss', 'train/reinforce', 'validation/loss'):
    np.testing.assert_allclose(values_of(run_folder, name), values_of(tmp_path, name), rtol=1e-4, atol=1e-6)
  reader = Checkpoints(run_folder, read_only=True)
  state, host = reader.restore(alone.state)
  reader.close()
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), state, alone.state)
  assert host['best']['step'] == alone.best.step
  first_losses = {values_of(run_folder)[0][1] for run_folder in folders_in(folder)}
  assert len(first_losses) == RUNS  # all runs differ


@pytest.mark.long
def test_interrupted_runs_are_resumed_exactly(uninterrupted, tmp_path):
  expected, expected_folder = uninterrupted
  evaluated_steps = []

  def interrupted_evaluation(state):
    """Fails during the second evaluation, when two runs of four have finished theirs."""
    evaluated_steps.append(int(state.step))
    if len(evaluated_steps) == RUNS + 3:
      raise KeyboardInterrupt
    return validate(state)

  def interrupted_stream(start, stop):
    for step, batch in enumerate(stacked_stream(start, stop), start):
      if step == 8:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  with pytest.raises(KeyboardInterrupt):
    fit_all(tmp_path, evaluate=interrupted_evaluation)
  assert evaluated_steps[-1] == 10 and latest_step(tmp_path) == 6
  interrupted = fit_all(tmp_path, stream=interrupted_stream)
  assert interrupted.step == 9 and set(interrupted.reasons) == {'stopped by SIGTERM'}
  assert all(isinstance(reason, InterruptReason) for reason in interrupted.reasons)
  assert fit_all(tmp_path) == expected
  for run_folder, expected_run_folder in zip(folders_in(tmp_path), folders_in(expected_folder), strict=True):
    assert values_of(run_folder) == values_of(expected_run_folder)
    assert latest_step(run_folder) == latest_step(expected_run_folder) == 12
    assert latest_step(run_folder, BEST) == latest_step(expected_run_folder, BEST)
  assert fit_all(tmp_path) == (12, expected.reasons, 0)  # a finished run is not trained again


def test_evaluations_that_a_signal_stops_are_made_before_the_next_update(uninterrupted, tmp_path):
  expected, expected_folder = uninterrupted
  steps = []

  def interrupted_evaluation(state):
    """Stops the second evaluation and the last one, when two runs of four have finished theirs."""
    step = int(state.step)
    steps.append(step)
    if step > 5 and steps.count(step) == 3:
      signal.raise_signal(signal.SIGTERM)
    check_stop()
    return validate(state)

  for step in (10, 12):
    interrupted = fit_all(tmp_path, evaluate=interrupted_evaluation)
    assert interrupted.step == step == latest_step(tmp_path) and set(interrupted.reasons) == {'stopped by SIGTERM'}
  results = fit_all(tmp_path, evaluate=interrupted_evaluation)
  assert results.reasons == expected.reasons and results.step == expected.step
  assert steps == [5] * RUNS + [10] * (3 + RUNS) + [12] * (3 + RUNS)
  for run_folder, expected_run_folder in zip(folders_in(tmp_path), folders_in(expected_folder), strict=True):
    assert values_of(run_folder) == values_of(expected_run_folder)
    assert values_of(run_folder, 'validation/loss') == values_of(expected_run_folder, 'validation/loss')
    assert latest_step(run_folder) == latest_step(expected_run_folder) == 12
    assert latest_step(run_folder, BEST) == latest_step(expected_run_folder, BEST)


def test_evaluations_after_the_last_step_that_a_signal_stops_are_made_although_steps_is_raised(tmp_path):
  steps = []

  def interrupted_evaluation(state):
    steps.append(int(state.step))
    if len(steps) == 3:  # when two runs of four have finished theirs
      signal.raise_signal(signal.SIGTERM)
    check_stop()
    return validate(state)

  options = {'evaluate': interrupted_evaluation, 'evaluate_every': 0, 'devices': 1}
  assert set(fit_all(tmp_path, steps=2, **options).reasons) == {'stopped by SIGTERM'}
  assert fit_all(tmp_path, steps=3, **options).step == 3
  assert steps == [2] * (3 + RUNS) + [3] * RUNS
  for run_folder in folders_in(tmp_path):
    assert [step for step, _ in values_of(run_folder, 'validation/loss')] == [2, 3]


def test_nothing_is_being_written_when_interrupted_evaluations_have_been_saved(tmp_path, monkeypatch):
  """`after_save` copies the folder while the best states of two runs would still be written."""
  writing = set()
  save, wait = Checkpoints.save, Checkpoints.wait

  def recorded_save(checkpoints, *args):
    save(checkpoints, *args)
    writing.add(checkpoints.folder)

  def recorded_wait(checkpoints):
    wait(checkpoints)
    writing.discard(checkpoints.folder)

  def interrupted_evaluation(state):
    if len(writing) == 2:
      signal.raise_signal(signal.SIGTERM)
    check_stop()
    return validate(state)

  written = []
  monkeypatch.setattr(Checkpoints, 'save', recorded_save)
  monkeypatch.setattr(Checkpoints, 'wait', recorded_wait)
  options = {'evaluate': interrupted_evaluation, 'evaluate_every': 0, 'devices': 1}
  results = fit_all(tmp_path, steps=2, after_save=lambda: written.append(set(writing)), **options)
  assert set(results.reasons) == {'stopped by SIGTERM'} and written == [set()]


@pytest.mark.long
def test_the_number_of_devices_does_not_matter(uninterrupted, tmp_path):
  _, expected_folder = uninterrupted
  assert fit_all(tmp_path, devices=1, steps=4).step == 4
  for run_folder, expected_run_folder in zip(folders_in(tmp_path), folders_in(expected_folder), strict=True):
    np.testing.assert_allclose(values_of(run_folder)[:2], values_of(expected_run_folder)[:2], rtol=1e-5)


@pytest.mark.long
def test_a_run_that_stops_early_stays_as_it_is_while_the_others_continue(tmp_path):
  evaluations = collections.Counter()

  def distance(state, seed):
    """Distance of the parameters from the initial ones of a seed."""
    differences = jax.tree.map(lambda x, y: float(abs(x - y).sum()), state.params, init_params(seed))
    return sum(jax.tree.leaves(differences))

  def evaluate(state):
    """Run 1 gets worse, the others better."""
    run = min(range(RUNS), key=lambda i: distance(state, SEEDS[i]))
    evaluations[run] += 1
    return {'loss': float(state.step) if run == 1 else -float(state.step)}

  intervals = {'evaluate_every': 2, 'log_every': 1, 'checkpoint_every': 4}
  run = functools.partial(fit_all, tmp_path, evaluate=evaluate, steps=8, keep=3, **intervals)
  folders = folders_in(tmp_path)
  results = run(patience=2)
  finished = 'all 8 steps are done'
  assert results.step == 8
  assert results.reasons == [finished, 'no improvement since step 2, evaluations: 2', finished, finished]
  assert [latest_step(folder) for folder in folders] == [8, 6, 8, 8]
  assert [latest_step(folder, BEST) for folder in folders] == [8, 2, 8, 8]
  assert stored_steps(folders[0]) == [4, 8] and stored_steps(folders[1]) == [4, 6]
  assert values_of(folders[1])[-1][0] == 6 and values_of(folders[0])[-1][0] == 8
  assert evaluations == {0: 4, 1: 3, 2: 4, 3: 4}
  continued = run(patience=3, steps=10)  # the stopped run stays as it is
  assert continued.step == 10 and continued.reasons[1] == results.reasons[1] and evaluations[1] == 3
  assert [latest_step(folder) for folder in folders] == [10, 6, 10, 10]


def test_a_signal_at_the_update_after_which_every_run_stops_is_the_reason(tmp_path, monkeypatch):
  """Several processes learn of their signal once, from `reason`: it would be lost."""
  monkeypatch.setattr(InterruptHandler, 'reason', lambda self: 'SIGTERM')
  fields = {'evaluate': lambda state: {'loss': float('nan')}, 'evaluate_every': 1, 'patience': 1}
  results = fit_all(tmp_path, devices=1, **fields)
  assert results.step == 1 and all(isinstance(reason, InterruptReason) for reason in results.reasons)
  assert fit_all(tmp_path, devices=1, **fields).reasons[0].startswith('the metric to select by was NaN')


def test_nan_is_reported_with_its_seed(tmp_path):
  def poisoned_params(seed):
    return jax.tree.map(lambda x: x * np.float32('nan' if seed == 5 else 1), init_params(seed))

  with pytest.raises(UserError, match='loss of seed 5 is nan at step 1; there is no checkpoint yet'):
    fit_all(tmp_path, devices=1, params=poisoned_params, evaluate=None)

  def interrupted_stream(start, stop):
    for step, batch in enumerate(stacked_stream(start, stop), start):
      if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  fields = {'evaluate': None, 'log_every': 100, 'checkpoint_every': 100}
  with pytest.raises(UserError, match='loss of seed 5 is nan at step 1; there is no checkpoint yet'):
    fit_all(tmp_path, devices=1, params=poisoned_params, stream=interrupted_stream, **fields)


def test_records_are_those_of_the_live_runs_and_the_progress_line_is_their_mean(tmp_path, capsys):
  folders = [tmp_path / str(i) for i in range(3)]
  for folder in folders:
    folder.mkdir()
  clock = TrainingClock()
  with contextlib.ExitStack() as stack:
    best = [BestEvaluation()] * 3
    runs = SeedRuns(
      folders, (0, 1, 2), Training(), best, {1: 'stopped'}, 0, False, None, None, lambda: '', clock, True, stack
    )
    runs.write(5, {'train/loss': [1.0, 8.0, 2.0], 'train/steps_per_second': 4.0})
  assert '  loss 1.5  steps/s 4' in capsys.readouterr().out
  losses = [[record['train/loss'] for record in read_metrics(folder)] for folder in folders]
  assert losses == [[1.0], [], [2.0]]


def test_the_batches_of_each_run_are_those_of_its_seed():
  lines = [' '.join('abcdefg'[k % 7] for k in range(i, i + 1 + i % 4)) for i in range(30)]
  vocabulary = train_vocabulary('word', lines)
  encoded = encode(Corpus(lines, lines), vocabulary, vocabulary)
  runs = [Batches(encoded, [(3, 3), (6, 6)], 4, seed=seed) for seed in (5, 6, 7)]
  stacked = StackedBatches(runs)
  for step in range(2 * len(runs[0])):
    batch = stacked[step]
    for i, run in enumerate(runs):
      for name, array in run[step]._asdict().items():
        np.testing.assert_array_equal(getattr(batch, name)[i] if array is not None else batch.links, array)
  assert stacked[0].index.shape == (3, 4) and np.any(stacked[0].index[0] != stacked[0].index[1])
