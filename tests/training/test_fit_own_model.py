"""`fit` trains any flax model, with the user's own loss and batches. The README shows a shorter form."""

import csv

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from attention_jax.training.config import Training
from attention_jax.training.loss import Loss
from attention_jax.training.state import evaluation_params
from attention_jax.training.train import fit
from attention_jax.training.writers import RunInfo, Writer, make_trackers, read_metrics

model = nn.Dense(2)


def make_batch(step):
  """A pure function of the step, so that a run can be resumed exactly."""
  x = np.random.default_rng(step).normal(size=(64, 3)).astype(np.float32)
  return {'x': x, 'label': (x[:, 0] > x[:, 1]).astype(np.int32)}


def sums(params, batch, rngs, running, update):
  """Sums over the batch; 'tokens' is the number of terms."""
  logits = model.apply({'params': params}, batch['x'])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label'])
  is_correct = logits.argmax(-1) == batch['label']
  return {'loss': losses.sum(), 'accuracy': is_correct.sum(), 'tokens': jnp.float32(losses.size)}


def evaluate(state, watch=None):
  validation = sums(evaluation_params(state), make_batch(10**6), None, {}, 1)
  return {name: validation[name] / validation['tokens'] for name in ('loss', 'accuracy')}


def train(folder, steps, writers=None):
  return fit(
    folder,
    Training(steps=steps, optimizer='adam', schedule='cosine(peak=0.5, steps=40)', evaluate_every=10),
    loss=Loss(sums),
    init_params=lambda seed: model.init(jax.random.key(seed), jnp.zeros([1, 3]))['params'],
    stream=lambda start, stop: map(make_batch, range(start, stop)),
    evaluate=evaluate,
    writers=writers,
  )


def test_a_model_of_the_user_is_trained_and_resumed(tmp_path):
  assert train(tmp_path / 'run', steps=30).state.step == 30
  resumed = train(tmp_path / 'run', steps=40)  # continues at step 30
  uninterrupted = train(tmp_path / 'other', steps=40)
  jax.tree.map(np.testing.assert_array_equal, resumed.state, uninterrupted.state)
  assert resumed.state.step == 40 and resumed.best == uninterrupted.best
  assert evaluate(resumed.state)['accuracy'] > 0.95


class Recorder(Writer):
  """A writer of the user's own."""

  def __init__(self):
    self.calls = []

  def open(self, start):
    self.calls.append(('open', start))

  def write(self, step, record):
    self.calls.append((step, sorted(name.partition('/')[0] for name in record)[0]))

  def close(self):
    self.calls.append(('close', None))


def test_writers_of_the_user_and_trackers_get_every_record(tmp_path):
  folder = tmp_path / 'run'
  for steps in (20, 30):  # the second call continues at step 20
    recorder = Recorder()
    train(folder, steps, [recorder, *make_trackers(['csv'], RunInfo(epath.Path(folder)))])
  expected = [('open', 20), (30, 'train'), (30, 'validation'), ('close', None)]
  assert [call for call in recorder.calls if call != (20, 'train')] == expected
  with open(folder / 'metrics.csv', encoding='utf-8', newline='') as file:
    rows = [(int(row['step']), row['metric'], float(row['value'])) for row in csv.DictReader(file)]
  steps = {step for step, _, _ in rows}
  values = [(record['step'], name, record[name]) for record in read_metrics(folder) for name in record]
  assert sorted(rows) == sorted(value for value in values if value[1] != 'step') and steps == {10, 20, 30}
  assert not (folder / 'tensorboard').exists()
