"""Exact latent alignments against an enumeration of all paths."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.functional import latent
from attention_jax.functional.monotonic import LOG_ZERO

S, T = 4, 3
MASKS = [np.ones(S, bool), np.array([1, 1, 0, 1], bool), np.array([0, 1, 1, 0], bool)]


def draw(seed, mask):
  """Returns random scores and log-likelihoods [T, S]."""
  random = np.random.default_rng(seed)
  scores = np.where(mask, 2 * random.normal(size=(T, S)), LOG_ZERO)
  return scores, -np.abs(3 * random.normal(size=(T, S)))


def enumerate_paths(scores, mask, log_likelihood):
  """Returns {path: its joint probability with the output} for all monotonic paths through unmasked positions."""
  probabilities = {}
  for path in itertools.product(np.flatnonzero(mask), repeat=T):
    if list(path) != sorted(path):
      continue
    probability = 1.0
    previous = 0
    for t, a in enumerate(path):
      reachable = [k for k in np.flatnonzero(mask) if k >= previous]
      transition = np.exp(scores[t, a]) / sum(np.exp(scores[t, k]) for k in reachable)
      probability *= transition * np.exp(log_likelihood[t, a])
      previous = a
    probabilities[path] = probability
  return probabilities


@pytest.mark.long
@pytest.mark.parametrize('mask', MASKS, ids=['unmasked', 'gap', 'masked_ends'])
def test_forward_algorithm_equals_the_sum_over_all_paths(mask):
  scores, log_likelihood = draw(1, mask)
  probabilities = enumerate_paths(scores, mask, log_likelihood)
  total = sum(probabilities.values())
  with jax.enable_x64(True):
    scores = jnp.asarray(scores)
    log_likelihood = jnp.asarray(log_likelihood)
    log_total = jax.jit(latent.chain_log_marginal)(scores, log_likelihood)
    np.testing.assert_allclose(log_total, np.log(total), rtol=1e-12)

    expected_posterior = np.zeros((T, S))
    for path, probability in probabilities.items():
      expected_posterior[np.arange(T), path] += probability / total
    states = latent.ChainState(jnp.zeros((T, S)), scores)
    posterior = jax.jit(latent.chain_posterior)(jnp.zeros((T, S)), states, log_likelihood)
    np.testing.assert_allclose(posterior, expected_posterior, rtol=1e-9, atol=1e-12)

    full_mask = jnp.asarray(np.broadcast_to(mask, (T, S)))

    @jax.jit
    def log_marginal(scores, log_likelihood):
      return latent.chain_log_marginal(jnp.where(full_mask, scores, LOG_ZERO), log_likelihood)

    check_grads(log_marginal, (scores, log_likelihood), order=1, modes=('rev',), eps=1e-6, rtol=1e-6)


@pytest.mark.parametrize('mask', MASKS, ids=['unmasked', 'gap', 'masked_ends'])
def test_stepping_with_observations_gives_the_same_marginal(mask):
  scores, log_likelihood = draw(2, mask)
  probabilities = enumerate_paths(scores, mask, log_likelihood)
  total = sum(probabilities.values())
  state = latent.init_chain(S, jnp.float32)
  log_marginal = 0.0
  align = jax.jit(aj.alignments.latent_monotonic)
  for t in range(T):
    weights, state = align(jnp.asarray(scores[t]), jnp.asarray(mask), state=state)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-5)
    log_marginal += np.log(np.sum(np.asarray(weights, np.float64) * np.exp(log_likelihood[t])))
    state = latent.observe_chain(state, jnp.asarray(log_likelihood[t]))
  np.testing.assert_allclose(log_marginal, np.log(total), rtol=1e-5)
  last_position = np.zeros(S)
  for path, probability in probabilities.items():
    last_position[path[-1]] += probability / total
  np.testing.assert_allclose(np.exp(state.position), last_position, rtol=1e-4, atol=1e-7)


@pytest.mark.long
def test_order_zero_equals_the_sum_over_positions():
  scores, _ = draw(3, MASKS[0])
  weights = jax.nn.softmax(jnp.asarray(scores), axis=-1).at[1, 2].set(0.0)
  log_probs = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(4).normal(size=(T, S, 5))))
  mixture = latent.log_mixture(weights, log_probs)
  np.testing.assert_allclose(jnp.exp(mixture), jnp.einsum('ts,tsv->tv', weights, jnp.exp(log_probs)), rtol=1e-5)
  joint = np.asarray(weights * jnp.exp(log_probs[..., 3]))
  posterior = latent.posterior(weights, (), log_probs[..., 3])
  np.testing.assert_allclose(posterior, joint / joint.sum(-1, keepdims=True), rtol=1e-5)
  assert np.all(latent.log_mixture(jnp.zeros((T, S)), log_probs) <= LOG_ZERO)


@pytest.mark.long
@pytest.mark.parametrize('scale', [1e4, pytest.param(-1e4, marks=pytest.mark.long)])
def test_a_long_chain_of_extreme_scores_stays_finite(scale):
  random = np.random.default_rng(5)
  scores = jnp.asarray(scale * random.normal(size=(50, 300)), jnp.float32)
  log_likelihood = jnp.asarray(-1e3 * random.random((50, 300)), jnp.float32)
  value, gradients = jax.jit(jax.value_and_grad(latent.chain_log_marginal, argnums=(0, 1)))(scores, log_likelihood)
  assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in gradients)
  _, posterior = gradients
  np.testing.assert_allclose(posterior.sum(-1), 1.0, rtol=1e-3)
