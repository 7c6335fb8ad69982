"""Runs side by side: each is the run that its seed gives alone, and one that is interrupted goes on exactly."""

import collections
import functools
import os
import signal

import jax
import numpy as np
import pytest

from attention_jax.data.batching import Batches, StackedBatches
from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import train as train_vocabulary
from attention_jax.errors import UserError
from attention_jax.losses.sequence import sequence_loss
from attention_jax.training.checkpoint import BEST, LATEST, Checkpoints
from attention_jax.training.loop import Training, fit, prepare_training
from attention_jax.training.partition import make_mesh
from attention_jax.training.seeds import fit_seeds
from attention_jax.training.writers import read_metrics
from tests.training import helpers
from tests.training.helpers import Toy, validate

FIELDS = {
  'steps': 20,
  'seed': 3,
  'average': 0.9,
  'accumulate': 2,
  'log_every': 2,
  'evaluate_every': 5,
  'checkpoint_every': 6,
  'auxiliary': 'coverage(weight=0.1)',
  'anneal': 'temperature: linear(peak=2.0, end=0.5, steps=20)',
}
RUNS = 4
loss = sequence_loss(
  Toy(required_loss='reinforce'), 0.1, FIELDS['auxiliary'], 'scheduled_sampling(schedule="linear(slope=0.02)")'
)


def params_of(seed):
  """Initial parameters that differ from run to run."""
  return jax.tree.map(lambda x: x * (1 + 0.1 * seed), helpers.init_params())


def stream_of(seed, start, stop):
  for step in range(start, stop):
    yield helpers.make_batch(1000 * seed + step)


def together(start, stop):
  for batches in zip(*(stream_of(3 + i, start, stop) for i in range(RUNS)), strict=True):
    yield type(batches[0])(*(np.stack(arrays) for arrays in zip(*batches, strict=True)))


def fit_all(folder, *, devices=4, stream=together, evaluate=validate, **fields):
  folders = [folder / f'seed_{3 + i}' for i in range(RUNS)]
  for own in folders:
    own.mkdir(parents=True, exist_ok=True)
  return fit_seeds(
    folder,
    folders,
    Training(**FIELDS | fields),
    loss=loss,
    params=params_of,
    stream=stream,
    evaluate=evaluate,
    mesh=make_mesh(jax.devices()[:devices], RUNS),
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('seeds')
  return fit_all(folder), folder


def losses(folder, name='train/loss'):
  return [(record['step'], record[name]) for record in read_metrics(folder) if name in record]


def stored(folder, kind=LATEST):
  reader = Checkpoints(folder, read_only=True)
  step = reader.latest(kind)
  reader.close()
  return step


def steps_of(folder):
  reader = Checkpoints(folder, read_only=True)
  steps = reader.steps()
  reader.close()
  return steps


def test_each_is_the_run_of_its_seed_alone(whole, tmp_path):
  results, folder = whole
  assert results == (20, ['all 20 steps are done'] * RUNS, 1)
  for i in (0, RUNS - 1):
    training = Training(**FIELDS | {'seed': 3 + i})
    alone = fit(
      tmp_path / str(i),
      training,
      loss=loss,
      params=params_of,
      stream=functools.partial(stream_of, 3 + i),
      evaluate=validate,
      mesh=make_mesh(jax.devices()[:2]),
    )
    own = folder / f'seed_{3 + i}'
    for name in ('train/loss', 'train/reinforce', 'validation/loss'):
      np.testing.assert_allclose(losses(own, name), losses(tmp_path / str(i), name), rtol=1e-4, atol=1e-6)
    reader = Checkpoints(own, read_only=True)
    state, host = reader.restore(alone.state)
    reader.close()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), state, alone.state)
    assert host['best']['step'] == alone.best.step
  assert len({losses(folder / f'seed_{3 + i}')[0][1] for i in range(RUNS)}) == RUNS  # no two are alike


def test_it_goes_on_exactly_and_however_many_devices_there_are(whole, tmp_path):
  def interrupted(start, stop):
    for step, batch in enumerate(together(start, stop), start):
      if step == 8:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  def crashes(state):
    """In the midst of an evaluation: two runs of four have theirs of this step."""
    evaluated.append(int(state.step))
    if len(evaluated) == RUNS + 3:
      raise KeyboardInterrupt
    return validate(state)

  evaluated = []
  with pytest.raises(KeyboardInterrupt):
    fit_all(tmp_path, evaluate=crashes)
  assert evaluated[-1] == 10 and stored(tmp_path) == 6
  results = fit_all(tmp_path, stream=interrupted)
  assert results.step == 9 and set(results.reasons) == {'stopped by SIGTERM'}
  assert fit_all(tmp_path) == whole[0]
  for i in range(RUNS):
    own, other = (folder / f'seed_{3 + i}' for folder in (tmp_path, whole[1]))
    assert losses(own) == losses(other)
    assert stored(own) == stored(other) == 20 and stored(own, BEST) == stored(other, BEST)
  assert fit_all(tmp_path) == (20, whole[0].reasons, 0)  # nothing is left to do
  elsewhere = tmp_path / 'elsewhere'
  assert fit_all(elsewhere, devices=1, steps=4).step == 4
  for i in range(RUNS):
    own, other = (losses(folder / f'seed_{3 + i}')[:2] for folder in (elsewhere, whole[1]))
    np.testing.assert_allclose(own, other, rtol=1e-5)


def test_one_that_stops_early_leaves_the_others_alone(tmp_path):
  evaluated = collections.Counter()

  def evaluate(state):
    """Run 1 gets worse, the others better."""
    apart = lambda i: jax.tree.map(lambda x, y: float(abs(x - y).sum()), state.params, params_of(3 + i))
    run = min(range(RUNS), key=lambda i: sum(jax.tree.leaves(apart(i))))
    evaluated[run] += 1
    return {'loss': float(state.step) if run == 1 else -float(state.step)}

  every = {'evaluate_every': 2, 'log_every': 1, 'checkpoint_every': 4}
  run = functools.partial(fit_all, tmp_path, evaluate=evaluate, steps=8, keep=3, **every)
  results = run(patience=2)
  assert results.step == 8
  assert results.reasons == ['all 8 steps are done', 'no improvement in 2 evaluations since step 2'] + [
    'all 8 steps are done'
  ] * (RUNS - 2)
  assert [stored(tmp_path / f'seed_{3 + i}') for i in range(RUNS)] == [8, 6, 8, 8]
  assert [stored(tmp_path / f'seed_{3 + i}', BEST) for i in range(RUNS)] == [8, 2, 8, 8]
  assert [steps_of(tmp_path / f'seed_{3 + i}') for i in (0, 1)] == [[4, 8], [4, 6]]
  assert losses(tmp_path / 'seed_4')[-1][0] == 6 and losses(tmp_path / 'seed_3')[-1][0] == 8
  assert evaluated == {0: 4, 1: 3, 2: 4, 3: 4}
  later = run(patience=3, steps=10)  # it stays as it is when the others go on
  assert later.step == 10 and later.reasons[1] == results.reasons[1] and evaluated[1] == 3
  assert [stored(tmp_path / f'seed_{3 + i}') for i in range(RUNS)] == [10, 6, 10, 10]


@pytest.mark.parametrize('devices', [1, 4])
def test_one_that_is_over_is_left_as_it_is(devices):
  mesh = make_mesh(jax.devices()[:devices], RUNS)
  step, first = prepare_training(Training(**FIELDS), loss, params_of, mesh, [3 + i for i in range(RUNS)])
  before, batch = jax.device_get(first()), next(together(0, 1))
  wanted, told = jax.device_get(step(first(), batch))
  live = np.arange(RUNS) != 1
  found, metrics = jax.device_get(step(first(), batch, live))
  pick = lambda tree, i: [x[i] for x in jax.tree.leaves(tree)]
  for i in range(RUNS):
    left = wanted if live[i] else before._replace(step=wanted.step)
    jax.tree.map(np.testing.assert_array_equal, pick(found, i), pick(left, i))
    jax.tree.map(np.testing.assert_array_equal, pick(metrics, i), [x * live[i] for x in pick(told, i)])


def test_nan_is_told_with_its_seed(tmp_path):
  params = lambda seed: jax.tree.map(lambda x: x * np.float32('nan' if seed == 5 else 1), params_of(seed))
  folders = [tmp_path / str(i) for i in range(RUNS)]
  for own in folders:
    own.mkdir()
  with pytest.raises(UserError, match='loss of seed 5 is nan at step 1; there is no checkpoint yet'):
    fit_seeds(
      tmp_path,
      folders,
      Training(**FIELDS),
      loss=loss,
      params=params,
      stream=together,
      mesh=make_mesh(jax.devices()[:1], RUNS),
    )


def test_the_data_of_each_are_those_of_its_seed():
  words = [' '.join('abcdefg'[k % 7] for k in range(i, i + 1 + i % 4)) for i in range(30)]
  vocabulary = train_vocabulary('word', words)
  encoded = encode(Corpus(words, words), vocabulary, vocabulary)
  runs = [Batches(encoded, [(3, 3), (6, 6)], 4, seed=seed) for seed in (5, 6, 7)]
  both = StackedBatches(runs)
  for step in range(2 * len(runs[0])):
    batch = both[step]
    for i, run in enumerate(runs):
      for name, array in run[step]._asdict().items():
        np.testing.assert_array_equal(getattr(batch, name)[i] if array is not None else batch.links, array)
  assert both[0].index.shape == (3, 4) and np.any(both[0].index[0] != both[0].index[1])
