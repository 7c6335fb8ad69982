"""REINFORCE against what it estimates, by enumeration of all draws of a policy that looks at its draws before."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.functional.latent import reinforce

T, S = 3, 3
DRAWS = jnp.array(list(itertools.product(range(S), repeat=T)))
BASELINES = {
  'none': lambda draws: jnp.zeros(T),
  'constant': lambda draws: jnp.array([3.0, -1.0, 0.7]),
  'of the draws before': lambda draws: jnp.cumsum(draws) - draws + 0.5,
}


@pytest.fixture
def theta(rng):
  """Scores [T, S, S] of each draw given the one before."""
  return jax.random.normal(rng, (T, S, S))


def log_probs(theta, draws):
  before = jnp.concatenate([jnp.zeros(1, draws.dtype), draws[:-1]])
  return jax.nn.log_softmax(theta)[jnp.arange(T), before, draws]


def rewards(draws):
  """[T]: each depends on all draws so far."""
  return jnp.sin(jnp.cumsum(draws * jnp.array([1.0, 3.0, 9.0])) + jnp.arange(T))


def objective(theta, entropy):
  """E[Σ_t r_t] + λ H, exactly."""
  logs = jax.vmap(lambda draws: log_probs(theta, draws).sum())(DRAWS)
  return jnp.sum(jnp.exp(logs) * (jax.vmap(rewards)(DRAWS).sum(-1) - entropy * logs))


@pytest.mark.parametrize('baseline', BASELINES)
@pytest.mark.parametrize('entropy', [0.0, 0.3])
def test_the_expected_gradient_is_that_of_reward_and_entropy(theta, entropy, baseline):
  def estimate(theta, draws):
    given = rewards(draws), BASELINES[baseline](draws)
    return reinforce(log_probs(theta, draws), *given, entropy=entropy)

  chances = jnp.exp(jax.vmap(lambda draws: log_probs(theta, draws).sum())(DRAWS))
  np.testing.assert_allclose(chances.sum(), 1, rtol=1e-5)
  estimates = jax.vmap(jax.grad(estimate), in_axes=(None, 0))(theta, DRAWS)
  expected = jnp.einsum('n,ntij->tij', chances, estimates)
  np.testing.assert_allclose(expected, jax.grad(objective)(theta, entropy), rtol=1e-4, atol=1e-6)


def test_a_baseline_of_the_rewards_to_come_lowers_the_variance(theta):
  def variance(scale):
    given = lambda draws: (rewards(draws) + 5, scale * 5 * jnp.arange(T, 0, -1))
    estimate = lambda theta, draws: reinforce(log_probs(theta, draws), *given(draws))
    estimates = jax.vmap(jax.grad(estimate), in_axes=(None, 0))(theta, DRAWS)
    chances = jnp.exp(jax.vmap(lambda draws: log_probs(theta, draws).sum())(DRAWS))
    return jnp.einsum('n,ntij->', chances, estimates**2)

  assert variance(1.0) < variance(0.0) / 5


def test_no_gradient_goes_through_rewards_and_baseline():
  of = lambda *given: reinforce(jnp.array([-1.0, -2.0, -0.5]), *given)
  gradients = jax.grad(of, argnums=(0, 1))(jnp.ones(T), jnp.zeros(T))
  assert not any(g.any() for g in gradients)
