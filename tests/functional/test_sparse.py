"""entmax by sorting against entmax by bisection, and the gradient for a learned alpha."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from tests.functional.cases import S, draw

SCORES = draw(2, 11)
MASKS = np.array([[1] * 11, [1, 0] * 5 + [1]], bool)


@pytest.mark.long
@pytest.mark.parametrize(('alignment', 'alpha'), [('entmax15', 1.5), ('sparsemax', 2.0)])
@pytest.mark.parametrize('scale', [0.1, 1.0, 10.0])
def test_sorting_equals_bisection(alignment, alpha, scale):
  by_sorting = aj.ALIGNMENTS[alignment].fn
  by_bisection = functools.partial(aj.alignments.entmax, alpha=alpha)
  with jax.enable_x64(True):
    scores = jnp.asarray(SCORES * scale)
    masks = jnp.asarray(MASKS)
    weights = [jax.jit(jax.vmap(fn))(scores, masks) for fn in (by_sorting, by_bisection)]
    np.testing.assert_allclose(*weights, atol=1e-14)
    jacobians = [jax.jit(jax.vmap(jax.jacobian(fn)))(scores, masks) for fn in (by_sorting, by_bisection)]
    np.testing.assert_allclose(*jacobians, atol=1e-7)


@pytest.mark.long
def test_limits_of_entmax_are_softmax_and_hardmax():
  scores = jnp.asarray(draw(S), jnp.float32)
  mask = jnp.ones(S, bool)
  entmax = aj.alignments.entmax
  np.testing.assert_allclose(entmax(scores, mask, alpha=1.01), aj.alignments.softmax(scores, mask), atol=0.01)
  np.testing.assert_allclose(entmax(5 * scores, mask, alpha=9.0), aj.alignments.hardmax(scores, mask), atol=0.01)


@pytest.mark.long
@pytest.mark.parametrize('alpha', [20.0, 1e30])
def test_gradients_of_a_large_alpha_are_finite_and_equal_the_formula(alpha):
  """The slope of 1000 equal weights is 1000^18 for α = 20, which exceeds float32."""
  size = 1000

  @jax.jit
  def gradient_of(cotangent):
    scores = jnp.zeros(size, cotangent.dtype)
    weights, pullback = jax.vjp(lambda scores: aj.alignments.entmax(scores, jnp.ones(size, bool), alpha=alpha), scores)
    return weights, *pullback(cotangent)

  weights, gradient = gradient_of(jnp.linspace(-1.0, 1.0, size))
  np.testing.assert_allclose(weights, 1 / size, rtol=1e-4)
  assert np.all(np.isfinite(gradient)) and np.all(np.diff(gradient) > 0)
  np.testing.assert_array_equal(gradient_of(jnp.zeros(size))[1], 0.0)
  if alpha == 20:
    with jax.enable_x64(True):
      cotangent = jnp.linspace(-1.0, 1.0, size)
      np.testing.assert_allclose(gradient_of(cotangent)[1], 1000.0**18 * cotangent, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize('alpha', [1.1, 1.5, 2.0, 2.7])
def test_gradients_for_scores_and_alpha_equal_numeric_gradients(alpha):
  with jax.enable_x64(True):
    scores = jnp.asarray(SCORES[0])
    mask = jnp.asarray(MASKS[1])
    weights = jax.jit(lambda scores, alpha: aj.alignments.entmax(scores, mask, alpha=alpha))
    check_grads(weights, (scores, jnp.asarray(alpha)), order=1, eps=1e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_alpha_may_be_learned_or_fixed(rng):
  sizes = {'query': 5, 'key': 5, 'features': 17}
  learned = aj.init_params(rng, score='dot', alignment='entmax', **sizes)
  assert learned['alignment'] == {'alpha': 1.5}
  assert aj.init_params(rng, score='dot', alignment='entmax(alpha=1.5)', **sizes)['alignment'] == {}
  arrays = jnp.asarray(draw(3, 5), jnp.float32), *2 * [jnp.asarray(draw(7, 5), jnp.float32)]
  fixed = aj.attend(*arrays, score='dot', alignment='entmax(alpha=1.5)')
  weights = aj.attend(*arrays, score='dot', alignment='entmax', params=learned).weights
  np.testing.assert_allclose(weights, fixed.weights, atol=1e-6)


@pytest.mark.long
def test_a_learned_alpha_below_its_limit_keeps_its_gradient():
  scores = jnp.asarray(draw(S), jnp.float32)
  mask = jnp.ones(S, bool)

  def sharpness(alpha):
    return jnp.sum(aj.alignments.entmax(scores, mask, alpha=alpha) ** 2)

  value, gradient = jax.value_and_grad(sharpness)(jnp.float32(0.5))
  np.testing.assert_array_equal(value, sharpness(jnp.float32(1.01)))
  assert np.isfinite(gradient) and gradient > 0
