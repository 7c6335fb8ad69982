"""REINFORCE against the exact gradient, where each sample depends on the one before; extreme scores of a chain."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.latent import init_chain, latent_monotonic, reinforce

T, S = 3, 3
ALL_SAMPLES = jnp.array(list(itertools.product(range(S), repeat=T)))  # [S^T, T]
BASELINES = {
  'none': lambda samples: jnp.zeros(T),
  'constant': lambda samples: jnp.array([3.0, -1.0, 0.7]),
  'of earlier samples': lambda samples: jnp.cumsum(samples) - samples + 0.5,
}


@pytest.fixture
def theta(rng):
  """Scores [T, S, S] of each sample given the one before."""
  return jax.random.normal(rng, (T, S, S))


def log_probs(theta, samples):
  previous = jnp.concatenate([jnp.zeros(1, samples.dtype), samples[:-1]])
  return jax.nn.log_softmax(theta)[jnp.arange(T), previous, samples]


def probability_of_all_samples(theta):
  return jnp.exp(jax.vmap(lambda samples: log_probs(theta, samples).sum())(ALL_SAMPLES))


def rewards(samples):
  """Rewards [T], each of which depends on all samples so far."""
  return jnp.sin(jnp.cumsum(samples * jnp.array([1.0, 3.0, 9.0])) + jnp.arange(T))


def objective(theta, entropy):
  """E[Σ_t r_t] + λ H, exactly."""
  logs = jax.vmap(lambda samples: log_probs(theta, samples).sum())(ALL_SAMPLES)
  return jnp.sum(jnp.exp(logs) * (jax.vmap(rewards)(ALL_SAMPLES).sum(-1) - entropy * logs))


@pytest.mark.long
@pytest.mark.parametrize('baseline', BASELINES)
@pytest.mark.parametrize('entropy', [0.0, 0.3])
def test_expected_gradient_is_that_of_reward_and_entropy(theta, entropy, baseline):
  def estimate(theta, samples):
    return reinforce(log_probs(theta, samples), rewards(samples), BASELINES[baseline](samples), entropy=entropy)

  probabilities = jax.jit(probability_of_all_samples)(theta)
  np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
  estimates = jax.jit(jax.vmap(jax.grad(estimate), in_axes=(None, 0)))(theta, ALL_SAMPLES)
  expectation = jnp.einsum('n,ntij->tij', probabilities, estimates)
  np.testing.assert_allclose(expectation, jax.jit(jax.grad(objective))(theta, entropy), rtol=1e-4, atol=1e-6)


def test_a_baseline_of_rewards_to_go_lowers_the_variance(theta):
  @jax.jit
  def second_moment(scale):
    def estimate(theta, samples):
      baseline = scale * 5 * jnp.arange(T, 0, -1)
      return reinforce(log_probs(theta, samples), rewards(samples) + 5, baseline)

    estimates = jax.vmap(jax.grad(estimate), in_axes=(None, 0))(theta, ALL_SAMPLES)
    return jnp.einsum('n,ntij->', probability_of_all_samples(theta), estimates**2)

  assert second_moment(1.0) < second_moment(0.0) / 5


@pytest.mark.long
def test_rewards_and_baseline_have_no_gradient():
  def estimate(rewards, baseline):
    return reinforce(jnp.array([-1.0, -2.0, -0.5]), rewards, baseline)

  gradients = jax.grad(estimate, argnums=(0, 1))(jnp.ones(T), jnp.zeros(T))
  assert not any(gradient.any() for gradient in gradients)


@jax.jit
def first_weights(scores):
  return latent_monotonic(scores, jnp.ones(scores.shape, bool), state=init_chain(len(scores), jnp.float32))[0]


@pytest.mark.long
@pytest.mark.parametrize('extreme', [-1e20, -1e30, jnp.finfo('float32').min, -jnp.inf, 1e30])
@pytest.mark.parametrize('position', range(T))
def test_weights_of_the_first_query_with_an_extreme_score_equal_the_softmax(extreme, position):
  scores = jnp.insert(jnp.array([1.0, 2.0]), position, extreme)
  weights = first_weights(scores)
  np.testing.assert_allclose(weights, jax.nn.softmax(jnp.maximum(scores, -1e3)), atol=1e-6)


@pytest.mark.long
def test_extreme_scores_keep_their_order():
  scores = jnp.array([-3e38, 9e29, 1e30, -jnp.inf, 3e37])
  for count, largest in ((1, 0), (2, 1), (3, 2), (5, 4)):
    np.testing.assert_allclose(first_weights(scores[:count]), jax.nn.one_hot(largest, count))
