"""Edits of attention weights: against weights computed by hand, and the contract of masks and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.edits import EDITS, check_indices, replace_weights, with_edit
from attention_jax.kernels import auto
from tests.functional.helpers import assert_same, attend, make_problem
from tests.sampled_cases import sample_cases

SCORES = jnp.log(jnp.array([0.1, 0.4, 0.3, 0.2, 5.0]))  # softmax over the first four positions returns these weights
MASK = jnp.array([True, True, True, True, False])
SPECS = ['fixed(at=1, position=2)' if name == 'fixed' else name for name in EDITS]
PAIRS = [('softmax', spec) for spec in SPECS] + [(name, 'permuted') for name in ('entmax15', 'monotonic', 'local_m')]


def edited_weights(edit, scores=SCORES, mask=MASK, step=0):
  row = with_edit('softmax', edit)
  supplied = {'step': jnp.int32(step)} if 'step' in row.required_inputs else {}
  return np.asarray(row.fn(scores, mask, **supplied))


@pytest.mark.parametrize(
  ('edit', 'expected'),
  [
    ('uniform', [0.25, 0.25, 0.25, 0.25, 0]),
    ('largest', [0, 1, 0, 0, 0]),
    ('drop_largest', [1 / 6, 0, 3 / 6, 2 / 6, 0]),
    ('tempered(temperature=0.5)', np.array([1, 16, 9, 4, 0]) / 30),
    ('tempered', [0.1, 0.4, 0.3, 0.2, 0]),
    ('fixed(at=1, position=2)', [0.1, 0.4, 0.3, 0.2, 0]),
    ('fixed(position=2)', [0, 0, 1, 0, 0]),
    ('fixed(position=4)', [0, 0, 0, 0, 0]),  # masked
    (lambda weights, mask: weights + 0.1, [0.2, 0.5, 0.4, 0.3, 0]),
  ],
)
def test_edits_equal_weights_computed_by_hand(edit, expected):
  np.testing.assert_allclose(edited_weights(edit), expected, rtol=1e-6)


def test_edits_need_no_implicit_promotion():
  with jax.numpy_dtype_promotion('strict'):
    assert {edited_weights(edit).dtype for edit in SPECS} == {np.dtype('float32')}


@pytest.mark.long
def test_permuted_weights_are_the_same_weights_in_another_order():
  permute = jax.vmap(lambda step: with_edit('softmax', 'permuted').fn(SCORES, MASK, step=step))
  rows = np.asarray(jax.jit(permute)(jnp.arange(40)))
  np.testing.assert_allclose(np.sort(rows[:, :4]), np.tile([0.1, 0.2, 0.3, 0.4], (40, 1)), rtol=1e-6)
  assert np.all(rows[:, 4] == 0)
  assert len({tuple(row.round(3)) for row in rows}) > 12  # of 24 orders
  padded = jnp.pad(SCORES, (0, 3)), jnp.pad(MASK, (0, 3))
  np.testing.assert_array_equal(edited_weights('permuted', *padded)[:5], edited_weights('permuted'))


@pytest.mark.parametrize(('alignment', 'edit'), sample_cases(PAIRS, 2))
def test_edited_weights_obey_the_contract(alignment, edit):
  problem = make_problem('additive', alignment, size=9)
  row = with_edit(alignment, edit)

  @jax.jit
  def run(problem, mask):
    return attend('additive', row, problem, mask)

  mask = jnp.arange(9) < 6
  attended = run(problem, mask)
  assert attended.weights.dtype == jnp.float32
  assert np.all(attended.weights[:, 6:] == 0)
  garbage = problem._replace(key=problem.key.at[6:].set(jnp.nan), value=problem.value.at[6:].set(jnp.nan))
  assert_same(run(garbage, mask), attended)
  shorter = problem._replace(key=problem.key[:6], value=problem.value[:6])
  np.testing.assert_allclose(run(shorter, mask[:6]).weights, attended.weights[:, :6], rtol=1e-6, atol=1e-7)

  def empty_context(problem):
    return run(problem, jnp.zeros(9, bool)).context.sum()

  empty, gradient = jax.jit(jax.value_and_grad(empty_context))(problem)
  assert empty == 0
  assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient))


@pytest.mark.long
def test_replaced_weights_are_those_of_their_query():
  problem = make_problem('scaled_dot', 'softmax', queries=3, size=4)
  natural = attend('scaled_dot', 'softmax', problem)
  new = jnp.array([[0.5, 0.5, 0.0, 0.0], [jnp.nan] * 4])  # a row of NaN and a missing row replace nothing
  attended = attend('scaled_dot', with_edit('softmax', replace_weights(new)), problem)
  np.testing.assert_allclose(attended.weights, [new[0], natural.weights[1], natural.weights[2]], rtol=1e-6)
  np.testing.assert_allclose(attended.context, attended.weights @ problem.value, rtol=1e-5)

  def sum_of_first_context(new):
    return attend('scaled_dot', with_edit('softmax', replace_weights(new)), problem).context[0].sum()

  gradient = jax.jit(jax.grad(sum_of_first_context))(new)
  np.testing.assert_allclose(gradient[0], problem.value.sum(1), rtol=1e-6)


@pytest.mark.long
def test_later_queries_read_the_edited_weights():
  problem = make_problem('coverage', 'softmax', queries=3, size=5)
  natural = attend('coverage', 'softmax', problem)
  edited = attend('coverage', with_edit('softmax', 'fixed(at=0, position=3)'), problem)
  assert abs(natural.weights[1] - edited.weights[1]).max() > 1e-4  # through the coverage, the sum of earlier weights


def test_an_edit_that_needs_no_step_is_computed_in_parallel():
  assert not with_edit('softmax', 'uniform').is_recurrent
  assert with_edit('softmax', 'permuted').is_recurrent
  hard = with_edit('gumbel', 'uniform')
  assert 'rng' in hard.required_inputs and 'rng' not in hard._replace(fn=hard.at_test).required_inputs


@pytest.mark.long
def test_an_edit_changes_the_weights_after_dropout():
  row = with_edit(aj.with_dropout('softmax', 0.5), 'uniform')
  assert row.dropout is None and 'rng' in row.required_inputs
  for weights in (row.at_test(SCORES, MASK), row.fn(SCORES, MASK, rng=jax.random.key(0))):
    np.testing.assert_allclose(weights, [0.25, 0.25, 0.25, 0.25, 0])


def test_fast_implementations_do_not_ignore_an_edit(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'flash': 0}})
  problem = make_problem('scaled_dot', 'softmax', queries=8, size=8)
  with pytest.raises(aj.UserError, match='flash'):
    attend('scaled_dot', with_edit('softmax', 'uniform'), problem, implementation='flash')
  attended = attend('scaled_dot', with_edit('softmax', 'uniform'), problem, implementation='auto')
  np.testing.assert_allclose(attended.weights, 1 / 8)


LEARNED = aj.Row(lambda w, m, *, b: w, params={'b': aj.Param(())})
STATEFUL = aj.Row(lambda w, m, *, state: (w, state), init_state=lambda size, dtype: ())


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    ('unifrom', "unknown edit 'unifrom' .did you mean 'uniform'"),
    ('fixed(step=1)', "unknown option of edit 'fixed': 'step'"),
    ('fixed(at=-1)', 'fixed: at must be at least 0, got -1'),
    ('fixed(position=-2)', 'fixed: position must be at least 0, got -2'),
    ('tempered(temperature=0.0)', 'tempered: temperature must be greater than 0, got 0.0'),
    (LEARNED, r"must have no learned parameters, got \['b'\]"),
    (lambda w, m, *, strength: w, r"got \['strength'\]; an option needs a default"),
    (STATEFUL, 'an edit must have no state'),
    ('uniform(layer=0)', 'an alignment has no layers, got layer=0'),
    ('uniform(head=0)', 'only heads of the module Attention have indices'),
  ],
)
def test_unsupported_and_invalid_edits_raise(edit, message):
  with pytest.raises(aj.UserError, match=message):
    attend('scaled_dot', with_edit('softmax', edit), make_problem('scaled_dot', 'softmax', queries=3, size=4))


def test_a_latent_alignment_cannot_be_edited():
  with pytest.raises(aj.UserError, match='latent alignment'):
    with_edit('latent', 'uniform')


def test_indices_beyond_the_queries_or_positions_raise():
  for edit in ('uniform(layer=9)', 'fixed', 'fixed(at=2, position=4, head=9)'):
    check_indices(edit, queries=3, positions=5)
  for edit, message in (
    ('fixed(at=3)', r"^edit 'fixed\(at=3\)': at must be less than 3, the number of target tokens$"),
    ('fixed(position=5)', 'position must be less than 5, the number of source tokens'),
  ):
    with pytest.raises(aj.UserError, match=message):
      check_indices(edit, queries=3, positions=5)
