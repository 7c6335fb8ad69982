"""Every row by itself: against its literal loop, in every precision, at every length, and against numeric gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from tests.functional.alignment_cases import ALIGNMENT_CASES, TWIN_CASES, resize_arguments, sample_noise
from tests.functional.cases import CHANNELS, FEATURES, SCORE_CASES, S, _location_sensitive, draw

CASES = [(aj.scores, case) for case in SCORE_CASES] + [(aj.alignments, case) for case in ALIGNMENT_CASES + TWIN_CASES]
every_row = pytest.mark.parametrize(('module', 'case'), CASES, ids=[case.row for _, case in CASES])
every_alignment = pytest.mark.parametrize(
  'case', ALIGNMENT_CASES + TWIN_CASES, ids=[case.row for case in ALIGNMENT_CASES + TWIN_CASES]
)
# What the carry of a run holds is float32 at least, whatever the precision of the rest.
CARRIED = ('state', 'previous', 'coverage')
# Piecewise constant on purpose: their gradient is somebody else's.
STRAIGHT_THROUGH = ('gumbel', 'gumbel_annealed')
# What does not look at positions, and gives all weight to one score that is far above the others.
FREE = ('softmax', 'sparsemax', 'entmax15', 'entmax', 'hardmax', 'latent')


def cast(given, dtype):
  """Arrays in the given precision; masks, keys of randomness and options stay as they are."""

  def leaf(x, precision):
    if not isinstance(x, np.ndarray):
      return x
    return jnp.asarray(x, precision if x.dtype == np.float64 else x.dtype)

  precision = lambda k: jnp.float32 if k in CARRIED and jnp.finfo(dtype).bits < 32 else dtype
  return {k: jax.tree.map(lambda x, k=k: leaf(x, precision(k)), v) for k, v in given.items()}


def call(module, case, given):
  """The result, and the state behind it where there is one."""
  return getattr(module, case.row)(**given)


def weights_of(result):
  return result[0] if isinstance(result, tuple) else result


def assert_near(actual, expected, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), actual, expected)


def test_every_row_has_a_case():
  assert [case.row for case in SCORE_CASES] == list(aj.SCORES)
  assert [case.row for case in ALIGNMENT_CASES] == list(aj.ALIGNMENTS)
  twins = {row.at_test.__name__ for row in aj.ALIGNMENTS.values() if row.at_test}
  assert twins <= {case.row for case in ALIGNMENT_CASES + TWIN_CASES}


@every_row
def test_equals_the_paper(module, case):
  expected = case.reference(**case.arguments)
  assert_near(call(module, case, cast(case.arguments, jnp.float32)), expected, rtol=2e-5, atol=2e-6)
  with jax.enable_x64(True):
    actual = call(module, case, cast(case.arguments, jnp.float64))
    assert weights_of(actual).dtype == jnp.float64
    assert_near(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
  ('module', 'case'), [c for c in CASES if c[1].row not in STRAIGHT_THROUGH], ids=lambda x: getattr(x, 'row', '')
)
def test_gradients_equal_numeric_ones(module, case):
  with jax.enable_x64(True):
    given = cast(case.arguments, jnp.float64)
    differentiable = lambda v: all(isinstance(x, jax.Array) and x.dtype == jnp.float64 for x in jax.tree.leaves(v))
    moving = {k: v for k, v in given.items() if differentiable(v)}
    fixed = {k: v for k, v in given.items() if k not in moving}
    function = jax.jit(lambda moving: call(module, case, fixed | moving))
    check_grads(function, (moving,), order=1, modes=('fwd', 'rev'), eps=1e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('row', STRAIGHT_THROUGH)
def test_straight_through_has_the_gradient_of_the_softmax_it_was_drawn_from(row):
  case = next(c for c in ALIGNMENT_CASES if c.row == row)
  given = cast(case.arguments, jnp.float32)
  noise = jnp.asarray(sample_noise(jax.random.gumbel, given['rng'], S), jnp.float32)
  pull = jnp.linspace(-1.0, 1.0, S)

  def relaxed(scores, temperature):
    return aj.alignments.softmax(scores + noise, given['mask'], temperature=temperature) @ pull

  def drawn(scores, temperature):
    return call(aj.alignments, case, given | {'scores': scores, 'temperature': temperature}) @ pull

  at = given['scores'], jnp.float32(0.7)
  assert_near(jax.grad(drawn, argnums=(0, 1))(*at), jax.grad(relaxed, argnums=(0, 1))(*at), rtol=1e-6)


def test_an_annealed_temperature_may_end_at_zero(rng):
  scores, mask = jnp.asarray(draw(S), jnp.float32), jnp.ones(S, bool)
  weights = lambda scores: aj.alignments.gumbel_annealed(scores, mask, rng=rng, temperature=jnp.zeros(()))
  assert np.all(np.isfinite(jax.jacobian(weights)(scores))) and weights(scores).sum() == 1


@every_row
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16], ids=['bfloat16', 'float16'])
def test_half_precision_gives_float32_without_mixing_types(module, case, dtype):
  with jax.numpy_dtype_promotion('strict'):
    given = cast(case.arguments, dtype)
    actual = call(module, case, given)
  assert weights_of(actual).dtype == jnp.float32
  back = lambda x: np.asarray(x, np.float64) if getattr(x, 'dtype', None) in (dtype, jnp.float32) else x
  rounded = {k: jax.tree.map(back, v) for k, v in given.items()}
  mask = {'mask': case.arguments['mask']} if 'mask' in given else {}
  # What half precision costs inside; the rounding of the inputs is not held against the function.
  assert_near(weights_of(actual), weights_of(case.reference(**(rounded | mask))), rtol=0.1, atol=0.15)


@every_row
def test_float32_stays_float32_under_x64(module, case):
  with jax.enable_x64(True):
    assert weights_of(call(module, case, cast(case.arguments, jnp.float32))).dtype == jnp.float32


def weights_and_gradient(case, given):
  """The weights, and the gradient of a sum of them for the scores."""
  weights = lambda scores: weights_of(call(aj.alignments, case, given | {'scores': scores}))
  weights, pullback = jax.vjp(weights, given['scores'])
  return jax.device_get((weights, pullback(jnp.linspace(-1.0, 1.0, S))[0]))


@every_alignment
@pytest.mark.parametrize('scale', [1e4, -1e4, 0.0], ids=['large', 'negated', 'equal'])
def test_extreme_scores(case, scale):
  given = cast(case.arguments, jnp.float32)
  given['scores'] = given['scores'] * scale
  mask = case.arguments['mask']
  weights, gradient = weights_and_gradient(case, given)
  assert np.all(np.isfinite(weights)) and np.all(weights >= 0) and np.all(weights <= 1 + 1e-6)
  assert np.all(weights[~mask] == 0)
  assert np.all(np.isfinite(gradient))
  real = np.asarray(given['scores'])[mask]
  if case.row in FREE and scale:
    assert np.max(weights[mask]) == weights[mask][np.argmax(real)] == 1
  elif case.row in FREE and case.row != 'hardmax':
    np.testing.assert_allclose(weights[mask], 1 / len(real), rtol=1e-6)


@every_alignment
@pytest.mark.parametrize('size', [1, 2000])
@pytest.mark.parametrize('masked', [0, 1], ids=['all', 'some'])
def test_any_length(case, size, masked):
  given = resize_arguments(case.arguments, size)
  given |= {'scores': draw(size), 'mask': np.arange(size) % 3 >= masked}
  weights = weights_of(call(aj.alignments, case, cast(given, jnp.float32)))
  assert np.all(np.isfinite(weights)) and np.all(weights[~given['mask']] == 0)
  expected = np.zeros(size)
  if case.row == 'sparsemax':  # its literal loop tries every support
    expected = np.asarray(aj.alignments.entmax(jnp.asarray(given['scores']), jnp.asarray(given['mask']), alpha=2.0))
  elif np.any(given['mask']):
    expected = weights_of(case.reference(**given))
  # local_p: its centre is a number as large as S, in float32.
  np.testing.assert_allclose(weights, expected, atol=1e-4 if case.row == 'local_p' else 1e-6)


@every_alignment
def test_nothing_to_attend_to_has_no_weights_and_no_gradient(case):
  given = cast(case.arguments, jnp.float32) | {'mask': jnp.zeros(S, bool)}
  weights, gradient = weights_and_gradient(case, given)
  assert np.all(weights == 0) and np.all(gradient == 0)


@pytest.mark.parametrize(('size', 'width'), [(2, 31), (7, 4), (1, 1), (31, 2)])
def test_location_sensitive_has_one_feature_per_position_for_any_filter(size, width):
  given = {
    'query': draw(FEATURES),
    'key': draw(size, FEATURES),
    'previous': np.abs(draw(size)),
    'filters': draw(CHANNELS, width),
    'u': draw(CHANNELS, FEATURES) / 9,
    'v': draw(FEATURES, seed=3),
  }
  actual = aj.scores.location_sensitive(**cast(given, jnp.float32))
  np.testing.assert_allclose(actual, _location_sensitive(**given), rtol=1e-4, atol=1e-5)


def test_location_has_a_longest_memory():
  with pytest.raises(ValueError, match=r"S=7 positions but w only max_positions=3 rows; set 'location\(max_pos"):
    aj.scores.location(jnp.ones(5), jnp.ones((7, 11)), w=jnp.ones((3, 5)))


def test_cosine_of_a_zero_vector_is_zero_with_zero_gradient():
  score, gradient = jax.value_and_grad(lambda q: aj.scores.cosine(q, jnp.ones((1, 5)), beta=2.0)[0])(jnp.zeros(5))
  assert score == 0 and np.all(gradient == 0)


def test_hardmax_takes_the_first_of_equals():
  scores, mask = jnp.asarray([3.0, 1.0, 3.0, 3.0]), jnp.asarray([False, True, True, True])
  np.testing.assert_array_equal(aj.alignments.hardmax(scores, mask), [0, 0, 1, 0])


def test_options_are_checked():
  scores, mask = jnp.ones(3), jnp.ones(3, bool)
  with pytest.raises(aj.UserError, match='temperature must be greater than 0, got 0'):
    aj.alignments.softmax(scores, mask, temperature=0)
  with pytest.raises(aj.UserError, match=r"alpha must be greater than 1, got 1 \('softmax' is the limit at 1\)"):
    aj.alignments.entmax(scores, mask, alpha=1)


@pytest.mark.parametrize(
  ('alignment', 'message'),
  [
    ('local_m(width=-1)', 'local_m: width must be a whole number of at least 0, got -1'),
    ('local_p(width=0)', 'local_p: width must be a whole number of at least 1, got 0'),
    ('windowed(width=1)', 'windowed: width must be a whole number of at least 2, got 1'),
    ('mocha(width=0)', 'mocha: width must be a whole number of at least 1, got 0'),
    ('mocha(width=2.5)', "alignment 'mocha': option width is a whole number like 3, got 2.5"),
    ('gumbel(temperature=0)', 'gumbel: temperature must be greater than 0, got 0'),
    ('monotonic(noise=-1.0)', 'monotonic: noise must be at least 0, got -1.0'),
    ('coverage_penalised(penalty=-2.0)', 'coverage_penalised: penalty must be at least 0, got -2.0'),
  ],
)
def test_options_that_mean_nothing_are_named(alignment, message):
  params = aj.init_params(jax.random.key(0), score='dot', alignment=alignment.split('(')[0], query=3, key=3, features=2)
  given = jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.ones((4, 3))
  options = {'params': params, 'rng': jax.random.key(1), 'deterministic': False}
  with pytest.raises(aj.UserError, match=re.escape(message)):
    aj.attend(*given, score='dot', alignment=alignment, **options)
