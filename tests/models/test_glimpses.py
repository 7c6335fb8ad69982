"""The retina against a literal loop, and which part of the loss teaches which part of the model."""

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
def test_patches_are_means_around_the_location(location):
  found = np.asarray(retina(jnp.asarray(PICTURE), jnp.array(location), 2, 3))
  middle = [round((place + 1) / 2 * size) for place, size in zip(location, PICTURE.shape[:2], strict=True)]
  for scale in range(3):
    cell = 2**scale
    for row in range(2):
      for column in range(2):
        total = np.zeros(3)
        for y in range(cell):
          for x in range(cell):
            at = middle[0] - cell + row * cell + y, middle[1] - cell + column * cell + x
            inside = 0 <= at[0] < PICTURE.shape[0] and 0 <= at[1] < PICTURE.shape[1]
            total += PICTURE[at] if inside else 0.0
        np.testing.assert_allclose(found[scale, row, column], total / cell**2, rtol=1e-5)


def applied(params, rng, deterministic=False, pictures=PICTURE[None]):
  rngs = {'attention': rng}
  return MODEL.apply({'params': params}, jnp.asarray(pictures), jnp.zeros((len(pictures), 2)), deterministic, rngs=rngs)


@pytest.fixture(scope='module')
def params():
  rngs = {'params': jax.random.key(0), 'attention': jax.random.key(1)}
  return MODEL.init(rngs, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)))['params']


def test_locations_are_drawn_around_the_policy(params):
  found = applied(params, jax.random.key(3))
  assert found.locations.shape == (1, 3, 2) and found.locations[0, 0].tolist() == [0, 0]
  assert found.log_policy[0, 0] == 0 and found.log_policy[0, 1] != 0
  still = applied(params, jax.random.key(3), True)
  again = applied(params, jax.random.key(4), True)
  assert_close(still, again)
  assert not still.log_policy.any()
  first = jax.vmap(lambda rng: applied(params, rng))(jax.random.split(jax.random.key(5), 500))
  drawn, densities = np.asarray(first.locations[:, 0, 1]), np.asarray(first.log_policy[:, 0, 1])
  np.testing.assert_allclose(drawn.mean(0), still.locations[0, 1], atol=0.03)
  np.testing.assert_allclose(drawn.std(0), MODEL.deviation, rtol=0.1)
  away = (drawn - np.asarray(still.locations[0, 1])) / MODEL.deviation
  literal = -0.5 * (away**2).sum(1) - 2 * np.log(MODEL.deviation * np.sqrt(2 * np.pi))
  np.testing.assert_allclose(densities, literal, rtol=1e-3, atol=1e-3)


def taught(params, of):
  grads = jax.grad(lambda p: jnp.sum(of(applied(p, jax.random.key(3)))))(params)
  return {name for name, part in grads.items() if any(np.abs(g).max() > 0 for g in jax.tree.leaves(part))}


def test_each_part_of_the_loss_teaches_its_own_part_of_the_model(params):
  assert taught(params, lambda found: found.log_policy) == {'policy'}
  assert taught(params, lambda found: found.baselines) == {'baseline'}
  of_labels = taught(params, lambda found: found.logits * draw(3)[None])
  assert of_labels == {'seen', 'placed', 'what', 'where', 'core', 'inputs', 'labels'}


def test_the_policy_gradient_is_that_of_the_expected_reward(params):
  """E[R ∇ log π] against the derivative of E[R] by the policy's bias, R a function of the second location alone."""
  rngs = jax.random.split(jax.random.key(9), 40_000)
  two = MODEL.clone(glimpses=2)

  def run(bias, rng):
    policy = params['policy'] | {'bias': params['policy']['bias'] + jnp.array([1.0, 0.0]) * bias}
    given = {'params': params | {'policy': policy}}
    found = two.apply(given, jnp.asarray(PICTURE[None]), jnp.zeros((1, 2)), False, rngs={'attention': rng})
    return found.locations[0, 1, 0], found.log_policy[0, 1]

  @jax.jit
  def estimate(bias):
    (drawn, _), (_, slopes) = jax.vmap(lambda rng: jax.jvp(lambda b: run(b, rng), (bias,), (1.0,)))(rngs)
    return drawn.mean(), (drawn * slopes).mean(), ((drawn - drawn.mean()) * slopes).mean()

  above, below = estimate(0.05)[0], estimate(-0.05)[0]
  _, plain, lessened = estimate(0.0)
  exact = (above - below) / 0.1  # with the same draws
  np.testing.assert_allclose(lessened, exact, rtol=0.05)
  np.testing.assert_allclose(plain, exact, rtol=0.15)


def test_the_loss_is_the_formula_of_its_paper(params):
  """−log p(y) − Σ_t log π(l_t) (R − b_t) + Σ_t (R − b_t)², over the pictures that are real."""
  pictures = np.random.default_rng(1).integers(0, 255, (4, *PICTURE.shape)).astype(np.uint8)
  rng = jax.random.key(2)
  (only,) = jax.random.split(rng, 1)  # what the loss draws its one way of looking from
  batch = DigitBatch(pictures, np.zeros(4, np.int32), np.array([0, 1, 2, -1]))  # the last row is a filler
  found = jax.tree.map(np.asarray, _apply(MODEL, params, batch, only))
  batch = batch._replace(label=(found.logits.argmax(-1) + np.array([0, 1, 0, 0])) % 3)  # the second guess is wrong
  sums = _loss(MODEL, {'model': {'samples': 1}}, Training())(params, batch, {OBJECTIVE_RNG: rng})
  literal = {'cross_entropy': 0.0, 'reinforce': 0.0, 'baseline': 0.0}
  for i in range(3):
    literal['cross_entropy'] += np.log(np.exp(found.logits[i]).sum()) - found.logits[i, batch.label[i]]
    for t in (1, 2):
      ahead = float(i != 1) - found.baselines[i, t]
      literal['reinforce'] -= found.log_policy[i, t] * ahead
      literal['baseline'] += ahead**2
  for name, value in literal.items():
    np.testing.assert_allclose(sums[name], value, rtol=1e-4, err_msg=name)
  np.testing.assert_allclose(sums['loss'], sum(literal.values()), rtol=1e-4)
