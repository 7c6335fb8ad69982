"""Glimpses of several objects: the network and its loss against loops, and the layers that each output trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.systems.config import parse_config
from attention_jax.systems.glimpsing.data import DigitBatch
from attention_jax.systems.glimpsing.deep_glimpses import DeepGlimpseNetwork
from attention_jax.systems.glimpsing.glimpses import retina
from attention_jax.systems.glimpsing.system import _apply, _loss
from attention_jax.training.config import Training
from attention_jax.training.loss import OBJECTIVE_RNG
from tests.modules.helpers import assert_close, variables
from tests.modules.reference_cells import long_short_term

K, N, F = 2, 2, 5  # objects, glimpses of each, features
MODEL = DeepGlimpseNetwork(3, K, N, size=2, scales=2, hidden=4, features=F)
CONFIG = parse_config({'system': 'glimpsing', 'model': {'samples': 1}})
PICTURES = np.random.default_rng(0).integers(0, 255, (4, 9, 11, 1)).astype(np.uint8)
FLOATS = jnp.asarray(PICTURES / 255, jnp.float32)
FIRST = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (4, 2)), jnp.float32)
PARAMS = variables(MODEL, FLOATS, FIRST, scale=0.5)['params']


def relu(x):
  return np.maximum(x, 0)


def literal(params, picture, coarse, location):
  """Logits [K, L], locations [T, 2] and baselines [T] of one picture, without sampling. Ba et al. 2015, section 3."""

  def dense(name, x):
    return x @ params[name]['kernel'] + params[name]['bias']

  def lstm(name, x, state):
    cell = params[name]
    return long_short_term(x @ cell['inputs']['kernel'] + cell['inputs']['bias'], state, cell['kernel'], cell['bias'])

  reader = (np.zeros(F), np.zeros(F))
  mover = (np.tanh(dense('context', coarse.ravel())), np.zeros(F))
  logits, locations, baselines = [], [], []
  for _ in range(K):
    for _ in range(N):
      locations.append(location)
      baselines.append(dense('baseline', mover[0])[0])
      patches = np.asarray(retina(jnp.asarray(picture), jnp.asarray(location), 2, 2)).ravel()
      g = relu(dense('what', relu(dense('patch', patches)))) * relu(dense('where', location))
      reader = lstm('reader', g, reader)
      mover = lstm('mover', reader[0], mover)
      location = np.tanh(dense('policy', mover[0]))
    logits.append(dense('classifier', reader[0]))
  return np.array(logits), np.array(locations), np.array(baselines)


@pytest.mark.long
def test_the_network_equals_a_loop():
  outputs = jax.jit(MODEL.apply)({'params': PARAMS}, FLOATS, FIRST)
  coarse = np.asarray(jax.image.resize(FLOATS, (4, 2, 2, 1), 'linear'))
  params = jax.tree.map(np.asarray, PARAMS)
  for b in range(4):
    logits, locations, baselines = literal(params, np.asarray(FLOATS[b]), coarse[b], np.asarray(FIRST[b]))
    assert_close(outputs.logits[b], logits, rtol=1e-3)
    assert_close(outputs.locations[b], locations, rtol=1e-3)
    assert_close(outputs.baselines[b], baselines, rtol=1e-3)
  assert not np.any(outputs.log_policy)


@pytest.mark.long
def test_the_loss_has_a_reward_for_every_object():
  rng = jax.random.key(2)
  (sample_rng,) = jax.random.split(rng, 1)
  index = np.array([0, 1, 2, -1], np.int32)  # the last row is a filler
  batch = DigitBatch(PICTURES, np.zeros((4, K), np.int32), index)
  outputs = jax.tree.map(np.asarray, jax.jit(lambda params: _apply(MODEL, params, batch, sample_rng))(PARAMS))
  wrong = np.array([[0, 0], [1, 0], [0, 1], [0, 0]])
  batch = batch._replace(label=((outputs.logits.argmax(-1) + wrong) % 3).astype(np.int32))
  loss = jax.jit(lambda params: _loss(MODEL, CONFIG, Training())(params, batch, {OBJECTIVE_RNG: rng}))
  sums = loss(PARAMS)
  expected = {'cross_entropy': 0.0, 'reinforce': 0.0, 'baseline': 0.0}
  for b in range(3):
    for k in range(K):
      logits = outputs.logits[b, k]
      expected['cross_entropy'] += np.log(np.exp(logits).sum()) - logits[batch.label[b, k]]
    for t in range(1, K * N):
      right_from_here = sum(1 - wrong[b, k] for k in range(K) if (k + 1) * N - 1 >= t)
      advantage = right_from_here - outputs.baselines[b, t]
      expected['reinforce'] -= outputs.log_policy[b, t] * advantage
      expected['baseline'] += advantage**2
  for name, value in expected.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-3, err_msg=name)
  assert sums['tokens'] == 3 * K


@pytest.mark.long
def test_log_policy_trains_the_layers_that_choose_locations_and_logits_do_not():
  batch = DigitBatch(PICTURES, np.zeros((4, K), np.int32), np.arange(4, dtype=np.int32))

  def sums(params):
    outputs = _apply(MODEL, params, batch, jax.random.key(3))
    return [jnp.sum(jnp.sin(x)) for x in (outputs.logits, outputs.log_policy, outputs.baselines)]

  gradients = jax.jit(jax.jacrev(sums))(PARAMS)
  logits, policy, baseline = (
    {name for name, part in output_gradients.items() if any(np.any(leaf != 0) for leaf in jax.tree.leaves(part))}
    for output_gradients in gradients
  )
  assert logits == {'patch', 'what', 'where', 'reader', 'classifier'}
  assert {'policy', 'mover', 'context', 'reader'} <= policy
  assert baseline == {'baseline'}
