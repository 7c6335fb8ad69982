"""Sums of tanh from exponentials: equal to the formula for any input, in value and gradient, without [T, S, F]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.kernels import tanh_sum

T, S, F = 19, 23, 37
FAST_COMPILE = {'xla_backend_optimization_level': 0}


def make_problem(spread=1.0, offset=0.0, dtype=jnp.float32):
  """q [T, F], k [S, F], v [F] and a cotangent g [T, S]."""
  rng = np.random.default_rng(0)
  q = rng.normal(size=(T, F)) * spread
  k = rng.normal(size=(S, F)) * spread
  v = rng.normal(size=F)
  g = rng.normal(size=(T, S))
  return [jnp.asarray(x, dtype) for x in (q - offset, k + offset, v, g)]


def reference(q, k, v, g):
  """Value and gradients by the formula, in NumPy and float64."""
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  tanh = np.tanh(q[:, None] + k[None])
  slope = g[..., None] * v * (1 - tanh**2)
  return tanh @ v, slope.sum(1), slope.sum(0), (g[..., None] * tanh).sum((0, 1))


def scores(q, k, v):
  return tanh_sum.scores(q, k, v, jnp.ones(k.shape[0], bool))


@jax.jit
def value_and_gradients(q, k, v, g):
  value, vjp = jax.vjp(scores, q, k, v)
  return value, *vjp(g)


# In range; far from zero, which requires centring; at the edge of the range, where a feature of the keys spans nearly
# 60; two cases beyond the range, where tanh itself is used; near zero.
@pytest.mark.long
@pytest.mark.parametrize(('spread', 'offset'), [(1, 0), (3, 40), (11.5, 0), (20, 0), (1e4, 0), (1e-4, 0)])
def test_equals_formula_for_any_input(spread, offset):
  problem = make_problem(spread, offset)
  # The bound of the module's docstring, with |q'| of at most 40 and |k'| of at most 30. The errors of F features and of
  # T x S cotangents of size 1 add up like random numbers; 20 is about the root of T S.
  largest = min(40.0, 4 * spread) + min(30.0, 4 * spread)
  tolerance = (2 + largest) * 2.0**-23 * np.sqrt(F) * 20
  for actual, expected in zip(value_and_gradients(*problem), reference(*problem), strict=True):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize('size', [1e-30, 1e15, 1e30])
def test_large_and_small_weights_and_cotangents_scale_the_results(size):
  """A division has several denominators, of up to 1e9 each."""
  q, k, v, g = make_problem(7)
  expected = reference(q, k, v, g)
  scaled_weights = value_and_gradients(q, k, v * size, g), (size, size, size, 1.0)
  scaled_cotangents = value_and_gradients(q, k, v, g * size), (1.0, size, size, size)
  for results, scales in (scaled_weights, scaled_cotangents):
    for result, scale, expected_result in zip(results, scales, expected, strict=True):
      np.testing.assert_allclose(result / scale, expected_result, rtol=1e-4, atol=1e-3)


# With numbers of features that no other test has: programs with a replaced branch are those of this test.
@pytest.mark.long
@pytest.mark.parametrize(('name', 'features'), [('FACTORED', 31), ('PLAIN', 29)])
def test_both_branches_are_used(monkeypatch, name, features):
  def zero(x, y, w):
    return w * x * 0, jnp.ones_like(x * y)

  monkeypatch.setattr(tanh_sum, name, tanh_sum.Terms(zero, zero))
  for spread, used in ((1.0, 'FACTORED'), (20.0, 'PLAIN')):
    q, k, v = (x[..., :features] for x in make_problem(spread)[:3])
    result = jax.jit(lambda q, k, v: scores(q, k, v))(q, k, v)
    assert np.allclose(result, jnp.sum(v), atol=1e-4) == (used == name)


@pytest.mark.long
def test_gradients_in_float64_equal_numeric_gradients():
  with jax.enable_x64(True):
    q, k, v, _ = make_problem(dtype=jnp.float64)
    fn = jax.jit(scores)
    check_grads(fn, (q, k, v), order=1, modes=['rev'])
    np.testing.assert_allclose(fn(q, k, v), reference(q, k, v, 0)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_masked_keys_have_no_influence():
  q, k, v, _ = make_problem()
  mask = jnp.arange(S) < 11
  fn = jax.jit(tanh_sum.scores)
  expected = fn(q, jnp.where(mask[:, None], k, 0.0), v, mask)[:, :11]
  for filler in (1e30, jnp.nan, -jnp.inf):
    result = fn(q, jnp.where(mask[:, None], k, filler), v, mask)
    np.testing.assert_array_equal(result[:, :11], expected)
  assert np.isfinite(fn(q, k, v, jnp.zeros(S, bool))).all()


@pytest.mark.long
def test_batch_equals_its_members_with_one_out_of_range():
  problems = [make_problem(spread) for spread in (1.0, 20.0, 3.0)]
  q, k, v, _ = (jnp.stack(x) for x in zip(*problems, strict=True))
  mapped = jax.vmap(jax.vmap(scores, in_axes=(0, None, None)), in_axes=(0, 0, 0))
  batched = jax.jit(mapped)(q[:, None], k, v)
  for i, problem in enumerate(problems):
    np.testing.assert_allclose(batched[i, 0], value_and_gradients(*problem)[0], rtol=1e-4, atol=2e-4)


@pytest.mark.long
def test_neither_scores_nor_their_terms_are_stored():
  size = 8192
  features = 64
  row = jax.ShapeDtypeStruct((1, size, features), jnp.float32)
  sizes = {'query': features, 'key': features, 'features': features}
  params = jax.eval_shape(lambda: aj.init_params(jax.random.key(0), score='additive', **sizes))

  def loss(params, query, key, value):
    options = {'score': 'additive', 'params': params, 'return_weights': False}
    return aj.attend(query, key, value, **options, implementation='factored').context.sum()

  lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(params, row, row, row)
  # The scores [T, S] in float32 are 256 MiB; [T, S, F] is 16 GiB.
  assert lowered.compile(FAST_COMPILE).memory_analysis().temp_size_in_bytes < 2**26
