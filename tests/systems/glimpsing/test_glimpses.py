"""The retina against a loop in NumPy, the policy gradient, and the gradients of each part of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.systems.config import parse_config
from attention_jax.systems.glimpsing.data import DigitBatch
from attention_jax.systems.glimpsing.glimpses import GlimpseNetwork, retina, sample_location
from attention_jax.systems.glimpsing.system import _apply, _loss
from attention_jax.training.config import Training
from attention_jax.training.loss import OBJECTIVE_RNG
from tests.modules.helpers import assert_close, draw

PICTURE = np.random.default_rng(0).uniform(size=(9, 11, 3)).astype(np.float32)
CONFIG = parse_config({'system': 'glimpsing', 'model': {'samples': 1}})
MODEL = GlimpseNetwork(3, glimpses=3, size=2, scales=2, hidden=4, features=5)


@pytest.mark.long
@pytest.mark.parametrize('location', [(0.0, 0.0), (-1.0, 1.0), (0.7, -0.3)])
def test_patches_are_means_around_the_location(location):
  patches = np.asarray(retina(jnp.asarray(PICTURE), jnp.array(location), 2, 3))
  height, width, _ = PICTURE.shape
  middle = [round((coordinate + 1) / 2 * size) for coordinate, size in zip(location, (height, width), strict=True)]
  for scale, row, column in np.ndindex(3, 2, 2):
    cell = 2**scale
    total = np.zeros(3)
    for y, x in np.ndindex(cell, cell):
      pixel_row = middle[0] - cell + row * cell + y
      pixel_column = middle[1] - cell + column * cell + x
      if 0 <= pixel_row < height and 0 <= pixel_column < width:
        total += PICTURE[pixel_row, pixel_column]
    np.testing.assert_allclose(patches[scale, row, column], total / cell**2, rtol=1e-5)


def apply(params, rng, deterministic=False, pictures=PICTURE[None]):
  run = jax.jit(MODEL.apply, static_argnums=3)
  return run(
    {'params': params}, jnp.asarray(pictures), jnp.zeros((len(pictures), 2)), deterministic, rngs={'attention': rng}
  )


@pytest.fixture(scope='module')
def params():
  rngs = {'params': jax.random.key(0), 'attention': jax.random.key(1)}
  return jax.jit(MODEL.init)(rngs, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)))['params']


@pytest.mark.long
def test_locations_are_drawn_around_the_policy(params):
  outputs = apply(params, jax.random.key(3))
  assert outputs.locations.shape == (1, 3, 2) and outputs.locations[0, 0].tolist() == [0, 0]
  assert outputs.log_policy[0, 0] == 0 and outputs.log_policy[0, 1] != 0
  mean_outputs = apply(params, jax.random.key(3), True)
  repeated = apply(params, jax.random.key(4), True)
  assert_close(mean_outputs, repeated)
  assert not mean_outputs.log_policy.any()
  samples = jax.vmap(lambda rng: apply(params, rng))(jax.random.split(jax.random.key(5), 500))
  locations = np.asarray(samples.locations[:, 0, 1])
  log_densities = np.asarray(samples.log_policy[:, 0, 1])
  np.testing.assert_allclose(locations.mean(0), mean_outputs.locations[0, 1], atol=0.03)
  np.testing.assert_allclose(locations.std(0), MODEL.deviation, rtol=0.1)
  standardized = (locations - np.asarray(mean_outputs.locations[0, 1])) / MODEL.deviation
  expected = -0.5 * (standardized**2).sum(1) - 2 * np.log(MODEL.deviation * np.sqrt(2 * np.pi))
  np.testing.assert_allclose(log_densities, expected, rtol=1e-3, atol=1e-3)


def modules_with_gradient(params, loss):
  """Names of the submodules for which the gradient of `loss` of the outputs is not zero."""
  grads = jax.jit(jax.grad(lambda p: jnp.sum(loss(apply(p, jax.random.key(3))))))(params)
  return {name for name, part in grads.items() if any(np.abs(g).max() > 0 for g in jax.tree.leaves(part))}


def test_sampled_locations_are_inside_the_picture_with_the_densities_of_the_samples():
  mean = jnp.broadcast_to(jnp.array([0.95, -0.2]), (200, 2))
  location, log_density = sample_location(mean, 0.5, jax.random.key(0))
  unclipped = mean + 0.5 * jax.random.normal(jax.random.key(0), mean.shape)
  assert np.abs(unclipped).max() > 1
  np.testing.assert_allclose(location, np.clip(unclipped, -1, 1), rtol=1e-6)
  squares = ((np.asarray(unclipped - mean) / 0.5) ** 2).sum(1)
  np.testing.assert_allclose(log_density, -squares / 2 - 2 * np.log(0.5 * np.sqrt(2 * np.pi)), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_gradients_of_each_output_reach_only_its_submodules(params):
  assert modules_with_gradient(params, lambda outputs: outputs.log_policy) == {'policy'}
  assert modules_with_gradient(params, lambda outputs: outputs.baselines) == {'baseline'}
  label_modules = modules_with_gradient(params, lambda outputs: outputs.logits * draw(3)[None])
  assert label_modules == {'patch', 'location', 'what', 'where', 'core', 'inputs', 'labels'}


@pytest.mark.long
def test_policy_gradient_equals_gradient_of_the_expected_reward(params):
  """E[R ∇ log π] equals the derivative of E[R] by the policy's bias, where R depends on the second location alone."""
  rngs = jax.random.split(jax.random.key(9), 40_000)
  model = MODEL.clone(glimpses=2)

  def run(bias, rng):
    policy = params['policy'] | {'bias': params['policy']['bias'] + jnp.array([1.0, 0.0]) * bias}
    variables = {'params': params | {'policy': policy}}
    outputs = model.apply(variables, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)), False, rngs={'attention': rng})
    return outputs.locations[0, 1, 0], outputs.log_policy[0, 1]

  @jax.jit
  def estimate(bias):
    """Mean reward, and the policy gradient without and with a baseline."""
    (reward, _), (_, slopes) = jax.vmap(lambda rng: jax.jvp(lambda b: run(b, rng), (bias,), (1.0,)))(rngs)
    return reward.mean(), (reward * slopes).mean(), ((reward - reward.mean()) * slopes).mean()

  reward_above, _, _ = estimate(0.05)
  reward_below, _, _ = estimate(-0.05)
  _, without_baseline, with_baseline = estimate(0.0)
  expected = (reward_above - reward_below) / 0.1  # finite difference with the same draws
  np.testing.assert_allclose(with_baseline, expected, rtol=0.05)
  np.testing.assert_allclose(without_baseline, expected, rtol=0.15)


@pytest.mark.long
def test_loss_equals_the_equation_of_the_paper(params):
  """−log p(y) − Σ_t log π(l_t) (R − b_t) + Σ_t (R − b_t)², over the rows that are no fillers."""
  pictures = np.random.default_rng(1).integers(0, 255, (4, *PICTURE.shape)).astype(np.uint8)
  rng = jax.random.key(2)
  (sample_rng,) = jax.random.split(rng, 1)  # the rng of the loss for its only sample
  batch = DigitBatch(pictures, np.zeros(4, np.int32), np.array([0, 1, 2, -1]))  # the last row is a filler
  outputs = jax.tree.map(np.asarray, jax.jit(lambda params: _apply(MODEL, params, batch, sample_rng))(params))
  wrong = np.array([0, 1, 0, 0])
  batch = batch._replace(label=(outputs.logits.argmax(-1) + wrong) % 3)
  loss = _loss(MODEL, CONFIG, Training())
  sums = jax.jit(lambda params: loss(params, batch, {OBJECTIVE_RNG: rng}))(params)
  expected = {'cross_entropy': 0.0, 'reinforce': 0.0, 'baseline': 0.0}
  for i in range(3):
    expected['cross_entropy'] += np.log(np.exp(outputs.logits[i]).sum()) - outputs.logits[i, batch.label[i]]
    for t in (1, 2):
      advantage = 1 - wrong[i] - outputs.baselines[i, t]
      expected['reinforce'] -= outputs.log_policy[i, t] * advantage
      expected['baseline'] += advantage**2
  for name, value in expected.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-4, err_msg=name)
  np.testing.assert_allclose(sums['loss'], sum(expected.values()), rtol=1e-4)
