"""Users' own variants, rows with parameters, options in spec strings, test-time twins, random and stateful variants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from tests.functional.cases import FEATURES, KEY, QUERY, VALUE, S, T, draw

SIZES = {'query': QUERY, 'key': KEY, 'features': FEATURES}
QUERIES, KEYS, VALUES = (jnp.asarray(draw(*shape), jnp.float32) for shape in ((T, QUERY), (S, KEY), (S, VALUE)))
MASK = jnp.arange(S) < 5


def attend(**options) -> aj.Attended:
  return aj.attend(QUERIES, KEYS, VALUES, MASK, **options)


def nearest(query, key, *, sharpness=2.0):
  """Minus the distance in the first coordinates."""
  return -sharpness * jnp.mean((key[:, : query.shape[0]] - query[None]) ** 2, -1)


def uniform(scores, mask):
  return mask / jnp.maximum(jnp.sum(mask), 1)


def test_plain_functions_in_place_of_names():
  attended = attend(score=nearest, alignment=uniform)
  np.testing.assert_allclose(attended.weights, np.tile(np.where(MASK, 0.2, 0.0), (T, 1)), rtol=1e-6)
  np.testing.assert_allclose(attended.context, np.tile(VALUES[:5].mean(0), (T, 1)), rtol=1e-4, atol=1e-6)
  assert aj.init_params(jax.random.key(0), score=nearest, alignment=uniform, **SIZES) == {'score': {}, 'alignment': {}}


def test_a_plain_function_with_parameters(rng):
  bilinear = lambda query, key, *, w: key @ w @ query
  w = jnp.asarray(draw(KEY, QUERY), jnp.float32)
  expected = attend(score='general', params={'score': {'w': w.T}})
  np.testing.assert_allclose(attend(score=bilinear, params={'score': {'w': w}}).weights, expected.weights, rtol=1e-4)
  with pytest.raises(aj.UserError, match=r"no shapes for the parameters \['w'\]"):
    aj.init_params(rng, score=bilinear, **SIZES)


def test_a_row_with_parameters_and_projections(rng):
  def gated(query, key, *, gate, shift):
    return jnp.sum(jnp.tanh(gate * query)[None] * key, -1) + jnp.sum(shift)

  row = aj.Row(
    gated,
    params={'gate': aj.Param(('features',), 'vector'), 'shift': aj.Param(('depth', 'query+key'), 0.0)},
    sizes={'depth': 2},
    project=True,
  )
  params = aj.init_params(rng, score=row, **SIZES)
  shapes = jax.tree.map(jnp.shape, params)
  assert shapes['score'] == {'gate': (FEATURES,), 'shift': (2, QUERY + KEY)}
  assert shapes['query'] == (QUERY, FEATURES) and shapes['key'] == (KEY, FEATURES)
  attended = attend(score=row, params=params)
  assert np.all(np.isfinite(attended.context)) and np.all(attended.weights[:, 5:] == 0)


def test_a_plain_recurrent_function_is_scanned():
  def inhibited(query, key, *, coverage):
    return jnp.arange(S) * -0.01 - 100.0 * coverage

  attended = attend(score=inhibited, alignment='hardmax')
  np.testing.assert_array_equal(attended.weights.argmax(-1), [0, 1, 2])


def test_options_in_spec_strings():
  cold, warm = attend(score=nearest, alignment='softmax(temperature=0.1)'), attend(score=nearest)
  assert np.all(cold.weights.max(-1) > warm.weights.max(-1))
  np.testing.assert_array_equal(attend(score=nearest, alignment='softmax( temperature = 1 )').weights, warm.weights)
  shapes = jax.tree.map(jnp.shape, aj.init_params(jax.random.key(0), score='low_rank(rank=3)', **SIZES)['score'])
  assert shapes == {'u': (QUERY, 3), 'v': (KEY, 3)}


@pytest.mark.parametrize(('score', 'name'), [('cosine', 'beta'), ('normed_additive', 'gain')])
def test_a_scalar_parameter_fixed_by_a_spec_string_is_learned_no_more(rng, score, name):
  params = aj.init_params(rng, score=score, **SIZES)
  fixed = {k: v for k, v in params['score'].items() if k != name}
  assert aj.init_params(rng, score=f'{score}({name}=0.6)', **SIZES)['score'].keys() == fixed.keys()
  keys = KEYS if 'key' in params else KEYS[:, :QUERY]
  run = lambda score, given: aj.attend(QUERIES, keys, VALUES, score=score, params=params | {'score': given}).weights
  np.testing.assert_array_equal(run(f'{score}({name}=0.6)', fixed), run(score, fixed | {name: jnp.float32(0.6)}))


@pytest.mark.parametrize('score', list(aj.SCORES))
def test_initial_parameters_are_float32_and_reproducible(score, rng):
  first, again = (aj.init_params(rng, score=score, alignment='entmax', **SIZES) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, again)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(first))
  assert ('query' in first) == ('key' in first) == aj.SCORES[score].project


def noisy(scores, mask, *, rng, size=1.0):
  return aj.alignments.softmax(scores + size * jax.random.normal(rng, scores.shape), mask)


def counting(scores, mask, *, rng, state, bonus=1.0):
  """Prefers the position named by its own state, which it moves on; draws nothing, but asks to."""
  return aj.alignments.hardmax(jnp.where(jnp.arange(scores.size) == state, 1e3, scores), mask), state + 1


NOISY = aj.Row(noisy, at_test=aj.alignments.softmax)
COUNTING = aj.Row(counting, at_test=aj.alignments.hardmax, init_state=lambda size, dtype: jnp.zeros((), jnp.int32))


def test_randomness_is_the_rng_and_nothing_else(rng):
  draw = jax.jit(lambda rng: attend(score=nearest, alignment=NOISY, rng=rng, deterministic=False).weights)
  np.testing.assert_array_equal(draw(rng), draw(rng))
  assert np.any(draw(rng) != draw(jax.random.fold_in(rng, 1)))
  assert len({float(row[0]) for row in draw(jax.random.PRNGKey(3))}) == T  # an old-style key, one draw for each query
  batch = aj.attend(
    *(jnp.stack([x, x]) for x in (QUERIES, KEYS, VALUES)), score=nearest, alignment=NOISY, rng=rng, deterministic=False
  )
  assert np.all(batch.weights[0] != batch.weights[1])


def test_a_test_time_twin_may_ask_for_less():
  np.testing.assert_array_equal(attend(score=nearest, alignment=NOISY).weights, attend(score=nearest).weights)
  hard = attend(score=nearest, alignment='hardmax').weights
  np.testing.assert_array_equal(attend(score=nearest, alignment=COUNTING).weights, hard)


def test_private_state_goes_from_query_to_query(rng):
  attended = attend(score=nearest, alignment=COUNTING, rng=rng, deterministic=False)
  np.testing.assert_array_equal(attended.weights.argmax(-1), [0, 1, 2])


def test_a_bias_is_added_and_minus_infinity_masks():
  bias = jnp.asarray(draw(T, S), jnp.float32)
  added = lambda query, key: nearest(query, key) + bias[0]
  np.testing.assert_allclose(
    attend(score=nearest, bias=bias[:1]).weights, attend(score=added).weights, rtol=1e-5, atol=1e-7
  )
  masked = attend(score=nearest, bias=bias.at[1].set(-jnp.inf))
  assert np.all(masked.weights[1] == 0) and np.all(np.isfinite(masked.context))
  slope = jax.grad(lambda bias: attend(score=nearest, bias=bias).context.sum())(bias.at[1].set(-jnp.inf))
  assert np.all(np.isfinite(slope)) and np.all(slope[1] == 0) and np.any(slope[0] != 0)
  assert np.all(np.isnan(attend(score=nearest, bias=bias.at[0, 0].set(jnp.nan)).context[0]))  # no mask, a mistake


def test_hard_attention_looks_everywhere_as_often_as_it_is_told():
  scores, state, rngs = jnp.asarray(draw(S), jnp.float32), jnp.array(-1.5), jax.random.split(jax.random.key(0), 400)
  run = lambda scores, rng, **options: aj.alignments.hard(scores, MASK, rng=rng, state=state, **options)
  several = lambda **options: jax.vmap(lambda rng: run(scores, rng, **options))(rngs)
  soft, (drawn, log_probs) = aj.alignments.softmax(scores, MASK), several()
  weights, states = several(expected=0.3)
  everywhere = np.asarray(jnp.all(weights == soft[None], axis=1))
  assert 0.22 < everywhere.mean() < 0.38
  np.testing.assert_array_equal(weights[~everywhere], drawn[~everywhere])
  np.testing.assert_array_equal(states, np.where(everywhere, state, log_probs))
  always = several(expected=1.0)
  np.testing.assert_array_equal(always[0], jnp.broadcast_to(soft, always[0].shape))
  probed = lambda x: jnp.sum(x * VALUES[:, 0])
  slope = lambda rng, of, **options: jax.grad(lambda scores: probed(run(scores, rng, **options)[of]))(scores)
  exact = jax.grad(lambda scores: probed(aj.alignments.softmax(scores, MASK)))(scores)
  np.testing.assert_allclose(slope(rngs[0], 0, expected=1.0), exact, rtol=1e-5)
  assert not slope(rngs[0], 0).any() and not slope(rngs[0], 1, expected=1.0).any() and slope(rngs[0], 1).any()
  with pytest.raises(aj.UserError, match=r'hard: expected is 1\.5; possible: from 0 to 1'):
    run(scores, rngs[0], expected=1.5)
