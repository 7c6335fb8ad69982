"""Exact latent alignments against the sum over every path, written down one by one."""

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


def numbers(seed, mask):
  random = np.random.default_rng(seed)
  scores = np.where(mask, 2 * random.normal(size=(T, S)), LOG_ZERO)
  return scores, -np.abs(3 * random.normal(size=(T, S)))


def paths(scores, mask, likelihood):
  """{path: its probability together with the output}, over all monotonic paths through unmasked positions."""
  found = {}
  for path in itertools.product(np.flatnonzero(mask), repeat=T):
    probability, before = 1.0, 0
    for t, a in enumerate(path):
      if a < before:
        break
      ahead = [k for k in np.flatnonzero(mask) if k >= before]
      probability *= np.exp(scores[t, a]) / sum(np.exp(scores[t, k]) for k in ahead) * np.exp(likelihood[t, a])
      before = a
    else:
      found[path] = probability
  return found


@pytest.mark.parametrize('mask', MASKS)
def test_the_forward_algorithm_is_the_sum_over_all_paths(mask):
  scores, likelihood = numbers(1, mask)
  every = paths(scores, mask, likelihood)
  with jax.enable_x64(True):
    scores, likelihood = jnp.asarray(scores), jnp.asarray(likelihood)
    np.testing.assert_allclose(latent.chain_log_marginal(scores, likelihood), np.log(sum(every.values())), rtol=1e-12)
    expected = np.zeros((T, S))
    for path, probability in every.items():
      expected[np.arange(T), path] += probability / sum(every.values())
    states = latent.ChainState(jnp.zeros((T, S)), scores)
    found = latent.chain_posterior(jnp.zeros((T, S)), states, likelihood)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    real = jnp.asarray(np.broadcast_to(mask, (T, S)))
    marginal = jax.jit(
      lambda scores, likelihood: latent.chain_log_marginal(jnp.where(real, scores, LOG_ZERO), likelihood)
    )
    check_grads(marginal, (scores, likelihood), order=1, modes=('rev',), eps=1e-6, rtol=1e-6)


@pytest.mark.parametrize('mask', MASKS)
def test_stepping_with_what_was_observed_gives_the_same_marginal(mask):
  scores, likelihood = numbers(2, mask)
  every = paths(scores, mask, likelihood)
  state, total = latent.init_chain(S, jnp.float32), 0.0
  for t in range(T):
    weights, state = aj.alignments.latent_monotonic(jnp.asarray(scores[t]), jnp.asarray(mask), state=state)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-5)
    total += np.log(np.sum(np.asarray(weights, np.float64) * np.exp(likelihood[t])))
    state = latent.observe_chain(state, jnp.asarray(likelihood[t]))
  np.testing.assert_allclose(total, np.log(sum(every.values())), rtol=1e-5)
  last = np.zeros(S)
  for path, probability in every.items():
    last[path[-1]] += probability / sum(every.values())
  np.testing.assert_allclose(np.exp(state.position), last, rtol=1e-4, atol=1e-7)


def test_order_zero_by_enumeration():
  weights = jax.nn.softmax(jnp.asarray(numbers(3, MASKS[0])[0]), axis=-1).at[1, 2].set(0.0)
  log_probs = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(4).normal(size=(T, S, 5))))
  mixture = latent.log_mixture(weights, log_probs)
  np.testing.assert_allclose(jnp.exp(mixture), jnp.einsum('ts,tsv->tv', weights, jnp.exp(log_probs)), rtol=1e-5)
  joint = np.asarray(weights * jnp.exp(log_probs[..., 3]))
  found = latent.posterior(weights, (), log_probs[..., 3])
  np.testing.assert_allclose(found, joint / joint.sum(-1, keepdims=True), rtol=1e-5)
  assert np.all(latent.log_mixture(jnp.zeros((T, S)), log_probs) <= LOG_ZERO)


@pytest.mark.parametrize('scale', [1e4, -1e4])
def test_a_long_chain_of_extreme_scores_stays_finite(scale):
  random = np.random.default_rng(5)
  scores = jnp.asarray(scale * random.normal(size=(50, 2000)), jnp.float32)
  likelihood = jnp.asarray(-1e3 * random.random((50, 2000)), jnp.float32)
  run = jax.value_and_grad(latent.chain_log_marginal, argnums=(0, 1))
  value, gradients = run(scores, likelihood)
  assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in gradients)
  np.testing.assert_allclose(gradients[1].sum(-1), 1.0, rtol=1e-3)
