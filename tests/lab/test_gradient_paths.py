"""Gradients between positions: closed forms of linear recurrences, gradients of a model's embeddings, distances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import default_config, parse_config
from attention_jax.systems.translation.system import initial_params
from lab.gradient_paths import factor_per_step, gradient_norms, recurrent_distances, rms_by_distance, source_gradients

DECAY = 0.5
SIZE = 11


def linear_recurrence(inputs, steps, attends):
  """Outputs of h' = DECAY h + x over the source, then of h' = DECAY h over the target; attention adds all x to each."""
  states = [jnp.zeros(inputs.shape[1])]
  for row in inputs:
    states.append(DECAY * states[-1] + row)
  outputs = []
  for _ in range(steps):
    states.append(DECAY * states[-1])
    outputs.append(states[-1].sum() + (inputs.sum() if attends else 0.0))
  return jnp.stack(outputs)


@pytest.mark.long
@pytest.mark.parametrize('attends', [False, True])
def test_gradients_of_a_linear_recurrence_have_a_closed_form(attends):
  inputs = jax.random.normal(jax.random.key(0), (5, 3))
  norms = gradient_norms(lambda x: linear_recurrence(x, 4, attends), inputs)
  steps = np.arange(1, 5)[:, None] + np.arange(4, -1, -1)[None, :]
  expected = np.sqrt(3) * (DECAY**steps + attends)
  np.testing.assert_allclose(norms, expected, rtol=1e-6)
  factor = factor_per_step(rms_by_distance(steps, norms))
  if attends:
    assert DECAY < factor < 1
  else:
    assert factor == pytest.approx(DECAY, rel=1e-5)


def test_recurrent_distances_count_steps_to_the_nearer_end_and_in_the_decoder():
  distances = recurrent_distances(5, 3)
  for target in range(3):
    for source in range(5):
      forward = len(range(source + 1, 5))  # states after the one that reads the position
      backward = len(range(source))
      assert distances[target, source] == min(forward, backward) + target + 1


def test_means_are_root_mean_squares():
  assert rms_by_distance(np.array([[2, 1], [1, 3]]), np.array([[3.0, 1.0], [7.0, 0.5]])) == {1: 5.0, 2: 3.0, 3: 0.5}
  assert rms_by_distance(np.array([1, 2, 1]), np.array([1.0, 3.0, 1.0]), min_count=2) == {1: 1.0}
  with pytest.raises(UserError, match=r'same shape, got \[2\] and \[3\]'):
    rms_by_distance(np.zeros(2), np.zeros(3))


@pytest.mark.long
@pytest.mark.parametrize('shared', [False, True])
def test_gradients_of_a_model_are_those_of_its_embeddings(shared):
  config = default_config()
  config.model.share_embeddings = shared
  config.model.encoder = 'birnn(rnn="simple", features=4)'
  config.model.decoder = 'luong(rnn="simple", features=4)'
  config.model.embedding = config.model.attention.features = 4
  model = build(parse_config(config).model, SIZE, SIZE)
  params = initial_params(model, 0)
  source = jnp.array([4, 5, 6, 7, 2])  # no id twice, so that each position has an embedding of its own
  target = jnp.array([8, 9, 2])  # the decoder reads no id of the source
  mask = jnp.ones(5, bool)
  norms = jax.jit(functools.partial(source_gradients, model))(params, source, mask, target)

  def logits_of(table):
    changed = jax.tree.map(lambda x: x, params)
    changed['encoder']['embedding']['table']['embedding'] = table
    logits = model.apply({'params': changed}, source[None], mask[None], target[None]).logits[0]
    return logits[jnp.arange(3), target] - logits.mean(-1)

  by_word = jax.jit(jax.jacrev(logits_of))(params['encoder']['embedding']['table']['embedding'])  # [T, V, D]
  np.testing.assert_allclose(norms, jnp.linalg.norm(by_word[:, source], axis=-1), rtol=1e-4, atol=1e-7)
