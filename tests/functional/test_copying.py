"""Mixtures of saying and copying: against literal loops, and laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attention_jax.functional import copying

V = 5
IDS = np.array([4, 6, 2, 6, 4, 0, 0])  # two unknown words at 1 and 3 are the same; two known ones are; two are padding
S = len(IDS)
MASK = np.array([True] * 5 + [False] * 2)
RANDOM = np.random.default_rng(0)
LOGITS, SCORES = RANDOM.normal(size=V), RANDOM.normal(size=S)
WEIGHTS = np.where(MASK, np.exp(SCORES), 0) / np.exp(SCORES[MASK]).sum()
GATE = 0.3


def _softmax(x):
  return np.exp(x) / np.exp(x).sum()


def _point():
  probs = np.zeros(V + S)
  for s, id in enumerate(IDS):
    probs[id] += WEIGHTS[s]
  return probs


def _generate_or_copy():
  probs = (1 - GATE) * _point()
  for y in range(V):
    probs[y] += GATE * _softmax(LOGITS)[y]
  return probs


def _generate_and_copy():
  probs, z = np.zeros(V + S), np.exp(LOGITS).sum() + np.exp(SCORES[MASK]).sum()
  for y in range(V):
    probs[y] += np.exp(LOGITS[y]) / z
  for s in np.flatnonzero(MASK):
    probs[IDS[s]] += np.exp(SCORES[s]) / z
  return probs


FORMULAS = {
  'point': (lambda weights: copying.point(weights, jnp.asarray(IDS), V, 2), (WEIGHTS,), _point),
  'generate_or_copy': (
    lambda logits, gate, weights: copying.generate_or_copy(logits, gate, weights, jnp.asarray(IDS)),
    (LOGITS, GATE, WEIGHTS),
    _generate_or_copy,
  ),
  'generate_and_copy': (
    lambda logits, scores: copying.generate_and_copy(logits, scores, jnp.asarray(MASK), jnp.asarray(IDS)),
    (LOGITS, SCORES),
    _generate_and_copy,
  ),
}


@pytest.mark.parametrize('name', FORMULAS)
def test_formulas_are_those_of_a_loop(name):
  formula, given, literal = FORMULAS[name]
  found = formula(*(jnp.asarray(x, jnp.float32) for x in given))
  assert found.dtype == jnp.float32 and found.shape == (V + S,)
  np.testing.assert_allclose(found, np.log(np.maximum(literal(), copying.MIN_PROBABILITY)), rtol=1e-5)
  np.testing.assert_allclose(np.exp(found).sum(), 1, rtol=1e-5)


@pytest.mark.parametrize('name', FORMULAS)
def test_gradients_of_what_can_be_said(name):
  formula, given, _ = FORMULAS[name]
  # Weights that stay real ones: an alignment makes them.
  with jax.enable_x64(True):
    given = [jnp.asarray(x, jnp.float64) for x in given]
    said = lambda *given: formula(*map(jnp.asarray, given))[jnp.asarray([2, 4, 6])]
    check_grads(said, given, 1, modes=['rev'])


@pytest.mark.parametrize('size', [1e4, -1e4])
def test_extreme_scores_and_exact_zeros_stay_finite(size):
  ids = jnp.asarray(IDS)
  weights = jnp.zeros(S).at[1].set(1.0)
  for fn, given in (
    (lambda w: copying.point(w, ids, V, 2), weights),
    (lambda l: copying.generate_or_copy(l, jnp.float32(0.5), weights, ids), jnp.asarray(LOGITS, jnp.float32) * size),
    (lambda s: copying.generate_and_copy(jnp.zeros(V), s, jnp.asarray(MASK), ids), jnp.full(S, size)),
  ):
    value, gradient = fn(given), jax.jacobian(fn)(given)
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(gradient))
    assert np.exp(value).sum() == pytest.approx(1, rel=1e-4)


def test_a_source_that_is_hidden_leaves_the_vocabulary():
  logits = jnp.asarray(LOGITS, jnp.float32)
  found = copying.generate_and_copy(logits, jnp.full(S, jnp.nan), jnp.zeros(S, bool), jnp.asarray(IDS))
  np.testing.assert_allclose(found[:V], jax.nn.log_softmax(logits), rtol=1e-5)


def test_weights_that_do_not_sum_to_one_are_shared_out():
  ids, weights = jnp.asarray(IDS), jnp.asarray(WEIGHTS, jnp.float32)
  logits, gate = jnp.asarray(LOGITS, jnp.float32), jnp.float32(GATE)
  for scale in (0.1, 3.0):
    np.testing.assert_allclose(copying.point(scale * weights, ids, V, 2), copying.point(weights, ids, V, 2), rtol=1e-5)
    found = copying.generate_or_copy(logits, gate, scale * weights, ids)
    np.testing.assert_allclose(found, copying.generate_or_copy(logits, gate, weights, ids), rtol=1e-5)


@pytest.mark.parametrize('padding', [0, 9])
def test_who_looks_nowhere_ends_or_generates(padding):
  ids, nothing = jnp.pad(jnp.asarray(IDS), (0, padding)), jnp.zeros(S + padding)
  logits = jnp.asarray(LOGITS, jnp.float32)
  found = copying.point(nothing, ids, V, 2)
  assert found.argmax() == 2 and np.exp(found).sum() == pytest.approx(1)
  said = copying.generate_or_copy(logits, jnp.float32(GATE), nothing, ids)
  np.testing.assert_allclose(said[:V], jax.nn.log_softmax(logits), rtol=1e-5)
  for fn in (copying.generate_or_copy, lambda logits, gate, w, ids: copying.point(w, ids, V, 2)):
    assert np.all(np.isfinite(jax.jacobian(fn, 2)(logits, jnp.float32(GATE), nothing, ids)))
