"""The mask and weights contract (law 6) over every score x alignment, on one compiled program per pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.functional.table import lookup
from tests.functional.alignment_cases import ALIGNMENT_CASES, CORE_PAIRS, PAIRS
from tests.functional.cases import VALUE, S, T
from tests.functional.helpers import Problem, assert_same, attend, compiled_loss, is_continuous, loss, make_problem

SHORT = 5
# One example without padding, one that is all padding, one short, one shorter still.
LENGTHS = jnp.asarray([S, 0, SHORT, 2])
FULL, EMPTY = 0, 1

IDS = [f'{s}-{a}'.replace(' ', '') for s, a in PAIRS]
# Every tenth pair, and the spine, always; the others with the long sweep.
OFTEN = {pair for i, pair in enumerate(PAIRS) if i % 10 == 0} | set(CORE_PAIRS)
SWEPT = [pair if pair in OFTEN else pytest.param(*pair, marks=pytest.mark.product) for pair in PAIRS]
every_pair = pytest.mark.parametrize(('score', 'alignment'), SWEPT, ids=IDS)
every_row = pytest.mark.parametrize(
  ('score', 'alignment'), CORE_PAIRS, ids=[f'{s}-{a}'.replace(' ', '') for s, a in CORE_PAIRS]
)


def behind(mask, given, filler):
  """The problem with `filler` in keys and values wherever the mask [B, S] is False."""
  fill = lambda x: np.where(mask[..., None], x, np.asarray(filler, x.dtype))
  return given._replace(key=fill(given.key), value=fill(given.value))


@every_pair
def test_contract(score, alignment):
  run, given = compiled_loss(score, alignment), make_problem(score, alignment, batch=(len(LENGTHS),))
  padding = np.arange(S) < np.asarray(LENGTHS)[:, None]
  mask = np.broadcast_to(padding[:, None], (len(LENGTHS), T, S))
  result = jax.device_get(run(given, mask))  # plain NumPy from here: looking at it compiles nothing
  (_, attended), gradients = result

  assert attended.context.shape == (len(LENGTHS), T, VALUE) and attended.weights.shape == mask.shape
  assert attended.weights.dtype == jnp.float32
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
  assert np.all(attended.weights >= 0) and np.all(attended.weights[~mask] == 0)
  np.testing.assert_allclose(attended.context, attended.weights @ given.value, rtol=1e-4, atol=1e-5)

  # Nothing to attend to: zero weights, zero context, zero gradients.
  assert np.all(attended.weights[EMPTY] == 0) and np.all(attended.context[EMPTY] == 0)
  assert np.all(gradients.query[EMPTY] == 0)
  assert np.all(gradients.key[~padding] == 0) and np.all(gradients.value[~padding] == 0)
  # A hard walk may stop nowhere; whatever was attended to has a gradient.
  assert np.any(gradients.value[FULL] != 0) == np.any(attended.weights[FULL] != 0)

  # What is behind the mask changes nothing, bit for bit.
  for filler in (jnp.nan, jnp.inf, -jnp.inf, 1e30):
    assert_same(run(behind(padding, given, filler), mask), result)

  # No leak between examples: new neighbours, other places and other masks leave an example as it is.
  turn = lambda x: np.asarray(x)[::-1]
  turned = run(Problem(given.params, *map(turn, given[1:])), turn(mask))
  assert_same(jax.tree.map(turn, turned[0][1]), attended, rtol=1e-5, atol=1e-6)

  # All queries masked in their own way: each gets exact zeros, and an empty one among them nothing.
  own = np.random.default_rng(1).random(mask.shape) < 0.6
  own[:, 1] = False
  (_, attended), gradients = jax.device_get(run(given, own))
  assert np.all(attended.weights[~own] == 0) and np.all(attended.context[:, 1] == 0)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradients))
  assert np.all(gradients.key[~own.any(1)] == 0) and np.all(gradients.value[~own.any(1)] == 0)


DRAWING = [a for a in (case.name for case in ALIGNMENT_CASES) if lookup(a, aj.ALIGNMENTS, 'alignment').at_test]


@pytest.mark.parametrize('alignment', DRAWING)
def test_contract_of_what_is_something_else_while_training(alignment):
  given, rng = make_problem('general', alignment, batch=(len(LENGTHS),)), jax.random.key(3)
  padding = np.arange(S) < np.asarray(LENGTHS)[:, None]
  mask = np.broadcast_to(padding[:, None], (len(LENGTHS), T, S))
  options = {'rng': rng, 'deterministic': False}
  run = jax.jit(jax.value_and_grad(lambda given: loss('general', alignment, given, mask, **options), has_aux=True))
  (_, attended), gradients = result = jax.device_get(run(given))
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
  assert np.all(attended.weights >= 0) and np.all(attended.weights[~mask] == 0) and np.any(attended.weights[FULL] > 0)
  assert np.all(attended.weights.sum(-1) <= 1 + 1e-6)
  assert np.all(attended.context[EMPTY] == 0) and np.all(gradients.query[EMPTY] == 0)
  assert np.all(gradients.key[~padding] == 0) and np.all(gradients.value[~padding] == 0)
  for filler in (jnp.nan, 1e30):
    assert_same(run(behind(padding, given, filler)), result)


@every_row
def test_an_example_equals_its_own_unbatched_unpadded_result(score, alignment):
  given = make_problem(score, alignment, batch=(len(LENGTHS),))
  mask = jnp.broadcast_to(aj.padding_mask(LENGTHS, S)[:, None], (len(LENGTHS), T, S))
  (_, attended), _ = compiled_loss(score, alignment)(given, mask)
  alone = jax.jit(lambda given, mask: attend(score, alignment, given, mask))
  for example in np.flatnonzero(LENGTHS <= SHORT):
    cut = given._replace(query=given.query[example], key=given.key[example, :SHORT], value=given.value[example, :SHORT])
    expected = alone(cut, aj.padding_mask(LENGTHS[example], SHORT))
    actual = aj.Attended(attended.context[example], attended.weights[example, :, :SHORT])
    assert_same(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('alignment', ['forward', 'forward_agent'])
def test_a_walk_steps_over_what_is_masked(alignment):
  given = make_problem('dot', alignment)
  holes = np.isin(np.arange(S), (0, 1, 4))
  whole = attend('dot', alignment, given, jnp.asarray(~holes))
  packed = given._replace(key=given.key[~holes], value=given.value[~holes])
  expected = attend('dot', alignment, packed, jnp.ones(S - 3, bool))
  assert_same(whole._replace(weights=whole.weights[:, ~holes]), expected, rtol=1e-5, atol=1e-6)
  assert np.all(whole.weights[:, holes] == 0)


@every_row
def test_masks_shapes_and_weights_do_not_matter(score, alignment):
  given = make_problem(score, alignment, batch=(2,))
  padding = aj.padding_mask(jnp.asarray([S, SHORT]), S)
  bias = jnp.where(padding[:, None], 0.0, -jnp.inf)
  hidden = behind(padding, given, jnp.nan)

  @jax.jit
  def all_ways(given, hidden):
    whole = attend(score, alignment, given, jnp.broadcast_to(padding[:, None], (2, T, S)))
    return whole, {
      'broadcast': attend(score, alignment, given, padding[:, None]),
      'bias': attend(score, alignment, hidden, bias=bias),
      'without weights': attend(score, alignment, given, padding[:, None], return_weights=False),
    }

  whole, ways = all_ways(given, hidden)
  assert ways['without weights'].weights is None
  ways['without weights'] = ways['without weights']._replace(weights=whole.weights)
  for attended in ways.values():
    assert_same(attended, whole, rtol=1e-5, atol=1e-6)


@every_row
def test_bfloat16(score, alignment):
  given = make_problem(score, alignment, batch=(2,), dtype=jnp.bfloat16)
  mask = aj.padding_mask(jnp.asarray([S, 0]), S)[:, None]
  with jax.numpy_dtype_promotion('strict'):
    run = jax.jit(jax.value_and_grad(lambda given: loss(score, alignment, given, mask), has_aux=True))
    (_, attended), gradients = run(given)
  assert attended.weights.dtype == jnp.float32 and attended.context.dtype == jnp.bfloat16
  assert all(np.all(np.isfinite(x.astype(jnp.float32))) for x in jax.tree.leaves((attended, gradients)))
  exact = jax.jit(lambda given: attend(score, alignment, given, mask))(
    jax.tree.map(lambda x: x.astype(jnp.float32), given)
  )
  if is_continuous(alignment):  # one rounding may turn a winner
    np.testing.assert_allclose(attended.weights, exact.weights, atol=0.05)


CHECKED = [CORE_PAIRS[2], ('coverage', 'entmax15'), ('coverage', 'latent_monotonic'), ('dot', 'local_p')]


@pytest.mark.parametrize(('score', 'alignment'), CHECKED)
def test_gradients_equal_numeric_ones(score, alignment):
  with jax.enable_x64(True):
    given = make_problem(score, alignment, dtype=jnp.float64)
    mask = jnp.asarray(np.random.default_rng(2).random((T, S)) < 0.7)
    run = jax.jit(lambda given: attend(score, alignment, given, mask))
    attended = run(given)
    assert attended.weights.dtype == attended.context.dtype == jnp.float64
    check_grads(run, (given,), order=1, modes=('rev',), eps=1e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('alignment', aj.ALIGNMENTS)
def test_scores_of_several_queries_are_refused(alignment):
  """Instead of weights that sum to 1 over all of them."""
  for scores, mask in (((2, S), (2, S)), ((S,), (1, S)), ((), ())):
    with pytest.raises(aj.UserError, match=r'scores and mask are those of one query, \[S\] both, got \['):
      aj.ALIGNMENTS[alignment].fn(jnp.zeros(scores), jnp.ones(mask, bool))
