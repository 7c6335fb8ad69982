"""Whole runs: resumed exactly after any end, SIGKILL included; stopped in time; told in one line when they fail."""

import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from attention_jax.errors import UserError
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.hooks import BestEvaluation, is_due
from attention_jax.training.loop import Training
from attention_jax.training.writers import read_metrics
from tests import compiled
from tests.training import helpers
from tests.training.helpers import fit_toy, state_bits

TIMES = {'train/tokens_per_second', 'train/steps_per_second', 'train/compilations'}


LIGHT = {'accumulate': 1, 'average': 0.0, 'stream': functools.partial(helpers.stream, lengths=helpers.BUCKETS[:1])}


def records(folder):
  return [{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(folder)]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """An uninterrupted run and its folder."""
  folder = tmp_path_factory.mktemp('whole') / 'run'
  return fit_toy(folder), folder


def test_a_run_learns_and_leaves_everything(whole):
  result, folder = whole
  found = records(folder)
  assert result.reason == 'all 60 steps are done' and result.state.step == 60
  assert result.compilations == len(helpers.BUCKETS)
  assert [r['step'] for r in found if 'train/loss' in r] == list(range(5, 61, 5))
  assert [r['step'] for r in found if 'validation/loss' in r] == [20, 40, 60]
  assert found[-1]['train/cross_entropy'] < found[0]['train/cross_entropy']
  assert {'train/coverage', 'train/reinforce', 'train/log_likelihood'} <= set(found[0])
  assert result.state.running['log_likelihood'] < 0
  assert result.state.params['temperature'] == result.state.average['temperature'] == pytest.approx(0.5, rel=1e-6)
  assert sorted(os.listdir(folder)) == ['best', 'checkpoints', 'config.json', 'metrics.jsonl', 'tensorboard']
  assert sorted(os.listdir(folder / LATEST)) == ['45', '60'] and os.listdir(folder / BEST) == [str(result.best.step)]
  assert result.best.value == min(r['validation/loss'] for r in found if 'validation/loss' in r)
  reader = Checkpoints(folder, read_only=True)
  assert state_bits(reader.restore(result.state)[0]) == state_bits(result.state)
  reader.close()


def test_the_progress_line(capsys, tmp_path):
  fit_toy(tmp_path, steps=5, evaluate_every=0, **LIGHT)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'starting at step 0 of 5'
  for word in ('step 5/5', 'left 0:00:00', 'loss ', 'tokens/s', 'steps/s', 'learning rate', 'compiled shapes 1'):
    assert word in lines[1]
  assert lines[2].startswith('step 5/5  validation/loss')


def test_resuming_equals_an_uninterrupted_run(whole, tmp_path, capsys):
  for steps in (7, 33, 60):
    result = fit_toy(tmp_path, steps=steps)
  assert 'going on at step 33 of 60' in capsys.readouterr().out
  assert state_bits(result.state) == state_bits(whole[0].state)
  losses = lambda folder: {r['step']: r['train/loss'] for r in records(folder) if 'train/loss' in r}
  assert losses(tmp_path) == losses(tmp_path) | losses(whole[1])
  again = fit_toy(tmp_path)
  assert state_bits(again.state) == state_bits(whole[0].state) and again.compilations == 0  # nothing is left to do


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly_and_changes_nothing(whole, tmp_path, number):
  def interrupted(start, stop):
    for step, batch in enumerate(helpers.stream(start, stop), start):
      if step == 22:
        os.kill(os.getpid(), number)
      yield batch

  before = signal.getsignal(number)
  result = fit_toy(tmp_path, stream=interrupted)
  assert result.reason == f'stopped by {number.name}' and result.state.step == 23
  assert signal.getsignal(number) == before
  assert sorted(os.listdir(tmp_path / LATEST)) == ['15', '23']
  result = fit_toy(tmp_path)
  assert state_bits(result.state) == state_bits(whole[0].state) and result.best == whole[0].best
  assert records(tmp_path) == records(whole[1])


def start_toy(folder, pause):
  settings = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(Path(__file__).parents[2])} | compiled.cache_environment()
  command = [sys.executable, '-W', 'error', helpers.__file__, str(folder), '60', str(pause)]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
  return subprocess.Popen(command, env=os.environ | settings, text=True, **pipes)


def test_killed_at_random_moments_ends_with_the_same_bits(whole, tmp_path):
  folder, kills = tmp_path / 'run', []
  for _ in range(2):
    process = start_toy(folder, pause=0.02)
    for line in process.stdout:
      if line.startswith('step') or process.poll() is not None:
        break  # it trains
    time.sleep(random.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    kills.append((process.wait(), sorted(os.listdir(folder / LATEST))))
  process = start_toy(folder, pause=0)
  output, _ = process.communicate()
  assert process.returncode == 0, output
  assert any(code == -signal.SIGKILL for code, _ in kills)
  found = json.loads((tmp_path / 'run.json').read_text())
  assert found['state'] == state_bits(whole[0].state), kills
  assert found['best'] == list(whole[0].best)
  assert records(folder) == records(whole[1])  # no line is lost
  steps = {}
  for line in (folder / 'metrics.jsonl').read_text().splitlines():
    record = json.loads(line)
    for name in ('train/loss', 'validation/loss'):
      if name in record:
        steps.setdefault((name, record['step']), set()).add(record[name])
  assert all(len(values) == 1 for values in steps.values())  # what is repeated is the same
  for kind in (LATEST, BEST):
    assert sorted(os.listdir(folder / kind)) == sorted(os.listdir(whole[1] / kind))


def test_nan_is_told_with_its_step_and_never_saved(tmp_path, monkeypatch):
  healthy = helpers.sequence_loss

  def broken(*args):
    loss = healthy(*args)
    poison = lambda sums, batch: jax.numpy.where(batch.index[0] < 0, jax.numpy.nan, sums['loss'])
    fn = lambda params, batch, *more: (lambda s: {**s, 'loss': poison(s, batch)})(loss(params, batch, *more))
    return dataclasses.replace(loss, fn=fn)

  def stream(start, stop):
    for step, batch in enumerate(LIGHT['stream'](start, stop), start):
      yield batch._replace(index=batch.index - 100 * (step >= 17))

  monkeypatch.setattr(helpers, 'sequence_loss', broken)
  with pytest.raises(UserError, match=r'loss is nan at step 18; the last good .*/checkpoints/15;') as error:
    fit_toy(tmp_path, **LIGHT | {'stream': stream})
  assert '\n' not in str(error.value)
  assert os.listdir(tmp_path / LATEST) == ['15'] and not os.listdir(tmp_path / BEST)
  assert [r['step'] for r in records(tmp_path)] == [5, 10, 15]


def test_early_stopping_and_its_memory(tmp_path):
  values = {2: 3.0, 4: 1.0, 6: 2.0, 8: float('nan'), 10: 1.0, 12: 0.5}
  run = functools.partial(
    fit_toy,
    tmp_path,
    steps=40,
    evaluate_every=2,
    checkpoint_every=3,
    log_every=50,
    evaluate=lambda state: {'error': values[int(state.step)], 'signature': 'words'},
    select='error',
    **LIGHT,
  )
  result = run(patience=3)
  assert result.reason == 'no improvement in 3 evaluations since step 4'
  assert result.state.step == 10 and result.best == BestEvaluation(1.0, 4, 3)
  assert os.listdir(tmp_path / BEST) == ['4']
  again = run(patience=3)  # the same command: it is over
  assert again.reason == result.reason and again.state.step == 10 and again.compilations == 0
  values |= dict.fromkeys(range(14, 41, 2), 9.0)
  more = run(patience=4)  # more patience goes on where it stopped
  assert more.best == BestEvaluation(0.5, 12, 4) and more.state.step == 20


def test_best_is_a_matter_of_direction():
  run = lambda direction: functools.reduce(
    lambda b, x: b.with_evaluation(*x, direction), [(1, 2.0), (2, 3.0), (3, 1.0)], BestEvaluation()
  )
  assert run('max') == BestEvaluation(3.0, 2, 1) and run('min') == BestEvaluation(1.0, 3, 0)
  assert BestEvaluation().with_evaluation(1, float('nan'), 'min') == BestEvaluation(None, None, 1)
  assert BestEvaluation(stale=5).stop_reason(0) is None


def test_a_metric_that_is_not_there_is_told(tmp_path):
  with pytest.raises(UserError, match=r"unknown metric to select by 'blue' .*'bleu'.*possible: bleu, loss"):
    fit_toy(tmp_path, steps=1, select='blue', **LIGHT, evaluate=lambda state: {'bleu': 1.0, 'loss': 2.0})


def test_a_damaged_checkpoint_is_not_started_over(tmp_path):
  fit_toy(tmp_path, steps=5, evaluate_every=0, **LIGHT)
  for file in (tmp_path / LATEST / '5').rglob('d/*'):
    file.write_bytes(b'')
  lines = (tmp_path / 'metrics.jsonl').read_bytes()
  with pytest.raises(UserError, match=r'cannot read checkpoint .*checkpoints/5'):
    fit_toy(tmp_path, steps=10, evaluate_every=0, **LIGHT)
  assert (tmp_path / 'metrics.jsonl').read_bytes() == lines


def test_due():
  assert [step for step in range(1, 8) if is_due(step, 3, step == 7)] == [3, 6, 7]
  assert not is_due(5, 0) and is_due(5, 0, last=True)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [({'steps': 0}, 'steps is 0; possible: 1 or more'), ({'average': 1}, 'average is 1; possible: from 0 to below 1')],
)
def test_training_fields_are_checked(fields, message):
  with pytest.raises(UserError, match=message):
    Training(**fields)
