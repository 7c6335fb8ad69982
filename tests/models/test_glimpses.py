"""The retina against a literal loop, and the gradients of the parts of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.digits import DigitBatch
from attention_jax.models.glimpses import GlimpseNetwork, retina
from attention_jax.systems.glimpsing import _apply, _loss
from attention_jax.training.loop import Training
from attention_jax.training.loss import OBJECTIVE_RNG
from tests.modules.helpers import assert_close, draw

PICTURE = np.random.default_rng(0).uniform(size=(9, 11, 3)).astype(np.float32)
MODEL = GlimpseNetwork(3, glimpses=3, size=2, scales=2, hidden=4, features=5)


@pytest.mark.parametrize('location', [(0.0, 0.0), (-1.0, 1.0), (0.7, -0.3)])
def test_patches_are_means_of_pixels_around_the_location(location):
  patches = np.asarray(retina(jnp.asarray(PICTURE), jnp.array(location), 2, 3))
  middle = [round((coordinate + 1) / 2 * size) for coordinate, size in zip(location, PICTURE.shape[:2], strict=True)]
  for scale in range(3):
    cell = 2**scale
    for row in range(2):
      for column in range(2):
        total = np.zeros(3)
        for y in range(cell):
          for x in range(cell):
            pixel = middle[0] - cell + row * cell + y, middle[1] - cell + column * cell + x
            is_inside = 0 <= pixel[0] < PICTURE.shape[0] and 0 <= pixel[1] < PICTURE.shape[1]
            total += PICTURE[pixel] if is_inside else 0.0
        np.testing.assert_allclose(patches[scale, row, column], total / cell**2, rtol=1e-5)


def apply_model(params, rng, deterministic=False):
  rngs = {'attention': rng}
  return MODEL.apply({'params': params}, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)), deterministic, rngs=rngs)


@pytest.fixture(scope='module')
def params():
  rngs = {'params': jax.random.key(0), 'attention': jax.random.key(1)}
  return MODEL.init(rngs, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)))['params']


def test_locations_are_drawn_around_the_policy(params):
  outputs = apply_model(params, jax.random.key(3))
  assert outputs.locations.shape == (1, 3, 2) and outputs.locations[0, 0].tolist() == [0, 0]
  assert outputs.log_policy[0, 0] == 0 and outputs.log_policy[0, 1] != 0
  deterministic = apply_model(params, jax.random.key(3), True)
  assert_close(deterministic, apply_model(params, jax.random.key(4), True))
  assert not deterministic.log_policy.any()
  samples = jax.vmap(lambda rng: apply_model(params, rng))(jax.random.split(jax.random.key(5), 500))
  locations, log_densities = np.asarray(samples.locations[:, 0, 1]), np.asarray(samples.log_policy[:, 0, 1])
  mean = np.asarray(deterministic.locations[0, 1])
  np.testing.assert_allclose(locations.mean(0), mean, atol=0.03)
  np.testing.assert_allclose(locations.std(0), MODEL.deviation, rtol=0.1)
  standardized = (locations - mean) / MODEL.deviation
  expected = -0.5 * (standardized**2).sum(1) - 2 * np.log(MODEL.deviation * np.sqrt(2 * np.pi))
  np.testing.assert_allclose(log_densities, expected, rtol=1e-3, atol=1e-3)


def modules_with_gradients(params, objective):
  """Returns the names of the modules whose parameters have gradients of objective(outputs)."""
  gradients = jax.grad(lambda p: jnp.sum(objective(apply_model(p, jax.random.key(3)))))(params)
  return {name for name, part in gradients.items() if any(np.abs(g).max() > 0 for g in jax.tree.leaves(part))}


def test_each_part_of_the_loss_trains_its_own_modules(params):
  assert modules_with_gradients(params, lambda outputs: outputs.log_policy) == {'policy'}
  assert modules_with_gradients(params, lambda outputs: outputs.baselines) == {'baseline'}
  trained_by_labels = modules_with_gradients(params, lambda outputs: outputs.logits * draw(3)[None])
  assert trained_by_labels == {'seen', 'placed', 'what', 'where', 'core', 'inputs', 'labels'}


def test_the_policy_gradient_is_that_of_the_expected_reward(params):
  """E[R ∇ log π] against the derivative of E[R] with respect to the bias of the policy; R is the second location."""
  rngs = jax.random.split(jax.random.key(9), 40_000)
  model = MODEL.clone(glimpses=2)

  def run(bias, rng):
    policy = params['policy'] | {'bias': params['policy']['bias'] + jnp.array([1.0, 0.0]) * bias}
    variables = {'params': params | {'policy': policy}}
    outputs = model.apply(variables, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)), False, rngs={'attention': rng})
    return outputs.locations[0, 1, 0], outputs.log_policy[0, 1]

  @jax.jit
  def estimate(bias):
    """Returns E[R], and estimates of its derivative without and with a baseline."""
    (rewards, _), (_, slopes) = jax.vmap(lambda rng: jax.jvp(lambda b: run(b, rng), (bias,), (1.0,)))(rngs)
    return rewards.mean(), (rewards * slopes).mean(), ((rewards - rewards.mean()) * slopes).mean()

  reward_above, _, _ = estimate(0.05)
  reward_below, _, _ = estimate(-0.05)
  _, without_baseline, with_baseline = estimate(0.0)
  expected = (reward_above - reward_below) / 0.1  # the rngs are the same
  np.testing.assert_allclose(with_baseline, expected, rtol=0.05)
  np.testing.assert_allclose(without_baseline, expected, rtol=0.15)


def test_the_loss_equals_the_formula_of_its_paper(params):
  """−log p(y) − Σ_t log π(l_t) (R − b_t) + Σ_t (R − b_t)², without filler rows."""
  pictures = np.random.default_rng(1).integers(0, 255, (4, *PICTURE.shape)).astype(np.uint8)
  rng = jax.random.key(2)
  (sample_rng,) = jax.random.split(rng, 1)  # as the loss splits it for a single sample
  batch = DigitBatch(pictures, np.zeros(4, np.int32), np.array([0, 1, 2, -1]))  # the last row is filler
  outputs = jax.tree.map(np.asarray, _apply(MODEL, params, batch, sample_rng))
  batch = batch._replace(label=(outputs.logits.argmax(-1) + np.array([0, 1, 0, 0])) % 3)  # the second one is wrong
  sums = _loss(MODEL, {'model': {'samples': 1}}, Training())(params, batch, {OBJECTIVE_RNG: rng})
  literal = {'cross_entropy': 0.0, 'reinforce': 0.0, 'baseline': 0.0}
  for i in range(3):
    literal['cross_entropy'] += np.log(np.exp(outputs.logits[i]).sum()) - outputs.logits[i, batch.label[i]]
    for t in (1, 2):
      advantage = float(i != 1) - outputs.baselines[i, t]
      literal['reinforce'] -= outputs.log_policy[i, t] * advantage
      literal['baseline'] += advantage**2
  for name, value in literal.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-4, err_msg=name)
  np.testing.assert_allclose(sums['loss'], sum(literal.values()), rtol=1e-4)
