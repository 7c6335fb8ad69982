"""Every row by itself: against its literal loop, in every precision, at every length, and against numeric gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from tests.functional.cases import (
  ALIGNMENT_CASES,
  CHANNELS,
  FEATURES,
  SCORE_CASES,
  S,
  _location_sensitive,
  draw,
)

CASES = [(aj.SCORES, case) for case in SCORE_CASES] + [(aj.ALIGNMENTS, case) for case in ALIGNMENT_CASES]
every_row = pytest.mark.parametrize(('table', 'case'), CASES, ids=[case.row for _, case in CASES])
every_alignment = pytest.mark.parametrize('case', ALIGNMENT_CASES, ids=[case.row for case in ALIGNMENT_CASES])


def cast(given, dtype):
  """Arrays in the given precision; masks and options stay as they are."""
  real = lambda x: isinstance(x, np.ndarray) and x.dtype == np.float64
  return {k: jnp.asarray(v, dtype) if real(v) else jnp.asarray(v) if k == 'mask' else v for k, v in given.items()}


def call(table, case, given):
  return table[case.row].fn(**given)


def test_every_row_has_a_case():
  assert [case.row for case in SCORE_CASES] == list(aj.SCORES)
  assert [case.row for case in ALIGNMENT_CASES] == list(aj.ALIGNMENTS)


@every_row
def test_equals_the_paper(table, case):
  expected = case.paper(**case.given)
  np.testing.assert_allclose(call(table, case, cast(case.given, jnp.float32)), expected, rtol=2e-5, atol=2e-6)
  with jax.enable_x64(True):
    actual = call(table, case, cast(case.given, jnp.float64))
    assert actual.dtype == jnp.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)


@every_row
def test_gradients_equal_numeric_ones(table, case):
  with jax.enable_x64(True):
    given = cast(case.given, jnp.float64)
    fixed = {k: v for k, v in given.items() if not (isinstance(v, jax.Array) and v.dtype == jnp.float64)}
    moving = {k: v for k, v in given.items() if k not in fixed}
    function = jax.jit(lambda moving: call(table, case, fixed | moving))
    check_grads(function, (moving,), order=1, modes=('fwd', 'rev'), eps=1e-6, rtol=1e-5, atol=1e-7)


@every_row
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16], ids=['bfloat16', 'float16'])
def test_half_precision_gives_float32_without_mixing_types(table, case, dtype):
  with jax.numpy_dtype_promotion('strict'):
    given = cast(case.given, dtype)
    actual = call(table, case, given)
  assert actual.dtype == jnp.float32
  rounded = {k: np.asarray(v, np.float64) if getattr(v, 'dtype', None) == dtype else v for k, v in given.items()}
  mask = {'mask': case.given['mask']} if 'mask' in given else {}
  # What half precision costs inside; the rounding of the inputs is not held against the function.
  np.testing.assert_allclose(actual, case.paper(**(rounded | mask)), rtol=0.1, atol=0.15)


@every_row
def test_float32_stays_float32_under_x64(table, case):
  with jax.enable_x64(True):
    assert call(table, case, cast(case.given, jnp.float32)).dtype == jnp.float32


def weights_and_gradient(case, given):
  """The weights, and the gradient of a sum of them for the scores."""
  weights = lambda scores: call(aj.ALIGNMENTS, case, given | {'scores': scores})
  weights, pullback = jax.vjp(weights, given['scores'])
  return jax.device_get((weights, pullback(jnp.linspace(-1.0, 1.0, S))[0]))


@every_alignment
@pytest.mark.parametrize('scale', [1e4, -1e4, 0.0], ids=['large', 'negated', 'equal'])
def test_extreme_scores(case, scale):
  given = cast(case.given, jnp.float32)
  given['scores'] = given['scores'] * scale
  mask = case.given['mask']
  weights, gradient = weights_and_gradient(case, given)
  assert np.all(np.isfinite(weights)) and np.all(weights >= 0) and np.all(weights <= 1)
  assert np.all(weights[~mask] == 0)
  assert np.all(np.isfinite(gradient))
  real = np.asarray(given['scores'])[mask]
  if scale == 0 and case.row not in ('hardmax', 'sigmoid'):
    np.testing.assert_allclose(weights[mask], 1 / len(real), rtol=1e-6)
  if scale and case.row != 'sigmoid':
    assert np.max(weights[mask]) == weights[mask][np.argmax(real)] == 1


@every_alignment
@pytest.mark.parametrize('size', [1, 2000])
@pytest.mark.parametrize('masked', [0, 1], ids=['all', 'some'])
def test_any_length(case, size, masked):
  scores, mask = jnp.asarray(draw(size), jnp.float32), jnp.arange(size) % 3 >= masked
  options = {k: float(v) for k, v in case.given.items() if k not in ('scores', 'mask')}
  weights = aj.ALIGNMENTS[case.row].fn(scores, mask, **options)
  assert np.all(np.isfinite(weights)) and np.all(weights[~mask] == 0)
  expected = np.zeros(size)
  if case.row == 'sparsemax':  # its literal loop tries every support
    expected = np.asarray(aj.alignments.entmax(scores, mask, alpha=2.0))
  elif np.any(mask):
    expected = case.paper(np.asarray(scores, np.float64), np.asarray(mask), **options)
  np.testing.assert_allclose(weights, expected, atol=1e-6)


@every_alignment
def test_nothing_to_attend_to_has_no_weights_and_no_gradient(case):
  given = cast(case.given, jnp.float32) | {'mask': jnp.zeros(S, bool)}
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
