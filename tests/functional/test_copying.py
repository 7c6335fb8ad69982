"""Output distributions that copy from the source: literal loops, gradients, extreme inputs and empty weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attention_jax.functional import copying

V = 5
# Words 4, of the vocabulary, and 6, out of vocabulary and first at position 1, occur twice. The last two ids are PAD.
IDS = np.array([4, 6, 2, 6, 4, 0, 0])
S = len(IDS)
END = 2
MASK = np.array([True] * 5 + [False] * 2)
RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=V)
SCORES = RANDOM.normal(size=S)
WEIGHTS = np.where(MASK, np.exp(SCORES), 0) / np.exp(SCORES[MASK]).sum()
GATE = 0.3
LOGITS_32, GATE_32 = jnp.asarray(LOGITS, jnp.float32), jnp.float32(GATE)


def point(weights, ids=IDS):
  return copying.point(weights, jnp.asarray(ids), V, END)


def generate_or_copy(logits, gate, weights, ids=IDS):
  return copying.generate_or_copy(logits, gate, weights, jnp.asarray(ids))


def generate_and_copy(logits, scores, mask=MASK):
  return copying.generate_and_copy(logits, scores, jnp.asarray(mask), jnp.asarray(IDS))


def _softmax(x):
  return np.exp(x) / np.exp(x).sum()


def _point():
  probs = np.zeros(V + S)
  for s, word in enumerate(IDS):
    probs[word] += WEIGHTS[s]
  return probs


def _generate_or_copy():
  probs = (1 - GATE) * _point()
  for y in range(V):
    probs[y] += GATE * _softmax(LOGITS)[y]
  return probs


def _generate_and_copy():
  probs = np.zeros(V + S)
  z = np.exp(LOGITS).sum() + np.exp(SCORES[MASK]).sum()
  for y in range(V):
    probs[y] += np.exp(LOGITS[y]) / z
  for s in np.flatnonzero(MASK):
    probs[IDS[s]] += np.exp(SCORES[s]) / z
  return probs


FORMULAS = {  # name -> the formula, its arguments, the literal loop
  'point': (point, (WEIGHTS,), _point),
  'generate_or_copy': (generate_or_copy, (LOGITS, GATE, WEIGHTS), _generate_or_copy),
  'generate_and_copy': (generate_and_copy, (LOGITS, SCORES), _generate_and_copy),
}


@pytest.mark.parametrize('name', FORMULAS)
def test_equals_the_literal_loop(name):
  formula, arguments, reference = FORMULAS[name]
  log_probs = formula(*(jnp.asarray(x, jnp.float32) for x in arguments))
  assert log_probs.dtype == jnp.float32 and log_probs.shape == (V + S,)
  np.testing.assert_allclose(log_probs, np.log(np.maximum(reference(), copying.MIN_PROBABILITY)), rtol=1e-5)
  np.testing.assert_allclose(np.exp(log_probs).sum(), 1, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('name', FORMULAS)
def test_gradients_of_emittable_words_equal_numeric_gradients(name):
  formula, arguments, _ = FORMULAS[name]
  with jax.enable_x64(True):
    arguments = [jnp.asarray(x, jnp.float64) for x in arguments]
    emittable_log_probs = jax.jit(lambda *arguments: formula(*map(jnp.asarray, arguments))[jnp.asarray([2, 4, 6])])
    check_grads(emittable_log_probs, arguments, 1, modes=['rev'])


@pytest.mark.long
@pytest.mark.parametrize('size', [1e4, -1e4])
def test_extreme_scores_and_exact_zeros_stay_finite(size):
  weights = jnp.zeros(S).at[1].set(1.0)
  logits = LOGITS_32 * size
  for formula, argument in (
    (point, weights),
    (lambda logits: generate_or_copy(logits, jnp.float32(0.5), weights), logits),
    (lambda scores: generate_and_copy(jnp.zeros(V), scores), jnp.full(S, size)),
  ):
    log_probs, jacobian = jax.jit(lambda x, formula=formula: (formula(x), jax.jacobian(formula)(x)))(argument)
    assert np.all(np.isfinite(log_probs)) and np.all(np.isfinite(jacobian))
    assert np.exp(log_probs).sum() == pytest.approx(1, rel=1e-4)


def test_generate_and_copy_without_unmasked_positions_generates():
  log_probs = generate_and_copy(LOGITS_32, jnp.full(S, jnp.nan), np.zeros(S, bool))
  np.testing.assert_allclose(log_probs[:V], jax.nn.log_softmax(LOGITS_32), rtol=1e-5)


def test_weights_are_normalised():
  weights = jnp.asarray(WEIGHTS, jnp.float32)
  for formula in (point, functools.partial(generate_or_copy, LOGITS_32, GATE_32)):
    for scale in (0.1, 3.0):
      np.testing.assert_allclose(formula(scale * weights), formula(weights), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('padding', [0, 9])
def test_zero_weights_point_to_the_end_or_generate(padding):
  ids = np.pad(IDS, (0, padding))
  zeros = jnp.zeros(S + padding)
  pointed = point(zeros, ids)
  assert pointed.argmax() == END and np.exp(pointed).sum() == pytest.approx(1)
  generated = generate_or_copy(LOGITS_32, GATE_32, zeros, ids)
  np.testing.assert_allclose(generated[:V], jax.nn.log_softmax(LOGITS_32), rtol=1e-5)
  assert np.all(np.isfinite(jax.jit(jax.jacobian(generate_or_copy, 2))(LOGITS_32, GATE_32, zeros, ids)))
  assert np.all(np.isfinite(jax.jit(jax.jacobian(point))(zeros, ids)))


@pytest.mark.long
def test_a_gate_near_0_keeps_its_probability_and_its_gradient():
  def log_prob(gate):
    return generate_or_copy(LOGITS, gate, WEIGHTS)[1]  # word 1, which the source does not contain

  gate = jnp.float32(1e-9)
  np.testing.assert_allclose(log_prob(gate), np.log(1e-9 * _softmax(LOGITS)[1]), rtol=1e-5)
  np.testing.assert_allclose(jax.grad(log_prob)(gate), 1e9, rtol=1e-5)
