"""User-defined variants: functions, rows with parameters, options, `at_test`, randomness and private state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.scores import SCORES
from tests.functional.cases import FEATURES, KEY, QUERY, VALUE, S, T, draw

SIZES = {'query': QUERY, 'key': KEY, 'features': FEATURES}
QUERIES, KEYS, VALUES = (jnp.asarray(draw(*shape), jnp.float32) for shape in ((T, QUERY), (S, KEY), (S, VALUE)))
MASK = jnp.arange(S) < 5


def attend(**options) -> aj.Attended:
  return jax.jit(lambda: aj.attend(QUERIES, KEYS, VALUES, MASK, **options))()


def negative_distance(query, key, *, sharpness=2.0):
  """Score: minus the mean squared distance of the first coordinates, times `sharpness`."""
  return -sharpness * jnp.mean((key[:, : query.shape[0]] - query[None]) ** 2, -1)


def uniform(scores, mask):
  """Alignment: equal weights for all unmasked positions."""
  return mask / jnp.maximum(jnp.sum(mask), 1)


def test_functions_are_accepted_instead_of_names():
  attended = attend(score=negative_distance, alignment=uniform)
  np.testing.assert_allclose(attended.weights, np.tile(np.where(MASK, 0.2, 0.0), (T, 1)), rtol=1e-6)
  np.testing.assert_allclose(attended.context, np.tile(VALUES[:5].mean(0), (T, 1)), rtol=1e-4, atol=1e-6)
  params = aj.init_params(jax.random.key(0), score=negative_distance, alignment=uniform, **SIZES)
  assert params == {'score': {}, 'alignment': {}}


def test_a_function_with_parameters_reads_them_from_params_and_has_no_initialiser(rng):
  def bilinear(query, key, *, w):
    return key @ w @ query

  w = jnp.asarray(draw(KEY, QUERY), jnp.float32)
  expected = attend(score='general', params={'score': {'w': w.T}})
  np.testing.assert_allclose(attend(score=bilinear, params={'score': {'w': w}}).weights, expected.weights, rtol=1e-4)
  with pytest.raises(aj.UserError, match=r"no shapes for the parameters \['w'\]"):
    aj.init_params(rng, score=bilinear, **SIZES)


@pytest.mark.long
def test_a_row_with_parameters_and_projections_has_initial_values_of_its_shapes(rng):
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


def test_a_recurrent_function_is_scanned():
  def inhibited(query, key, *, coverage):
    return jnp.arange(S) * -0.01 - 100.0 * coverage

  attended = attend(score=inhibited, alignment='hardmax')
  np.testing.assert_array_equal(attended.weights.argmax(-1), [0, 1, 2])


@pytest.mark.long
@pytest.mark.parametrize(('score', 'name'), [('cosine', 'beta'), ('normed_additive', 'gain')])
def test_a_scalar_parameter_that_a_spec_string_fixes_is_not_learned(rng, score, name):
  params = aj.init_params(rng, score=score, **SIZES)
  other_params = {k: v for k, v in params['score'].items() if k != name}
  fixed = f'{score}({name}=0.6)'
  assert aj.init_params(rng, score=fixed, **SIZES)['score'].keys() == other_params.keys()
  keys = KEYS if 'key' in params else KEYS[:, :QUERY]

  def weights(score, score_params):
    return aj.attend(QUERIES, keys, VALUES, score=score, params=params | {'score': score_params}).weights

  np.testing.assert_array_equal(weights(fixed, other_params), weights(score, other_params | {name: jnp.float32(0.6)}))


@pytest.mark.long
@pytest.mark.parametrize('score', list(aj.SCORES))
def test_initial_parameters_are_float32_and_reproducible(score, rng):
  params, repeated = (aj.init_params(rng, score=score, alignment='entmax', **SIZES) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, params, repeated)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  assert ('query' in params) == ('key' in params) == aj.SCORES[score].project


def noisy(scores, mask, *, rng, scale=1.0):
  """Alignment: softmax of the scores with Gaussian noise."""
  return aj.alignments.softmax(scores + scale * jax.random.normal(rng, scores.shape), mask)


def counting(scores, mask, *, rng, state, unused=1.0):
  """Alignment: selects the position whose number is the state, and increments the state. It ignores rng."""
  return aj.alignments.hardmax(jnp.where(jnp.arange(scores.size) == state, 1e3, scores), mask), state + 1


NOISY = aj.Row(noisy, at_test=aj.alignments.softmax)
COUNTING = aj.Row(counting, at_test=aj.alignments.hardmax, init_state=lambda size, dtype: jnp.zeros((), jnp.int32))


@pytest.mark.long
def test_random_alignments_depend_on_the_rng_alone(rng):
  options = {'score': negative_distance, 'alignment': NOISY, 'deterministic': False}
  weights = jax.jit(lambda rng: attend(rng=rng, **options).weights)
  np.testing.assert_array_equal(weights(rng), weights(rng))
  assert np.any(weights(rng) != weights(jax.random.fold_in(rng, 1)))
  # Every query has its own noise, also with a key of the old style.
  assert len({float(row[0]) for row in weights(jax.random.PRNGKey(3))}) == T
  # So has every example of a batch.
  batch = aj.attend(*(jnp.stack([x, x]) for x in (QUERIES, KEYS, VALUES)), rng=rng, **options)
  assert np.all(batch.weights[0] != batch.weights[1])


@pytest.mark.long
def test_a_test_time_counterpart_may_take_fewer_arguments():
  for row, counterpart in ((NOISY, 'softmax'), (COUNTING, 'hardmax')):
    weights = attend(score=negative_distance, alignment=row).weights
    np.testing.assert_array_equal(weights, attend(score=negative_distance, alignment=counterpart).weights)


def test_private_state_is_passed_from_query_to_query(rng):
  attended = attend(score=negative_distance, alignment=COUNTING, rng=rng, deterministic=False)
  np.testing.assert_array_equal(attended.weights.argmax(-1), [0, 1, 2])


@pytest.mark.long
def test_a_bias_is_added_and_minus_infinity_masks():
  bias = jnp.asarray(draw(T, S), jnp.float32)

  def biased_score(query, key):
    return negative_distance(query, key) + bias[0]

  np.testing.assert_allclose(
    attend(score=negative_distance, bias=bias[:1]).weights, attend(score=biased_score).weights, rtol=1e-5, atol=1e-7
  )
  masking_bias = bias.at[1].set(-jnp.inf)
  masked = attend(score=negative_distance, bias=masking_bias)
  assert np.all(masked.weights[1] == 0) and np.all(np.isfinite(masked.context))
  gradient = jax.grad(lambda bias: attend(score=negative_distance, bias=bias).context.sum())(masking_bias)
  assert np.all(np.isfinite(gradient)) and np.all(gradient[1] == 0) and np.any(gradient[0] != 0)


def test_a_nan_in_the_bias_propagates():
  """NaN is a mistake, which must stay visible; only -inf masks."""
  bias = jnp.zeros((T, S)).at[0, 0].set(jnp.nan)
  assert np.all(np.isnan(attend(score=negative_distance, bias=bias).context[0]))


@pytest.mark.long
def test_hard_returns_the_expectation_with_the_probability_of_its_option():
  scores = jnp.asarray(draw(S), jnp.float32)
  state = jnp.array(-1.5)
  rngs = jax.random.split(jax.random.key(0), 400)
  softmax = aj.alignments.softmax(scores, MASK)

  def hard(rng, rate):
    return aj.alignments.hard(scores, MASK, rng=rng, state=state, expectation_rate=rate)

  @jax.jit
  def run(rngs):
    return [jax.vmap(lambda rng, rate=rate: hard(rng, rate))(rngs) for rate in (0.0, 0.3, 1.0)]

  (samples, sample_states), (weights, states), (always, _) = run(rngs)
  is_expectation = np.asarray(jnp.all(weights == softmax[None], axis=1))
  assert 0.22 < is_expectation.mean() < 0.38
  np.testing.assert_array_equal(weights[~is_expectation], samples[~is_expectation])
  np.testing.assert_array_equal(states, np.where(is_expectation, state, sample_states))
  np.testing.assert_array_equal(always, jnp.broadcast_to(softmax, always.shape))
  with pytest.raises(aj.UserError, match=r'hard: expectation_rate must be at least 0 and at most 1, got 1\.5'):
    hard(rngs[0], 1.5)


def test_hard_once_chooses_at_the_first_step():
  scores = jnp.asarray(draw(S), jnp.float32)
  softmax = aj.alignments.softmax(scores, MASK)

  def three_steps(rng):
    state = aj.ALIGNMENTS['hard_once'].init_state(S, jnp.float32)
    steps = []
    for step, step_rng in enumerate(jax.random.split(rng, 3)):
      weights, state = aj.alignments.hard_once(scores, MASK, rng=step_rng, step=jnp.array(step), state=state)
      steps.append(weights)
    return jnp.stack(steps), state

  weights, state = jax.jit(jax.vmap(three_steps))(jax.random.split(jax.random.key(0), 200))
  is_expectation = np.asarray(jnp.all(weights == softmax[None, None], axis=2))
  assert np.all(is_expectation == is_expectation[:, :1]) and 0.4 < is_expectation.mean() < 0.6
  np.testing.assert_array_equal(state.is_expectation, is_expectation[:, 0])
  logs = np.log(np.asarray(softmax), where=np.asarray(softmax) > 0, out=np.zeros(S))
  np.testing.assert_allclose(state.entropy, np.full(200, -3 * np.sum(np.asarray(softmax) * logs)), rtol=1e-5)
  sampled = np.einsum('nts,s->n', np.asarray(weights), logs)
  np.testing.assert_allclose(state.log_prob, np.where(is_expectation[:, 0], 0, sampled), rtol=1e-5, atol=1e-6)
  with pytest.raises(aj.UserError, match=r'hard_once: expectation_rate must be at least 0 and at most 1, got -1'):
    rng = jax.random.key(0)
    aj.alignments.hard_once(scores, MASK, rng=rng, step=jnp.array(0), state=state, expectation_rate=-1)


@pytest.mark.long
def test_hard_has_a_gradient_through_the_expectation_or_the_state():
  scores = jnp.asarray(draw(S), jnp.float32)

  def gradient(fn):
    """The gradient of a probe of fn(scores), which is [S] or []."""
    return jax.jit(jax.grad(lambda scores: jnp.sum(fn(scores) * VALUES[:, 0])))(scores)

  def hard(scores, rate):
    return aj.alignments.hard(scores, MASK, rng=jax.random.key(0), state=jnp.array(-1.5), expectation_rate=rate)

  softmax_gradient = gradient(lambda scores: aj.alignments.softmax(scores, MASK))
  np.testing.assert_allclose(gradient(lambda scores: hard(scores, 1.0)[0]), softmax_gradient, rtol=1e-5)
  assert not gradient(lambda scores: hard(scores, 0.0)[0]).any()
  assert not gradient(lambda scores: hard(scores, 1.0)[1]).any()
  assert gradient(lambda scores: hard(scores, 0.0)[1]).any()


@pytest.mark.parametrize('name', ['dot', 'scaled_dot', 'cosine', 'normed_dot', 'elu_dot'])
def test_score_and_form_reject_a_query_of_another_width_than_the_keys(name):
  row = SCORES[name]
  for fn in (row.fn, row.form.fn):
    with pytest.raises(aj.UserError, match=r'query \(2,\) and key \(5, 3\) .* must be of the same width'):
      fn(jnp.ones(2), jnp.ones((5, 3)), **{param: jnp.ones(3) for param in row.params})
