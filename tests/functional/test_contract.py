"""The contract of masks and weights for every score x alignment, with one compiled program per pair.

Weights are float32, and exactly 0 where masked. Masked content changes nothing. An empty memory gives zero weights, a
zero context and zero gradients. The result for an example does not depend on its padding or on other examples.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax import testing
from attention_jax.functional.table import lookup
from attention_jax.testing import FULL, LENGTHS, QUERY_MASK, SHORT, fill_masked
from tests.functional.alignment_cases import ALIGNMENT_CASES, CORE_PAIRS, PAIRS
from tests.functional.cases import VALUE, S, T
from tests.functional.helpers import assert_same, attend, compiled_loss, is_continuous, loss, make_problem
from tests.sampled_cases import sample_cases

IDS = [f'{s}-{a}'.replace(' ', '') for s, a in PAIRS]
# Every sixtieth pair and CORE_PAIRS always run, the other pairs in `make test-all` only.
SAMPLE = {pair for i, pair in enumerate(PAIRS) if i % 60 == 0} | set(CORE_PAIRS)
SWEEP = [pair if pair in SAMPLE else pytest.param(*pair, marks=pytest.mark.product) for pair in PAIRS]
every_pair = pytest.mark.parametrize(('score', 'alignment'), SWEEP, ids=IDS)
# An eighth of the rows; `make test-all` tests all of them.
sampled_rows = pytest.mark.parametrize(('score', 'alignment'), sample_cases(CORE_PAIRS, 8))
DIFFERENT_AT_TEST = [a.name for a in ALIGNMENT_CASES if lookup(a.name, aj.ALIGNMENTS, 'alignment').at_test]


def assert_finite(tree):
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(tree))


@every_pair
def test_every_pair_obeys_the_contract(score, alignment):
  run = compiled_loss(score, alignment)
  problem = make_problem(score, alignment, batch=(len(LENGTHS),))
  attended = testing.check_masks(f'{score}, {alignment}', run, problem)
  assert np.all(attended.weights >= 0)
  assert attended.context.shape == (len(LENGTHS), T, VALUE) and attended.weights.shape == QUERY_MASK.shape
  np.testing.assert_allclose(attended.context, attended.weights @ problem.value, rtol=1e-4, atol=1e-5)
  # Values have a gradient if and only if they have weight; hard monotonic attention may select no position.
  _, gradients = run(problem, QUERY_MASK)
  assert np.any(gradients.value[FULL] != 0) == np.any(attended.weights[FULL] != 0)


@pytest.mark.long
@pytest.mark.parametrize('alignment', DIFFERENT_AT_TEST)
def test_alignments_that_differ_in_training_obey_the_contract(alignment):
  problem = make_problem('general', alignment, batch=(len(LENGTHS),))
  options = {'rng': jax.random.key(3), 'deterministic': False}

  @jax.jit
  def run(problem, mask):
    return jax.value_and_grad(lambda p: loss('general', alignment, p, mask, **options), has_aux=True)(problem)

  attended = testing.check_masks(alignment, run, problem)
  assert np.all(attended.weights >= 0) and np.any(attended.weights[FULL] > 0)
  assert np.all(attended.weights.sum(-1) <= 1 + 1e-6)


@sampled_rows
def test_batching_and_padding_change_nothing(score, alignment):
  problem = make_problem(score, alignment, batch=(len(LENGTHS),))
  testing.check_rows(f'{score}, {alignment}', functools.partial(attend, score, alignment), problem)


@pytest.mark.long
@sampled_rows
def test_broadcast_masks_biases_and_omitted_weights_do_not_change_the_result(score, alignment):
  """A mask may be broadcast or be a bias of -inf, and the context does not depend on whether weights are returned."""
  problem = make_problem(score, alignment, batch=(2,))
  padding = aj.padding_mask(jnp.asarray([S, SHORT]), S)
  bias = jnp.where(padding[:, None], 0.0, -jnp.inf)
  nan_problem = fill_masked(problem, padding, jnp.nan)

  @jax.jit
  def attend_all(problem, nan_problem):
    expected = attend(score, alignment, problem, jnp.broadcast_to(padding[:, None], (2, T, S)))
    return expected, {
      'broadcast': attend(score, alignment, problem, padding[:, None]),
      'bias': attend(score, alignment, nan_problem, bias=bias),
      'without weights': attend(score, alignment, problem, padding[:, None], return_weights=False),
    }

  expected, results = attend_all(problem, nan_problem)
  assert results['without weights'].weights is None
  results['without weights'] = results['without weights']._replace(weights=expected.weights)
  for attended in results.values():
    assert_same(attended, expected, rtol=1e-5, atol=1e-6)


@sampled_rows
def test_bfloat16_weights_are_float32_and_near_those_of_float32_inputs(score, alignment):
  problem = make_problem(score, alignment, batch=(2,), dtype=jnp.bfloat16)
  mask = aj.padding_mask(jnp.asarray([S, 0]), S)[:, None]
  with jax.numpy_dtype_promotion('strict'):
    run = jax.jit(jax.value_and_grad(lambda problem: loss(score, alignment, problem, mask), has_aux=True))
    (_, attended), gradients = run(problem)
  assert attended.weights.dtype == jnp.float32 and attended.context.dtype == jnp.bfloat16
  assert_finite(jax.tree.map(lambda x: x.astype(jnp.float32), (attended, gradients)))
  problem_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), problem)
  expected = jax.jit(lambda problem: attend(score, alignment, problem, mask))(problem_float32)
  if is_continuous(alignment):  # otherwise rounding may change which position is selected
    np.testing.assert_allclose(attended.weights, expected.weights, atol=0.05)


NUMERIC_GRADIENT_PAIRS = [
  ('general', 'softmax'),
  ('coverage', 'entmax15'),
  ('coverage', 'latent_monotonic'),
  ('dot', 'local_p'),
]


@pytest.mark.parametrize(('score', 'alignment'), NUMERIC_GRADIENT_PAIRS)
def test_gradients_equal_numeric_gradients(score, alignment):
  with jax.enable_x64(True):
    problem = make_problem(score, alignment, dtype=jnp.float64)
    mask = jnp.asarray(np.random.default_rng(2).random((T, S)) < 0.7)
    run = jax.jit(lambda problem: attend(score, alignment, problem, mask))
    attended = run(problem)
    assert attended.weights.dtype == attended.context.dtype == jnp.float64
    check_grads(run, (problem,), order=1, modes=('rev',), eps=1e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_gradients_of_16_bits_keep_small_terms_over_many_recurrent_queries():
  problem = make_problem('coverage', 'softmax', dtype=jnp.float32)
  query = jnp.tile(problem.query, (200, 1))

  def gradients(dtype):
    def total(inputs):
      query, key, value, params = inputs
      return aj.attend(query, key, value, score='coverage', params=params).context.astype(jnp.float32).sum()

    inputs = (query, problem.key, problem.value, problem.params)
    return jax.jit(jax.grad(total))(jax.tree.map(lambda x: x.astype(dtype), inputs))

  for gradient, expected in zip(*map(jax.tree.leaves, map(gradients, (jnp.bfloat16, jnp.float32))), strict=True):
    np.testing.assert_allclose(gradient, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize('alignment', aj.ALIGNMENTS)
def test_scores_of_several_queries_raise(alignment):
  """The weights would otherwise sum to 1 over all queries together."""
  for scores_shape, mask_shape in (((2, S), (2, S)), ((S,), (1, S)), ((), ())):
    with pytest.raises(aj.UserError, match=r'scores and mask must be \[S\], those of one query, got \['):
      aj.ALIGNMENTS[alignment].fn(jnp.zeros(scores_shape), jnp.ones(mask_shape, bool))
