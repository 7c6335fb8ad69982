"""Two algorithms check each other: entmax by sorting and by bisection; and the gradient for a learned alpha."""

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


@pytest.mark.parametrize(('sorted_', 'alpha'), [('entmax15', 1.5), ('sparsemax', 2.0)])
@pytest.mark.parametrize('scale', [0.1, 1.0, 10.0])
def test_sort_equals_bisection(sorted_, alpha, scale):
  with jax.enable_x64(True):
    scores, masks = jnp.asarray(SCORES * scale), jnp.asarray(MASKS)
    by_sort, by_bisection = aj.ALIGNMENTS[sorted_].fn, functools.partial(aj.alignments.entmax, alpha=alpha)
    both = [jax.jit(jax.vmap(f))(scores, masks) for f in (by_sort, by_bisection)]
    np.testing.assert_allclose(*both, atol=1e-14)
    slopes = [jax.jit(jax.vmap(jax.jacobian(f)))(scores, masks) for f in (by_sort, by_bisection)]
    np.testing.assert_allclose(*slopes, atol=1e-7)


def test_entmax_goes_from_softmax_to_argmax():
  scores, mask = jnp.asarray(draw(S), jnp.float32), jnp.ones(S, bool)
  entmax, (softmax, hardmax) = aj.alignments.entmax, (aj.ALIGNMENTS[name].fn for name in ('softmax', 'hardmax'))
  np.testing.assert_allclose(entmax(scores, mask, alpha=1.01), softmax(scores, mask), atol=0.01)
  np.testing.assert_allclose(entmax(5 * scores, mask, alpha=9.0), hardmax(scores, mask), atol=0.01)


@pytest.mark.parametrize('alpha', [1.1, 1.5, 2.0, 2.7])
def test_gradient_for_alpha(alpha):
  with jax.enable_x64(True):
    scores, mask = jnp.asarray(SCORES[0]), jnp.asarray(MASKS[1])
    weights = jax.jit(lambda scores, alpha: aj.alignments.entmax(scores, mask, alpha=alpha))
    check_grads(weights, (scores, jnp.asarray(alpha)), order=1, eps=1e-6, rtol=1e-5, atol=1e-7)


def test_an_alpha_that_is_learned_and_one_that_is_not(rng):
  sizes = {'query': 5, 'key': 5, 'features': 17}
  learned = aj.init_params(rng, score='dot', alignment='entmax', **sizes)
  assert learned['alignment'] == {'alpha': 1.5}
  assert aj.init_params(rng, score='dot', alignment='entmax(alpha=1.3)', **sizes)['alignment'] == {}

  query, memory = jnp.asarray(draw(3, 5), jnp.float32), jnp.asarray(draw(7, 5), jnp.float32)

  @jax.jit
  def attend(alpha):
    params = learned | {'alignment': {'alpha': alpha}}
    return aj.attend(query, memory, memory, score='dot', alignment='entmax', params=params)

  fixed = aj.attend(query, memory, memory, score='dot', alignment='entmax(alpha=1.3)')
  np.testing.assert_allclose(attend(jnp.float32(1.3)).weights, fixed.weights, atol=1e-6)
  entropy = lambda alpha: jnp.sum(attend(alpha).weights ** 2)
  assert jax.grad(entropy)(jnp.float32(1.5)) > 0  # a larger alpha is sharper


def test_an_alpha_below_its_limit_can_come_back():
  entmax = lambda alpha: aj.alignments.entmax(jnp.asarray(draw(S), jnp.float32), jnp.ones(S, bool), alpha=alpha)
  below, gradient = jax.value_and_grad(lambda alpha: jnp.sum(entmax(alpha) ** 2))(jnp.float32(0.5))
  np.testing.assert_array_equal(below, jnp.sum(entmax(jnp.float32(1.01)) ** 2))
  assert np.isfinite(gradient) and gradient > 0
