"""Whole runs: resumed exactly after any end, SIGKILL included; stopped early; failures reported in one line."""

import ast
import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from attention_jax import training as training_package
from attention_jax.errors import UserError
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.compile_pool import CompilePool
from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh
from attention_jax.training.run import BestEvaluation, InterruptReason
from attention_jax.training.seeds import prepare_training
from attention_jax.training.writers import METRICS, read_metrics
from tests import compiled
from tests.training import helpers
from tests.training.helpers import fit_toy, state_bits

RATES = {'train/tokens_per_second', 'train/steps_per_second', 'train/compilations'}
# Options of fit_toy that compile faster.
LIGHT = {'accumulate': 1, 'average': 0.0, 'stream': functools.partial(helpers.stream, lengths=helpers.BUCKETS[:1])}
BUCKET = helpers.BUCKETS[:1]


def records_of(folder):
  """The metrics of a run, without those that differ from run to run."""
  return [{k: v for k, v in record.items() if k not in RATES} for record in read_metrics(folder)]


def lines_of(folder):
  """The lines of all files of metrics."""
  return [line for path in sorted((folder / METRICS).iterdir()) for line in path.read_text('utf-8').splitlines()]


def values_of(folder, name):
  """{step: value} of one metric."""
  return {record['step']: record[name] for record in records_of(folder) if name in record}


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """The result of an uninterrupted run, and its folder."""
  folder = tmp_path_factory.mktemp('uninterrupted') / 'run'
  return fit_toy(folder), folder


def test_a_run_learns_and_writes_all_files(uninterrupted):
  result, folder = uninterrupted
  records = records_of(folder)
  assert result.reason == 'all 60 steps are done' and result.state.step == 60
  assert result.compilations == len(helpers.BUCKETS)
  assert list(values_of(folder, 'train/loss')) == list(range(5, 61, 5))
  assert list(values_of(folder, 'validation/loss')) == [20, 40, 60]
  assert records[-1]['train/cross_entropy'] < records[0]['train/cross_entropy']
  assert {'train/coverage', 'train/reinforce', 'train/log_likelihood'} <= set(records[0])
  assert result.state.running['log_likelihood'] < 0
  assert result.state.params['temperature'] == result.state.average['temperature'] == pytest.approx(0.5, rel=1e-6)
  assert sorted(os.listdir(folder)) == [
    'best',
    'checkpoints',
    'config.json',
    'metrics',
    'saved.json',
    'tensorboard',
  ]
  assert sorted(os.listdir(folder / LATEST)) == ['45', '60'] and os.listdir(folder / BEST) == [str(result.best.step)]
  assert result.best.value == min(values_of(folder, 'validation/loss').values())
  reader = Checkpoints(folder, read_only=True)
  assert state_bits(reader.restore(result.state)[0]) == state_bits(result.state)
  reader.close()


def test_progress_is_printed(capsys, tmp_path, monkeypatch):
  monkeypatch.setattr(
    'attention_jax.training.writers.FIRST_REPORT', 600.0
  )  # a busy machine compiles for longer than 15 s
  fit_toy(tmp_path, steps=5, evaluate_every=0, **LIGHT)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'starting at step 0 of 5'
  for words in ('step 5/5', 'left 0:00:00', 'loss ', 'tokens/s', 'steps/s', 'learning rate', 'compiled shapes 1'):
    assert words in lines[1]
  assert lines[2].startswith('step 5/5  validation/loss')


def test_rates_exclude_compiling(tmp_path, monkeypatch):
  clock = types.SimpleNamespace(now=0.0)
  clock.monotonic = lambda: clock.now
  monkeypatch.setattr('attention_jax.training.clock.time', clock)
  wait = CompilePool.wait

  def slow_wait(pool, batch):
    clock.now += 1000.0
    wait(pool, batch)

  def stream(start, stop):
    for batch in LIGHT['stream'](start, stop):
      clock.now += 1.0
      yield batch

  monkeypatch.setattr(CompilePool, 'wait', slow_wait)
  fit_toy(tmp_path, steps=4, log_every=2, evaluate_every=0, **LIGHT | {'stream': stream})
  records = read_metrics(tmp_path)
  assert [record['train/steps_per_second'] for record in records if 'train/loss' in record] == [1.0, 1.0]


@pytest.mark.long
def test_resuming_equals_an_uninterrupted_run(uninterrupted, tmp_path, capsys):
  expected, expected_folder = uninterrupted
  for steps in (7, 56, 60):
    result = fit_toy(tmp_path, steps=steps)
  assert 'resuming at step 56 of 60' in capsys.readouterr().out
  assert state_bits(result.state) == state_bits(expected.state)
  losses = values_of(tmp_path, 'train/loss')
  assert losses == losses | values_of(expected_folder, 'train/loss')  # and those of steps 7 and 56
  finished = fit_toy(tmp_path)
  assert state_bits(finished.state) == state_bits(expected.state) and finished.compilations == 0


@pytest.mark.parametrize('number', [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_stops_cleanly_and_changes_nothing(uninterrupted, tmp_path, number):
  def interrupted_stream(start, stop):
    for step, batch in enumerate(helpers.stream(start, stop), start):
      if step == 22:
        os.kill(os.getpid(), number)
      yield batch

  expected, expected_folder = uninterrupted
  previous_handler = signal.getsignal(number)
  result = fit_toy(tmp_path, stream=interrupted_stream)
  assert result.reason == f'stopped by {number.name}' and result.state.step == 23
  assert isinstance(result.reason, InterruptReason)
  assert signal.getsignal(number) == previous_handler
  assert sorted(os.listdir(tmp_path / LATEST)) == ['15', '23']
  result = fit_toy(tmp_path)
  assert state_bits(result.state) == state_bits(expected.state) and result.best == expected.best
  assert records_of(tmp_path) == records_of(expected_folder)


def test_an_evaluation_that_a_signal_stops_is_made_before_the_next_update(uninterrupted, tmp_path):
  """In the middle of training and at its end, and a second time when the run is resumed."""
  expected, expected_folder = uninterrupted
  steps = []

  def interrupted_evaluation(state, watch):
    steps.append(int(state.step))
    if len(steps) in (2, 3, 5):
      signal.raise_signal(signal.SIGTERM)
    watch(0, 0)
    return helpers.validate(state, watch)

  for step in (40, 40, 60):
    result = fit_toy(tmp_path, evaluate=interrupted_evaluation)
    assert result.reason == 'stopped by SIGTERM' and isinstance(result.reason, InterruptReason)
    assert result.state.step == step == int(sorted(os.listdir(tmp_path / LATEST))[-1])
  for _ in range(2):  # the checkpoint of the last step still awaits its evaluation
    result = fit_toy(tmp_path, evaluate=interrupted_evaluation)
    assert result.reason == 'all 60 steps are done'
    assert state_bits(result.state) == state_bits(expected.state) and result.best == expected.best
    assert records_of(tmp_path) == records_of(expected_folder)
  assert steps == [20, 40, 40, 40, 60, 60, 60]
  assert len(lines_of(tmp_path)) == len(lines_of(expected_folder))


def test_an_evaluation_after_the_last_step_that_a_signal_stops_is_made_although_steps_is_raised(tmp_path):
  steps = []

  def interrupted_evaluation(state, watch):
    steps.append(int(state.step))
    if len(steps) == 1:
      signal.raise_signal(signal.SIGTERM)
    watch(0, 0)
    return helpers.validate(state, watch)

  options = LIGHT | {'evaluate': interrupted_evaluation, 'evaluate_every': 0}
  assert isinstance(fit_toy(tmp_path, steps=4, **options).reason, InterruptReason)
  assert fit_toy(tmp_path, steps=6, **options).state.step == 6
  assert steps == [4, 4, 6] and list(values_of(tmp_path, 'validation/loss')) == [4, 6]


def start_toy(folder, pause):
  """Starts helpers.py as a program."""
  settings = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(Path(__file__).parents[2])} | compiled.cache_environment()
  command = [sys.executable, '-W', 'error', helpers.__file__, str(folder), '60', str(pause)]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
  return subprocess.Popen(command, env=os.environ | settings, text=True, **pipes)


def kill_while_training(folder):
  """Starts a run and kills it after its first records; returns its exit status and the stored steps."""
  process = start_toy(folder, pause=0.02)
  for line in process.stdout:
    if line.startswith('step') or process.poll() is not None:
      break
  time.sleep(random.uniform(0, 0.5))
  process.send_signal(signal.SIGKILL)
  process.stdout.close()
  return process.wait(), sorted(os.listdir(folder / LATEST))


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(uninterrupted, tmp_path):
  expected, expected_folder = uninterrupted
  folder = tmp_path / 'run'
  kills = [kill_while_training(folder) for _ in range(2)]
  process = start_toy(folder, pause=0)
  output, _ = process.communicate()
  assert process.returncode == 0, output
  assert any(status == -signal.SIGKILL for status, _ in kills)
  result = json.loads((tmp_path / 'run.json').read_text())
  assert result['state'] == state_bits(expected.state), kills
  assert result['best'] == list(expected.best)
  assert records_of(folder) == records_of(expected_folder)  # no line is lost
  for kind in (LATEST, BEST):
    assert sorted(os.listdir(folder / kind)) == sorted(os.listdir(expected_folder / kind))
  for name in ('train/loss', 'validation/loss'):
    records = map(json.loads, lines_of(folder))
    steps = [record['step'] for record in records if name in record]
    assert steps == sorted(set(steps))  # no step occurs twice


def test_nan_is_reported_with_its_step_and_never_saved(tmp_path, monkeypatch, capsys):
  make_loss = helpers.sequence_loss

  def make_poisoned_loss(*args):
    """Returns the loss, which is NaN for batches with negative indices."""
    loss = make_loss(*args)

    def poisoned(params, batch, rngs, running, update):
      sums = loss(params, batch, rngs, running, update)
      return {**sums, 'loss': jax.numpy.where(batch.index[0] < 0, jax.numpy.nan, sums['loss'])}

    return dataclasses.replace(loss, fn=poisoned)

  def poisoned_stream(start, stop):
    for step, batch in enumerate(LIGHT['stream'](start, stop), start):
      yield batch._replace(index=batch.index - 100 * (step >= 17))

  monkeypatch.setattr(helpers, 'sequence_loss', make_poisoned_loss)
  with pytest.raises(UserError, match=r'loss is nan at step 18; the last good .*/checkpoints/15;') as error:
    fit_toy(tmp_path, **LIGHT | {'stream': poisoned_stream})
  assert '\n' not in str(error.value)
  assert os.listdir(tmp_path / LATEST) == ['15'] and not os.listdir(tmp_path / BEST)
  assert [record['step'] for record in records_of(tmp_path)] == [5, 10, 15]
  assert 'replay --step=18 examines the update' in str(error.value)
  capsys.readouterr()
  result = fit_toy(tmp_path, **LIGHT | {'stream': poisoned_stream, 'on_nonfinite': 'skip', 'steps': 20})
  assert result.state.step == 20 and sorted(os.listdir(tmp_path / LATEST)) == ['15', '20']
  lines = [line.partition(';')[0] for line in capsys.readouterr().out.splitlines() if 'skipped' in line]
  assert lines == [f'loss is nan at step {n}: update skipped' for n in (18, 19, 20)]

  def interrupted_stream(start, stop):
    for step, batch in enumerate(poisoned_stream(start, stop), start):
      if step == 21:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  result = fit_toy(tmp_path, **LIGHT | {'stream': interrupted_stream, 'on_nonfinite': 'skip', 'steps': 30})
  assert sorted(os.listdir(tmp_path / LATEST)) == ['15', '22']  # that before the first update that was skipped is kept
  assert result.state.step == 22 and 'loss is nan at step 22: update skipped' in capsys.readouterr().out


def test_a_run_that_stopped_early_stays_as_it_is(tmp_path):
  errors = {2: 3.0, 4: 1.0, 6: 2.0, 8: float('nan'), 10: 1.0, 12: 0.5}
  run = functools.partial(
    fit_toy,
    tmp_path,
    steps=40,
    evaluate_every=2,
    checkpoint_every=3,
    log_every=50,
    evaluate=lambda state, watch: {'error': errors[int(state.step)], 'signature': 'words'},
    select='error',
    **LIGHT,
  )
  result = run(patience=3)
  assert result.reason == 'no improvement since step 4, evaluations: 3'
  assert result.state.step == 10 and result.best == BestEvaluation(1.0, 4, 3)
  assert os.listdir(tmp_path / BEST) == ['4']
  repeated = run(patience=3)  # does nothing
  assert repeated.reason == result.reason and repeated.state.step == 10 and repeated.compilations == 0
  with pytest.raises(UserError, match=r'training\.patience'):  # it decides when training stops
    run(patience=4)


def test_updates_use_every_option_of_training():
  """Rate, clipping, parts, average and annealing of two updates, computed by hand."""

  def sums(params, batch, rngs, running, update):
    rows = jax.numpy.float32(len(batch))
    return {'loss': params['temperature'] * (batch @ params['w']).sum(), 'tokens': rows, 'squared_rows': rows**2}

  options = {'optimizer': 'sgd', 'schedule': 'linear(peak=1.0)', 'anneal': 'temperature: linear(peak=2.0)'}
  training = Training(steps=4, clip=2.0, accumulate=4, average=0.1, **options)
  params = {'temperature': jax.numpy.ones(()), 'w': jax.numpy.ones(2)}
  step, initial_state = prepare_training(training, Loss(sums), lambda seed: params, make_mesh(jax.devices()[:2]), 0)
  state = initial_state(0)
  w = average = np.ones(2)
  for rate, temperature in ((0.75, 1.5), (0.5, 1.0)):
    assert state.params['temperature'] == state.average['temperature'] == temperature
    state, metrics = step(state, np.tile(np.float32([3, 4]), (16, 1)))
    w = w - rate * 2.0 * np.array([0.6, 0.8])
    average = 0.1 * average + 0.9 * w
    np.testing.assert_allclose(state.params['w'], w, rtol=1e-5)
    np.testing.assert_allclose(state.average['w'], average, rtol=1e-5)
    assert metrics['learning_rate'] == rate and metrics['grad_norm'] == pytest.approx(5 * temperature)
    assert metrics['squared_rows'] == 4 * 4**2 / 16  # four parts of four rows


def test_a_stream_that_ends_early_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r'^stream\(0, 5\) has yielded fewer than 5 batches; expected one per update$'):
    fit_toy(tmp_path, steps=5, **LIGHT | {'stream': lambda start, stop: helpers.stream(start, 3, lengths=BUCKET)})


def test_an_unknown_metric_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r"unknown metric to select by 'blue' .*'bleu'.*expected one of: bleu, loss"):
    fit_toy(tmp_path, steps=1, select='blue', **LIGHT, evaluate=lambda state, watch: {'bleu': 1.0, 'loss': 2.0})


def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_over(tmp_path):
  fit_toy(tmp_path, steps=5, evaluate_every=0, **LIGHT)
  for file in (tmp_path / LATEST / '5').rglob('d/*'):
    file.write_bytes(b'')
  lines = lines_of(tmp_path)
  with pytest.raises(UserError, match=r'checkpoints/5 cannot be read'):
    fit_toy(tmp_path, steps=10, evaluate_every=0, **LIGHT)
  assert lines_of(tmp_path) == lines


def test_a_run_resumes_exactly_from_the_checkpoint_before_a_damaged_one(tmp_path, capsys):
  result = fit_toy(tmp_path, steps=10, checkpoint_every=5, evaluate_every=0, log_every=1, **LIGHT)
  records = read_metrics(tmp_path)
  for file in (tmp_path / LATEST / '10').rglob('d/*'):
    file.write_bytes(b'')
  resumed = fit_toy(tmp_path, steps=10, checkpoint_every=5, evaluate_every=0, log_every=1, **LIGHT)
  assert 'checkpoints/10 cannot be read' in capsys.readouterr().out
  assert state_bits(resumed.state) == state_bits(result.state)
  assert [record['step'] for record in read_metrics(tmp_path)] == [record['step'] for record in records]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'steps': 0}, 'config.training.steps must be at least 1, got 0'),
    ({'average': 1}, 'config.training.average must be at least 0 and less than 1, got 1'),
  ],
)
def test_training_fields_are_checked(fields, message):
  with pytest.raises(UserError, match=message):
    Training(**fields)


@pytest.mark.parametrize(
  'path', sorted(Path(training_package.__file__).parent.glob('*.py')), ids=lambda path: path.stem
)
def test_training_imports_no_layer_above_kernels(path):
  allowed = {'errors', 'atomic', 'specs', 'functional', 'kernels', 'training'}
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.ImportFrom) and node.module.split('.')[0] == 'attention_jax':
      assert node.module.split('.')[1] in allowed
    if isinstance(node, ast.Import):
      assert not any(alias.name.startswith('attention_jax') for alias in node.names)
