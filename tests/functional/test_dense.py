"""Weights, cosines and gradients are finite for scores and vectors of any size.

`measure_weights` runs in a separate process, because tests/conftest.py compiles without optimisation. With
optimisation, XLA merges multiplications and subtractions, which can make a large score differ from its own maximum.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.dense import hardmax, log_softmax, softmax, softpick, subtract_max
from attention_jax.functional.scores import cosine

SCALES = (1.0, 1e8, 1e16, 1e20, 1e30)
# Alignments whose weights need not sum to 1: sigmoids, rectified ones, a sink, a Gaussian factor, walks that run off
# the end.
NOT_NORMALISED = ('sigmoid', 'sigmoid_by_length', 'softpick', 'proportional', 'sink_softmax', 'stick_breaking')
NOT_NORMALISED += ('local_p', 'monotonic', 'mocha')


def measure_weights(name):
  """Returns for each scale the smallest and the largest sum of weights, and whether all gradients are finite."""
  rng = np.random.default_rng(0)
  query = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
  memory = jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)
  params = aj.init_params(jax.random.key(0), score='scaled_dot', alignment=name, query=8, key=8, features=8)

  def loss(query, memory, params, scale):
    options = {'score': 'scaled_dot', 'alignment': name, 'params': params, 'rng': jax.random.key(1)}
    attended = aj.attend(query * scale, memory, memory, deterministic=False, **options)
    return jnp.sum(jnp.sin(attended.context)) + jnp.sum(jnp.cos(attended.weights)), attended.weights

  run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
  measured = []
  for scale in SCALES:
    (_, weights), gradients = run(query, memory, params, scale)
    sums = weights.sum(-1)
    is_finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradients))
    measured.append((float(sums.min()), float(sums.max()), is_finite))
  return measured


@pytest.mark.long
def test_weights_and_gradients_are_finite_at_every_scale():
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  command = [sys.executable, '-m', 'tests.functional.test_dense']
  root = Path(__file__).parents[2]
  output = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
  measured = json.loads(output)
  assert measured.keys() == aj.ALIGNMENTS.keys()
  for name, scales in measured.items():
    for least, most, gradients_are_finite in scales:
      assert np.isfinite([least, most]).all() and gradients_are_finite, name
      if name not in NOT_NORMALISED:
        np.testing.assert_allclose([least, most], 1, rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e20, 1e30])
def test_cosine_equals_the_formula_for_vectors_of_any_norm(scale):
  rng = np.random.default_rng(0)
  query = rng.normal(size=8)
  key = rng.normal(size=(3, 8))
  expected = key @ query / (np.linalg.norm(query) * np.linalg.norm(key, axis=-1))

  def total(query, key, scale):
    return jnp.sum(jnp.sin(cosine(query * scale, key * scale, beta=1.0)))

  query = jnp.asarray(query, jnp.float32)
  key = jnp.asarray(key, jnp.float32)
  cosines = jax.jit(lambda scale: cosine(query * scale, key * scale, beta=1.0))(scale)
  np.testing.assert_allclose(cosines, expected, rtol=1e-5)
  # The scale cancels, so that the gradients with respect to the unscaled vectors do not depend on it either.
  gradients = jax.jit(jax.grad(total, (0, 1)))
  for gradient, expected in zip(gradients(query, key, scale), gradients(query, key, 1.0), strict=True):
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_infinite_scores_count_as_the_nearest_finite_ones():
  scores = jnp.asarray([jnp.inf, 1.0, -jnp.inf])
  mask = jnp.ones(3, bool)
  np.testing.assert_array_equal(softmax(scores, mask), [1, 0, 0])
  assert jnp.isfinite(jax.grad(lambda scores: softmax(scores, mask)[1])(scores)).all()
  assert subtract_max(scores, mask)[0] == 0
  without_first = mask.at[0].set(False)
  np.testing.assert_array_equal(hardmax(jnp.full(3, -jnp.inf), without_first), [0, 1, 0])
  np.testing.assert_array_equal(hardmax(scores, ~without_first), [1, 0, 0])
  assert jnp.isnan(log_softmax(scores.at[0].set(jnp.nan), mask)).all()


@pytest.mark.parametrize('scale', [1.0, 1e-8, 1e-30])
def test_softpick_of_small_scores_has_the_gradient_of_the_formula(scale):
  weights, vjp = jax.vjp(lambda scores: softpick(scores, jnp.ones(3, bool)), scale * jnp.asarray([1.0, 2.0, -1.0]))
  scores = scale * np.asarray([1.0, 2.0, -1.0])
  terms = np.expm1(scores)
  total = np.abs(terms).sum()
  np.testing.assert_allclose(weights, np.maximum(terms, 0) / total, rtol=1e-6)
  # d w_0 / d e: of the term of position 0 in the numerator, and of all terms in the sum.
  expected = np.exp(scores) * ([1 / total, 0, 0] - terms[0] * np.sign(terms) / total**2)
  np.testing.assert_allclose(vjp(jnp.asarray([1.0, 0.0, 0.0]))[0], expected, rtol=1e-5)


if __name__ == '__main__':
  print(json.dumps({name: measure_weights(name) for name in aj.ALIGNMENTS}))
