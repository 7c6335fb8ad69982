"""Whole runs: resumed exactly after any end, SIGKILL included; stopped early; failures reported in one line."""

import functools
import json
import os
import random
import re
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
from attention_jax.training.clock import read_goodput
from attention_jax.training.compile_pool import CompilePool
from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh
from attention_jax.training.run import InterruptReason
from attention_jax.training.seeds import prepare_training
from attention_jax.training.writers import METRICS, read_metrics
from tests import compiled
from tests.training import helpers
from tests.training.helpers import fit_light, fit_toy, state_bits

RATES = {'train/tokens_per_second', 'train/steps_per_second', 'train/compilations'}


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
  assert result.reason == 'all 20 steps are done' and result.state.step == 20
  assert result.compilations == len(helpers.BUCKETS)
  assert list(values_of(folder, 'train/loss')) == list(range(2, 21, 2))
  assert list(values_of(folder, 'validation/loss')) == [7, 14, 20]
  assert records[-1]['train/cross_entropy'] < records[0]['train/cross_entropy']
  assert {'train/coverage', 'train/reinforce', 'train/log_likelihood'} <= set(records[0])
  assert result.state.running['log_likelihood'] < 0
  assert result.state.params['temperature'] == result.state.average['temperature'] == pytest.approx(0.5, rel=1e-6)
  files = ['best', 'checkpoints', 'config.json', 'goodput.json', 'metrics', 'tensorboard']
  assert sorted(os.listdir(folder)) == files
  assert sorted(os.listdir(folder / LATEST)) == ['15', '20'] and os.listdir(folder / BEST) == [str(result.best.step)]
  assert result.best.value == min(values_of(folder, 'validation/loss').values())
  reader = Checkpoints(folder, read_only=True)
  assert state_bits(reader.restore(result.state)[0]) == state_bits(result.state)
  reader.close()


@pytest.mark.long
def test_rates_and_the_time_to_the_end_exclude_compiling(tmp_path, monkeypatch, capsys):
  clock = types.SimpleNamespace(now=0.0)
  clock.monotonic = lambda: clock.now
  monkeypatch.setattr('attention_jax.training.clock.time', clock)
  wait = CompilePool.wait

  def slow_wait(pool, batch):
    clock.now += 1000.0
    wait(pool, batch)

  def stream(start, stop):
    for batch in helpers.light_stream(start, stop):
      clock.now += 1.0
      yield batch

  monkeypatch.setattr(CompilePool, 'wait', slow_wait)
  fit_light(tmp_path, steps=64, log_every=2, stream=stream)
  end = '1 s an update (measured on two), 0:01:01 to step 64 without evaluations'
  assert end in capsys.readouterr().out
  records = read_metrics(tmp_path)
  assert [record['train/steps_per_second'] for record in records if 'train/loss' in record] == [1.0] * 32


@pytest.mark.long
def test_resuming_equals_an_uninterrupted_run(uninterrupted, tmp_path, capsys):
  expected, expected_folder = uninterrupted
  for steps in (3, 18, 20):
    result = fit_toy(tmp_path, steps=steps)
  assert 'resuming at step 18 of 20' in capsys.readouterr().out
  assert state_bits(result.state) == state_bits(expected.state)
  losses = values_of(tmp_path, 'train/loss')
  assert losses == losses | values_of(expected_folder, 'train/loss')  # and that of step 3
  finished = fit_toy(tmp_path)
  assert state_bits(finished.state) == state_bits(expected.state) and finished.compilations == 0


@pytest.mark.parametrize('number', [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_stops_cleanly_and_changes_nothing(uninterrupted, tmp_path, number):
  def interrupted_stream(start, stop):
    for step, batch in enumerate(helpers.stream(start, stop), start):
      if step == 8:
        os.kill(os.getpid(), number)
      yield batch

  expected, expected_folder = uninterrupted
  previous_handler = signal.getsignal(number)
  result = fit_toy(tmp_path, stream=interrupted_stream)
  assert result.reason == f'stopped by {number.name}' and result.state.step == 9
  assert isinstance(result.reason, InterruptReason)
  assert signal.getsignal(number) == previous_handler
  assert sorted(os.listdir(tmp_path / LATEST)) == ['5', '9']
  result = fit_toy(tmp_path)
  assert state_bits(result.state) == state_bits(expected.state) and result.best == expected.best
  assert records_of(tmp_path) == records_of(expected_folder)


@pytest.mark.long
def test_an_evaluation_that_a_signal_stops_is_made_before_the_next_update(tmp_path):
  """In the middle of training and at its end, and a second time when the run is resumed."""
  steps = []

  def interrupted_evaluation(state, watch):
    steps.append(int(state.step))
    if len(steps) in (2, 3, 5):
      signal.raise_signal(signal.SIGTERM)
    watch(0, 0)
    return helpers.evaluate_light(state)

  fields = {'steps': 6, 'evaluate_every': 2, 'checkpoint_every': 5}
  expected = fit_light(tmp_path / 'whole', **fields)
  folder = tmp_path / 'run'
  for step in (4, 4, 6):
    result = fit_light(folder, evaluate=interrupted_evaluation, **fields)
    assert result.reason == 'stopped by SIGTERM' and isinstance(result.reason, InterruptReason)
    assert result.state.step == step == int(sorted(os.listdir(folder / LATEST))[-1])
  for _ in range(2):  # the checkpoint of the last step still awaits its evaluation
    result = fit_light(folder, evaluate=interrupted_evaluation, **fields)
    assert result.reason == 'all 6 steps are done'
    assert state_bits(result.state) == state_bits(expected.state) and result.best == expected.best
    assert records_of(folder) == records_of(tmp_path / 'whole')
  assert steps == [2, 4, 4, 4, 6, 6, 6]
  assert len(lines_of(folder)) == len(lines_of(tmp_path / 'whole'))


def start_toy(folder, pause):
  """Starts helpers.py as a program."""
  settings = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(Path(__file__).parents[2])} | compiled.cache_environment()
  command = [sys.executable, '-W', 'error', helpers.__file__, str(folder), '20', str(pause)]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
  return subprocess.Popen(command, env=os.environ | settings, text=True, **pipes)


def kill_while_training(folder):
  """Starts a run and kills it after its first records; returns its exit status and the stored steps."""
  process = start_toy(folder, pause=0.06)
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


@pytest.mark.long
def test_nan_is_reported_with_its_step_and_never_saved(tmp_path, capsys):
  def poisoned_sums(params, batch, rngs, running, update):
    """The loss is NaN for batches with negative indices."""
    sums = helpers.light_sums(params, batch, rngs, running, update)
    return sums | {'loss': jax.numpy.where(batch.index[0] < 0, jax.numpy.nan, sums['loss'])}

  def poisoned_stream(start, stop, interrupted=None):
    for step, batch in enumerate(helpers.light_stream(start, stop), start):
      if step == interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch._replace(index=batch.index - 100 * (step >= 7))

  fields = {'loss': Loss(poisoned_sums), 'steps': 10, 'log_every': 2, 'checkpoint_every': 6}
  run = functools.partial(fit_light, tmp_path, **fields)
  with pytest.raises(UserError, match=r'loss is nan at step 8; the last good .*/checkpoints/6;') as error:
    run(stream=poisoned_stream)
  assert '\n' not in str(error.value)
  assert os.listdir(tmp_path / LATEST) == ['6'] and not os.listdir(tmp_path / BEST)
  assert [record['step'] for record in records_of(tmp_path)] == [2, 4, 6]
  assert 'replay --step=8 examines the update' in str(error.value)
  capsys.readouterr()
  result = run(stream=poisoned_stream, on_nonfinite='skip')
  assert result.state.step == 10 and sorted(os.listdir(tmp_path / LATEST)) == ['10', '6']
  lines = [line.partition(';')[0] for line in capsys.readouterr().out.splitlines() if 'skipped' in line]
  assert lines == [f'loss is nan at step {n}: update skipped' for n in (8, 9, 10)]
  interrupted_stream = functools.partial(poisoned_stream, interrupted=11)
  result = run(stream=interrupted_stream, on_nonfinite='skip', steps=20)
  assert sorted(os.listdir(tmp_path / LATEST)) == ['12', '6']  # that before the first update that was skipped is kept
  assert result.state.step == 12 and 'loss is nan at step 12: update skipped' in capsys.readouterr().out


@pytest.mark.long
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


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'steps': 5, 'stream': lambda start, stop: helpers.light_stream(start, 3)},
      r'^stream\(0, 5\) has yielded fewer than 5 batches; expected one per update$',
    ),
    (
      {'steps': 1, 'select': 'blue', 'evaluate': lambda state, watch: {'bleu': 1.0, 'loss': 2.0}},
      r"unknown metric to select by 'blue' .*'bleu'.*expected one of: bleu, loss",
    ),
    ({'steps': 0}, 'config.training.steps must be at least 1, got 0'),
    ({'average': 1}, 'config.training.average must be at least 0 and less than 1, got 1'),
  ],
)
def test_wrong_arguments_are_errors(tmp_path, fields, message):
  with pytest.raises(UserError, match=message):
    fit_light(tmp_path, **fields)


def damage(checkpoint):
  for file in checkpoint.rglob('d/*'):
    file.write_bytes(b'')


@pytest.mark.long
def test_a_run_resumes_exactly_from_the_checkpoint_before_a_damaged_one_and_never_starts_over(tmp_path, capsys):
  run = functools.partial(fit_light, tmp_path, steps=4, checkpoint_every=2)
  result = run()
  records = records_of(tmp_path)
  damage(tmp_path / LATEST / '4')
  resumed = run()
  assert 'checkpoints/4 cannot be read' in capsys.readouterr().out
  assert state_bits(resumed.state) == state_bits(result.state)
  assert records_of(tmp_path) == records
  goodput = read_goodput(tmp_path)
  assert goodput.starts == goodput.repeated_updates == 2 and all(x >= 0 for x in goodput.seconds.values())
  lines = lines_of(tmp_path)
  for step in ('2', '4'):
    damage(tmp_path / LATEST / step)
  with pytest.raises(UserError, match=r'checkpoints/2 cannot be read'):
    run(steps=10)
  assert lines_of(tmp_path) == lines


@pytest.mark.long
def test_training_imports_no_layer_above_kernels():
  for path in Path(training_package.__file__).parent.glob('*.py'):
    imported = re.findall(r'^ *(?:from|import) +attention_jax\.?(\w*)', path.read_text('utf-8'), re.M)
    assert {*imported} <= {'errors', 'atomic', 'specs', 'functional', 'kernels', 'training'}, path
