"""Additive scores from exponentials: the formula's numbers for any input, its gradients, and no array [T, S, F]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.kernels import tanh_sum

T, S, F = 19, 23, 37
QUICK = {'xla_backend_optimization_level': 0}


def given(spread=1.0, offset=0.0, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape)
  q, k, v, g = draw(T, F) * spread, draw(S, F) * spread, draw(F), draw(T, S)
  return [jnp.asarray(x, dtype) for x in (q - offset, k + offset, v, g)]


def formula(q, k, v, g):
  """Value and gradients, in NumPy and float64."""
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  tanh = np.tanh(q[:, None] + k[None])
  slope = g[..., None] * v * (1 - tanh**2)
  return tanh @ v, slope.sum(1), slope.sum(0), (g[..., None] * tanh).sum((0, 1))


@jax.jit
def ours(q, k, v, g):
  value, back = jax.vjp(lambda *x: tanh_sum.scores(*x, jnp.ones(k.shape[0], bool)), q, k, v)
  return value, *back(g)


# In range; far from zero, where centring has to help; at the edge of the range; beyond it, where tanh itself is used.
@pytest.mark.parametrize(('spread', 'offset'), [(1, 0), (3, 40), (7, 0), (20, 0), (1e4, 0), (1e-4, 0)])
def test_it_is_the_formula_for_any_input(spread, offset):
  problem = given(spread, offset)
  for mine, theirs in zip(ours(*problem), formula(*problem), strict=True):
    # The bound of the module's docstring, over F features and T x S cotangents of size 1; queries count up to 40.
    largest = min(40.0, 4 * spread) + min(30.0, 4 * spread) + (4 * spread if spread > 7 else 0) + 2 * offset
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=(2 + largest) * 2.0**-23 * np.sqrt(F) * 20)


@pytest.mark.parametrize('size', [1e-30, 1e15, 1e30])
def test_large_and_small_weights_and_cotangents(size):
  """Several denominators, of up to 1e9 each, stand under one division."""
  q, k, v, g = given(7)
  wanted = formula(q, k, v, g)
  for part, found in enumerate((ours(q, k, v * size, g), ours(q, k, v, g * size))):
    scales = (size, size, size, 1.0) if part == 0 else (1.0, size, size, size)
    for mine, theirs, scale in zip(found, wanted, scales, strict=True):
      np.testing.assert_allclose(mine / scale, theirs, rtol=1e-4, atol=1e-2)


def test_both_paths_are_taken(monkeypatch):
  for name in ('FACTORED', 'PLAIN'):
    with monkeypatch.context() as patch:
      nothing = lambda x, y, w: (w * x * 0, jnp.ones_like(x * y))
      patch.setattr(tanh_sum, name, tanh_sum.Terms(nothing, nothing))
      for spread, taken in ((1.0, 'FACTORED'), (20.0, 'PLAIN')):
        q, k, v, _ = given(spread)
        scores = jax.jit(lambda q, k, v: tanh_sum.scores(q, k, v, jnp.ones(S, bool)))(q, k, v)
        assert np.allclose(scores, jnp.sum(v), atol=1e-4) == (taken == name)


def test_gradients_in_float64():
  with jax.enable_x64(True):
    q, k, v, _ = given(dtype=jnp.float64)
    fn = jax.jit(lambda *x: tanh_sum.scores(*x, jnp.ones(S, bool)))
    check_grads(fn, (q, k, v), order=1, modes=['rev'])
    np.testing.assert_allclose(fn(q, k, v), formula(q, k, v, 0)[0], rtol=1e-12, atol=1e-12)


def test_what_is_masked_has_no_influence():
  q, k, v, _ = given()
  seen = jnp.arange(S) < 11
  fn = jax.jit(tanh_sum.scores)
  for behind in (1e30, jnp.nan, -jnp.inf):
    scores = fn(q, jnp.where(seen[:, None], k, behind), v, seen)
    np.testing.assert_array_equal(scores[:, :11], fn(q, jnp.where(seen[:, None], k, 0.0), v, seen)[:, :11])
  assert np.isfinite(fn(q, k, v, jnp.zeros(S, bool))).all()


def test_a_batch_is_its_members_and_one_wide_member_harms_no_other():
  problems = [given(spread)[:3] for spread in (1.0, 20.0, 3.0)]
  stacked = [jnp.stack(x) for x in zip(*problems, strict=True)]
  run = lambda q, k, v: tanh_sum.scores(q, k, v, jnp.ones(S, bool))
  together = jax.jit(jax.vmap(jax.vmap(run, in_axes=(0, None, None)), in_axes=(0, 0, 0)))(
    stacked[0][:, None], *stacked[1:]
  )
  for i, problem in enumerate(problems):
    np.testing.assert_allclose(together[i, 0], run(*problem), rtol=1e-4, atol=2e-4)


def test_neither_all_entries_nor_all_scores_are_in_memory():
  size = 8192
  row = jax.ShapeDtypeStruct((1, size, 64), jnp.float32)
  params = jax.eval_shape(lambda: aj.init_params(jax.random.key(0), score='additive', query=64, key=64, features=64))

  def loss(params, query, key, value):
    options = {'score': 'additive', 'params': params, 'return_weights': False}
    return aj.attend(query, key, value, **options, implementation='factored').context.sum()

  lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(params, row, row, row)
  # The scores alone, [T, S] in float32, are 256 MiB; [T, S, F] is 16 GiB.
  assert lowered.compile(QUICK).memory_analysis().temp_size_in_bytes < 2**26
