"""A model and data that train in a second, and a program that tests kill: `helpers.py FOLDER STEPS PAUSE`."""

import functools
import json
import sys
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import ModelOutput, shift_right
from attention_jax.models.traits import Traits
from attention_jax.training.config import Training
from attention_jax.training.folder import prepare_folder
from attention_jax.training.loss import Loss
from attention_jax.training.partition import make_mesh
from attention_jax.training.state import evaluation_params
from attention_jax.training.train import fit

WORDS = 13
BUCKETS = ((4, 5), (6, 7))


class Batch(NamedTuple):
  source: Any
  source_mask: Any
  target: Any
  target_mask: Any
  index: Any
  segments: Any = None


class Toy(nn.Module):
  """Predicts the next word from the mean of the source and the previous word, with dropout.

  It also returns attention weights over the source. If `required_loss` is set, training samples the position that is
  attended to.
  """

  copies = False
  dropout: float = 0.1
  required_loss: str = ''

  @property
  def traits(self) -> Traits:
    return Traits(required_loss=self.required_loss)

  def output_size(self, source_length):
    return WORDS

  @nn.compact
  def __call__(self, source, source_mask, target, deterministic=True):
    embed = nn.Embed(WORDS, 6)
    mask = source_mask[..., None]
    context = jnp.sum(embed(source) * mask, axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    words = nn.Dropout(self.dropout)(embed(shift_right(target)), deterministic=deterministic)
    hidden = jnp.tanh(nn.Dense(7)(words) + nn.Dense(7, use_bias=False)(context)[:, None])
    temperature = self.param('temperature', nn.initializers.ones, ())
    scores = jnp.einsum('btd,bsd->bts', words, embed(source)) / temperature
    log_weights = jax.nn.log_softmax(jnp.where(source_mask[:, None], scores, -1e9))
    if deterministic or not self.required_loss:
      return ModelOutput(nn.Dense(WORDS)(hidden), jnp.exp(log_weights), (), ())
    sampled = jax.nn.one_hot(jax.random.categorical(self.make_rng('attention'), log_weights), source.shape[1])
    log_probs = jnp.sum(sampled * log_weights, axis=-1)
    return ModelOutput(nn.Dense(WORDS)(hidden), sampled, jnp.cumsum(log_probs, axis=1)[..., None], ())


def make_batch(step: int, rows: int = 16, lengths=BUCKETS[:1]) -> Batch:
  """Returns the batch of a step, a pure function of it: copy tasks with padding, and a filler row at the end."""
  random = np.random.default_rng([3, step])
  source_length, target_length = lengths[step % len(lengths)]
  source = random.integers(4, WORDS, (rows, source_length), dtype=np.int32)
  target = np.concatenate([source, np.full((rows, 1), 2, np.int32)], axis=1)[:, :target_length]
  unmasked = random.integers(1, source_length + 1, rows)
  unmasked[-1] = -1  # the filler row

  def make_mask(size: int, extra: int):
    return np.arange(size) < (unmasked + extra)[:, None]

  index = np.arange(rows, dtype=np.int32)
  return Batch(source, make_mask(source_length, 0), target, make_mask(target_length, 1), index)


def stream(start: int, stop: int, pause: float = 0.0, lengths=BUCKETS):
  for step in range(start, stop):
    time.sleep(pause)
    yield make_batch(step, lengths=lengths)


@functools.cache
def init_params():
  batch = make_batch(0)
  shapes = jax.eval_shape(Toy().init, jax.random.key(5), batch.source, batch.source_mask, batch.target)['params']
  random = np.random.default_rng(5)
  # Like those of flax, which take longer to compile: the scalar is 1, biases are 0.
  return jax.tree.map(
    lambda x: (
      np.float32(0.4) * random.normal(size=x.shape).astype(np.float32)
      if len(x.shape) > 1
      else np.full(x.shape, x.shape == (), np.float32)
    ),
    shapes,
  )


def fit_toy(folder, *, stream=stream, evaluate=None, **fields):
  """Trains a Toy in `folder` with most features of training in use; `fields` override fields of Training."""
  options = {
    'steps': 20,
    'schedule': 'rsqrt(peak=1e-2, warmup=7)',
    'average': 0.9,
    'accumulate': 2,
    'label_smoothing': 0.1,
    'log_every': 2,
    'evaluate_every': 7,
    'checkpoint_every': 5,
    'patience': 50,
    'auxiliary': 'coverage(weight=0.1)',
    'anneal': 'temperature: linear(peak=2.0, end=0.5, steps=20)',
    'objective': 'scheduled_sampling(schedule="linear(slope=0.02)")',
  }
  training = Training(**options | fields)
  model = Toy(required_loss='reinforce')
  loss = sequence_loss(model, training.label_smoothing, training.auxiliary, training.objective)
  return _fit(folder, training, loss, init_params(), stream, evaluate or validate)


def light_sums(params, batch, rngs, running, update):
  """A loss that is compiled fast."""
  words = params['w'][batch.source] * batch.source_mask[..., None]
  return {'loss': jnp.sum(words**2), 'tokens': jnp.sum(batch.source_mask, dtype=jnp.float32)}


def evaluate_light(state, watch=None) -> dict[str, float]:
  return {'loss': float(jnp.sum(evaluation_params(state)['w'] ** 2))}


LIGHT_LOSS = Loss(light_sums, ('loss',))
LIGHT_PARAMS = {'w': np.linspace(1, 2, WORDS, dtype=np.float32)[:, None]}


def light_stream(start: int, stop: int):
  return stream(start, stop, lengths=BUCKETS[:1])


def fit_light(folder, *, loss=LIGHT_LOSS, stream=light_stream, evaluate=evaluate_light, **fields):
  """Trains a vector in `folder`, which is compiled fast; the state has all its fields."""
  training = Training(**{'average': 0.9, 'log_every': 1} | fields)
  return _fit(folder, training, loss, LIGHT_PARAMS, stream, evaluate)


def _fit(folder, training, loss, params, stream, evaluate):
  prepare_folder(folder, {'training': vars(training)})
  mesh = make_mesh(jax.devices()[:2])
  options = {'init_params': lambda seed: params, 'mesh': mesh, 'stream': stream, 'evaluate': evaluate}
  return fit(folder, training, loss=loss, **options)


@functools.cache
def compiled_loss():
  return jax.jit(sequence_loss(Toy()))


def validate(state, watch=None) -> dict[str, float]:
  """Returns the mean loss per token of a few batches."""
  sums = [jax.device_get(compiled_loss()(evaluation_params(state), make_batch(10_000 + i))) for i in range(4)]
  return {'loss': float(sum(s['loss'] for s in sums) / sum(s['tokens'] for s in sums))}


def state_bits(state) -> list[str]:
  """Returns the bytes of every array of a state in hexadecimal, for exact comparison and for JSON."""
  return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(state)]


if __name__ == '__main__':
  folder, steps, pause = sys.argv[1:]
  result = fit_toy(folder, steps=int(steps), stream=functools.partial(stream, pause=float(pause)))
  with open(f'{folder}.json', 'w') as file:
    json.dump({'reason': result.reason, 'best': result.best, 'state': state_bits(result.state)}, file)
