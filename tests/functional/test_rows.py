"""Every row alone: against its literal loop, in every precision, at every length, and against numeric gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.functional.table import lookup
from tests.functional.alignment_cases import ALIGNMENT_CASES, TEST_TIME_CASES, resize_arguments, sample_noise
from tests.functional.cases import CHANNELS, FEATURES, SCORE_CASES, S, draw, location_sensitive

CASES = [(aj.scores, case) for case in SCORE_CASES] + [
  (aj.alignments, case) for case in ALIGNMENT_CASES + TEST_TIME_CASES
]
every_row = pytest.mark.parametrize(('module', 'case'), CASES, ids=[case.row for _, case in CASES])
every_alignment = pytest.mark.parametrize(
  'case', ALIGNMENT_CASES + TEST_TIME_CASES, ids=[case.row for case in ALIGNMENT_CASES + TEST_TIME_CASES]
)
# Arguments from the carry, which is at least float32 in every precision.
CARRY_ARGUMENTS = ('state', 'previous', 'coverage')
# Piecewise constant functions, whose gradient is that of another function.
STRAIGHT_THROUGH = ('gumbel', 'gumbel_annealed')
# Alignments that do not depend on positions, and give all weight to a score that is far above the others.
POSITION_INDEPENDENT = ('softmax', 'sparsemax', 'entmax15', 'entmax', 'hardmax', 'latent')


def cast(arguments, dtype):
  """Casts floating-point arguments to `dtype`, those from the carry to at least float32."""

  def cast_leaf(x, dtype):
    if not isinstance(x, np.ndarray):
      return x
    return jnp.asarray(x, dtype if x.dtype == np.float64 else x.dtype)

  carry_dtype = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
  result = {}
  for name, value in arguments.items():
    name_dtype = carry_dtype if name in CARRY_ARGUMENTS else dtype
    result[name] = jax.tree.map(lambda x, dtype=name_dtype: cast_leaf(x, dtype), value)
  return result


def call(module, case, arguments):
  """Calls the row's function, compiled as one program; it may return a state beside its result."""
  arrays = {name: x for name, x in arguments.items() if all(isinstance(y, jax.Array) for y in jax.tree.leaves(x))}
  constants = {name: x for name, x in arguments.items() if name not in arrays}
  run = functools.partial(getattr(module, case.row), **constants)
  return jax.jit(run)(**arrays)


def without_state(output):
  """Returns the scores or weights of the output of a row's function."""
  return output[0] if isinstance(output, tuple) else output


def assert_near(actual, expected, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), actual, expected)


def test_every_row_has_a_case():
  assert [case.row for case in SCORE_CASES] == list(aj.SCORES)
  assert list(dict.fromkeys(case.row for case in ALIGNMENT_CASES)) == list(aj.ALIGNMENTS)
  counterparts = {row.at_test.__name__ for row in aj.ALIGNMENTS.values() if row.at_test}
  assert counterparts <= {case.row for case in ALIGNMENT_CASES + TEST_TIME_CASES}


@every_row
def test_equals_the_literal_loop(module, case):
  expected = case.reference(**case.arguments)
  assert_near(call(module, case, cast(case.arguments, jnp.float32)), expected, rtol=2e-5, atol=2e-6)
  with jax.enable_x64(True):
    # Not compiled as one program, in which XLA would not round the float32 noise of some alignments.
    actual = getattr(module, case.row)(**cast(case.arguments, jnp.float64))
    assert without_state(actual).dtype == jnp.float64
    assert_near(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
  ('module', 'case'), [c for c in CASES if c[1].row not in STRAIGHT_THROUGH], ids=lambda x: getattr(x, 'row', '')
)
def test_gradients_equal_numeric_gradients(module, case):
  def is_differentiable(value):
    return all(isinstance(x, jax.Array) and x.dtype == jnp.float64 for x in jax.tree.leaves(value))

  with jax.enable_x64(True):
    arguments = cast(case.arguments, jnp.float64)
    variables = {name: value for name, value in arguments.items() if is_differentiable(value)}
    constants = {name: value for name, value in arguments.items() if name not in variables}
    function = jax.jit(lambda variables: call(module, case, constants | variables))
    check_grads(function, (variables,), order=1, modes=('fwd', 'rev'), eps=1e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize('row', STRAIGHT_THROUGH)
def test_straight_through_gradient_is_that_of_the_softmax(row):
  case = next(c for c in ALIGNMENT_CASES if c.row == row)
  arguments = cast(case.arguments, jnp.float32)
  noise = jnp.asarray(sample_noise(jax.random.gumbel, arguments['rng'], S), jnp.float32)
  cotangent = jnp.linspace(-1.0, 1.0, S)

  def relaxed(scores, temperature):
    return aj.alignments.softmax(scores + noise, arguments['mask'], temperature=temperature) @ cotangent

  def sampled(scores, temperature):
    return call(aj.alignments, case, arguments | {'scores': scores, 'temperature': temperature}) @ cotangent

  point = arguments['scores'], jnp.float32(0.7)
  assert_near(jax.grad(sampled, argnums=(0, 1))(*point), jax.grad(relaxed, argnums=(0, 1))(*point), rtol=1e-6)


def test_an_annealed_temperature_may_end_at_zero(rng):
  scores = jnp.asarray(draw(S), jnp.float32)
  mask = jnp.ones(S, bool)

  def weights(scores):
    return aj.alignments.gumbel_annealed(scores, mask, rng=rng, temperature=jnp.zeros(()))

  assert np.all(np.isfinite(jax.jacobian(weights)(scores)))
  assert weights(scores).sum() == 1


@every_row
@pytest.mark.parametrize(
  'dtype', [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.long)], ids=['bfloat16', 'float16']
)
def test_half_precision_equals_the_literal_loop_in_float32_without_implicit_promotion(module, case, dtype):
  with jax.numpy_dtype_promotion('strict'):
    arguments = cast(case.arguments, dtype)
    actual = call(module, case, arguments)
  assert without_state(actual).dtype == jnp.float32

  def to_float64(x):
    return np.asarray(x, np.float64) if getattr(x, 'dtype', None) in (dtype, jnp.float32) else x

  # The reference takes the rounded inputs, so that only rounding inside of the function counts.
  rounded = {name: jax.tree.map(to_float64, value) for name, value in arguments.items()}
  if 'mask' in arguments:
    rounded['mask'] = case.arguments['mask']
  assert_near(without_state(actual), without_state(case.reference(**rounded)), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['xla', 'flash'])
@pytest.mark.parametrize('score', ['general', 'low_rank'])
def test_products_inside_of_a_score_may_exceed_float16(score, implementation):
  query = jnp.full((1, 64), 30.0, jnp.float16)
  key = jnp.asarray(1e-3 * np.random.default_rng(0).normal(size=(5, 64)), jnp.float16)
  w = jnp.full((64, 64), 50.0, jnp.float16)  # q W = 96000
  params = {'w': w} if score == 'general' else {'u': w, 'v': jnp.eye(64, dtype=jnp.float16)}
  scores = np.float64(query) @ np.float64(w) @ np.float64(key).T
  assert np.all(np.abs(scores) < 1300)
  options = {'score': score, 'params': {'score': params}, 'implementation': implementation}
  weights = jax.jit(lambda: aj.attend(query, key, key, **options).weights)()
  np.testing.assert_allclose(weights, scipy.special.softmax(scores, axis=-1), atol=1e-6)


def test_positions_without_fertility_may_exceed_float16():
  arguments = {'coverage': jnp.ones(2), 'u': jnp.zeros(1, jnp.float16), 'v': jnp.ones(1, jnp.float16)}
  w = jnp.full(1, -100.0, jnp.float16)  # Φ = 1e-6
  query, key = jnp.ones(1, jnp.float16), jnp.ones((2, 1), jnp.float16)
  scores = jax.jit(lambda: aj.scores.fertility(query, key, **arguments, w=w))()
  np.testing.assert_allclose(scores, np.tanh([2.0, 2.0]), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize('size', [1e-20, 1e-3, 1.0, 1e25])
@pytest.mark.parametrize('epsilon', [0.0, 1e-6])
def test_normed_dot_equals_root_mean_square_normalisation_with_an_epsilon(size, epsilon):
  query = size * draw(8, seed=1)
  key = size * draw(5, 8)
  gains = draw(8, seed=2), draw(8, seed=3)

  def normalise(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)

  expected = (gains[0] * normalise(query)) @ (gains[1] * normalise(key)).T / np.sqrt(8)
  query, key, *gains = (jnp.asarray(x, jnp.float32) for x in (query, key, *gains))
  params = dict(zip(('query_gain', 'key_gain'), gains, strict=True))
  row = lookup(f'normed_dot(epsilon={epsilon})', aj.SCORES, 'score')

  @jax.jit
  def run(query, key, params):
    q, k = row.form.fn(query, key, **params)
    return row.fn(query, key, **params), k @ q

  for scores in run(query, key, params):
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


def test_zero_vectors_have_finite_gradients():
  zero = jnp.zeros(3), jnp.zeros((2, 3))
  gains = {'query_gain': jnp.ones(3), 'key_gain': jnp.ones(3)}

  def total(query, key):
    return aj.scores.normed_dot(query, key, **gains, epsilon=1e-6).sum()

  value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(*zero)
  assert value == 0 and not any(np.any(gradient) for gradient in gradients)
  cosine, gradient = jax.value_and_grad(lambda q: aj.scores.cosine(q, jnp.ones((1, 3)), beta=2.0)[0])(zero[0])
  assert cosine == 0 and not np.any(gradient)
  with pytest.raises(aj.UserError, match='normed_dot: epsilon must be at least 0, got -1'):
    aj.scores.normed_dot(*zero, **gains, epsilon=-1.0)


@pytest.mark.long
@every_row
def test_float32_stays_float32_under_x64(module, case):
  with jax.enable_x64(True):
    arguments = cast(case.arguments, jnp.float32)
    assert without_state(jax.eval_shape(lambda: call(module, case, arguments))).dtype == jnp.float32


@functools.cache
def compiled_weights_and_gradient(row):
  """Returns a compiled function (scores, mask) -> (weights, gradient) for the alignment named `row`."""
  case = next(case for case in ALIGNMENT_CASES + TEST_TIME_CASES if case.row == row)
  arguments = cast(case.arguments, jnp.float32)

  @jax.jit
  def run(scores, mask):
    def with_scores(scores):
      return without_state(call(aj.alignments, case, arguments | {'scores': scores, 'mask': mask}))

    weights, pullback = jax.vjp(with_scores, scores)
    return weights, pullback(jnp.linspace(-1.0, 1.0, S))[0]

  return run


def weights_and_gradient(case, arguments):
  """Returns the weights, and the gradient of a weighted sum of them with respect to the scores."""
  return jax.device_get(compiled_weights_and_gradient(case.row)(arguments['scores'], arguments['mask']))


@pytest.mark.long
@every_alignment
@pytest.mark.parametrize('scale', [1e4, -1e4, 0.0], ids=['large', 'negated', 'equal'])
def test_extreme_scores_have_finite_weights_and_gradients(case, scale):
  arguments = cast(case.arguments, jnp.float32)
  arguments['scores'] = arguments['scores'] * scale
  mask = case.arguments['mask']
  weights, gradient = weights_and_gradient(case, arguments)
  assert np.all(np.isfinite(weights)) and np.all(weights >= 0) and np.all(weights <= 1 + 1e-6)
  assert np.all(weights[~mask] == 0)
  assert np.all(np.isfinite(gradient))
  unmasked_scores = np.asarray(arguments['scores'])[mask]
  if case.row in POSITION_INDEPENDENT and scale:
    assert np.max(weights[mask]) == weights[mask][np.argmax(unmasked_scores)] == 1
  elif case.row in POSITION_INDEPENDENT and case.row != 'hardmax':
    np.testing.assert_allclose(weights[mask], 1 / len(unmasked_scores), rtol=1e-6)


@every_alignment
@pytest.mark.parametrize('size', [1, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize('first_unmasked', [0, 1], ids=['unmasked', 'masked'])
def test_alignments_of_any_length_equal_the_literal_loop(case, size, first_unmasked):
  mask = np.arange(size) % 3 >= first_unmasked
  arguments = resize_arguments(case.arguments, size) | {'scores': draw(size), 'mask': mask}
  weights = without_state(call(aj.alignments, case, cast(arguments, jnp.float32)))
  assert np.all(np.isfinite(weights)) and np.all(weights[~mask] == 0)
  if case.row == 'sparsemax':  # its literal loop, which tries every support, is too slow
    expected = np.asarray(aj.alignments.entmax(jnp.asarray(arguments['scores']), jnp.asarray(mask), alpha=2.0))
  elif np.any(mask):
    expected = without_state(case.reference(**arguments))
  else:
    expected = np.zeros(size)
  # The centre of local_p is a float32 as large as S.
  np.testing.assert_allclose(weights, expected, atol=1e-4 if case.row == 'local_p' else 1e-6)


@every_alignment
def test_an_empty_memory_gets_zero_weights_and_zero_gradient(case):
  arguments = cast(case.arguments, jnp.float32) | {'mask': jnp.zeros(S, bool)}
  weights, gradient = weights_and_gradient(case, arguments)
  assert np.all(weights == 0) and np.all(gradient == 0)


@pytest.mark.long
@pytest.mark.parametrize(('size', 'width'), [(2, 31), (7, 4), (1, 1), (31, 2)])
def test_location_sensitive_equals_the_literal_loop_for_any_memory_and_filter_width(size, width):
  arguments = {
    'query': draw(FEATURES),
    'key': draw(size, FEATURES),
    'previous': np.abs(draw(size)),
    'filters': draw(CHANNELS, width),
    'u': draw(CHANNELS, FEATURES) / 9,
    'v': draw(FEATURES, seed=3),
  }
  actual = aj.scores.location_sensitive(**cast(arguments, jnp.float32))
  np.testing.assert_allclose(actual, location_sensitive(**arguments), rtol=1e-4, atol=1e-5)


def test_location_raises_for_a_longer_memory():
  with pytest.raises(aj.UserError, match=r"S=7 positions but w only .*=3 rows; set 'location\(max_positions=7\)'$"):
    aj.scores.location(jnp.ones(5), jnp.ones((7, 11)), w=jnp.ones((3, 5)))


def test_hardmax_selects_the_first_of_equal_scores():
  scores = jnp.asarray([3.0, 1.0, 3.0, 3.0])
  mask = jnp.asarray([False, True, True, True])
  np.testing.assert_array_equal(aj.alignments.hardmax(scores, mask), [0, 0, 1, 0])


@pytest.mark.parametrize(
  ('alignment', 'options', 'message'),
  [
    ('softmax', {'temperature': np.float32(-1)}, 'temperature must be greater than 0, got -1'),
    ('gumbel', {'temperature': 0}, 'gumbel: temperature must be greater than 0, got 0'),
    ('entmax', {'alpha': 1}, r"alpha must be greater than 1, got 1 \('softmax' is the limit at 1\)"),
    ('entmax', {'alpha': 1e39}, r'alpha must be finite in float32, got 1e\+39'),
    ('capped_softmax', {'cap': float('inf')}, 'cap must be greater than 0 and finite, got inf'),
    ('local_m', {'width': -1}, 'local_m: width must be a whole number of at least 0, got -1'),
    ('local_p', {'width': 0}, 'local_p: width must be a whole number of at least 1, got 0'),
    ('windowed', {'width': 1}, 'windowed: width must be a whole number of at least 2, got 1'),
    ('mocha', {'width': 0}, 'mocha: width must be a whole number of at least 1, got 0'),
    ('monotonic', {'noise': -1.0}, 'monotonic: noise must be at least 0, got -1.0'),
    ('coverage_penalised', {'penalty': -2.0}, 'coverage_penalised: penalty must be at least 0, got -2.0'),
    ('entmax', {'alpha': jnp.ones(4)}, 'alpha must be one number, got an array of shape'),
    ('coverage_penalised', {'penalty': jnp.ones(4)}, 'penalty must be one number, got an array of shape'),
  ],
)
def test_invalid_options_raise(alignment, options, message):
  case = next(case for case in ALIGNMENT_CASES if case.row == alignment)
  with pytest.raises(aj.UserError, match=message):
    getattr(aj.alignments, alignment)(**cast(case.arguments, jnp.float32) | options)


SOFTMAX_OPTIONS = {
  'softmax': 'temperature',
  'sink_softmax': 'sink',
  'scalable_softmax': 'scale',
  'capped_softmax': 'cap',
}


@pytest.mark.parametrize(('alignment', 'option'), SOFTMAX_OPTIONS.items())
@pytest.mark.parametrize('implementation', ['xla', 'flash'])
def test_an_option_that_is_a_vector_raises(alignment, option, implementation):
  """It would be one number per position, or in 'flash' per query."""
  fn = functools.partial(getattr(aj.alignments, alignment), **{option: jnp.ones(4)})
  with pytest.raises(aj.UserError, match=rf'^{alignment}: {option} must be one number, got an array of shape \[4\]'):
    aj.attend(*3 * [jnp.ones((4, 3))], alignment=fn, implementation=implementation)


@pytest.mark.long
@pytest.mark.parametrize('name', ['scaled_dot', 'normed_dot'])
def test_a_scale_replaces_the_inverse_root_of_the_width(name):
  query, key = jnp.asarray(draw(8, seed=1), jnp.float32), jnp.asarray(draw(5, 8), jnp.float32)
  params = {'query_gain': query, 'key_gain': 1 + query} if name == 'normed_dot' else {}
  scaled, row = (lookup(spec, aj.SCORES, 'score') for spec in (f'{name}(scale=0.5)', name))
  expected = row.fn(query, key, **params) * 8**0.5 * 0.5
  np.testing.assert_allclose(scaled.fn(query, key, **params), expected, rtol=1e-5, atol=1e-6)
  q, k = scaled.form.fn(query, key, **params)
  np.testing.assert_allclose(k @ q, expected, rtol=1e-4, atol=1e-5)
  with pytest.raises(aj.UserError, match=f'{name}: scale must be one number, got an array of shape'):
    row.fn(query, key, **params, scale=jnp.ones(5))
