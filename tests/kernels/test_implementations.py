"""Every implementation equals 'xla' in value and gradient, or raises with the reason."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import TanhSum, lookup
from attention_jax.kernels import auto, chunked
from attention_jax.kernels.api import supported_implementations
from tests.functional.alignment_cases import PAIRS
from tests.functional.cases import S, T
from tests.functional.helpers import assert_same, attend, lookup_rows, loss, make_problem
from tests.sampled_cases import sample_cases

CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


def supporting(score, alignment):
  """Returns the names of the implementations other than 'xla' that compute this pair."""
  return [name for name in supported_implementations(*lookup_rows(score, alignment)) if name != 'xla']


# DEFAULT_PAIRS, which the default run samples, has every score, and every implementation that runs on a CPU. It pairs
# sums of tanh, which 'factored' supports, with alignments of each kind: over all scores, by a threshold, in a window,
# and recurrent.
ALIGNMENT_KINDS = (
  'softmax',
  'sigmoid',
  'sparsemax',
  'entmax',
  'coverage_penalised',
  'local_m(width=2)',
  'local_p(width=2)',
  'monotonic',
  'mocha(width=2)',
  'addressing',
)
EVERY_SCORE, EVERY_ALIGNMENT = (list(dict.fromkeys(names)) for names in zip(*PAIRS, strict=True))
TANH_SUMS = [score for score in EVERY_SCORE if isinstance(lookup(score, aj.SCORES, 'score').form, TanhSum)]
DEFAULT_PAIRS = {*zip(itertools.cycle(TANH_SUMS), ALIGNMENT_KINDS, strict=False)}
DEFAULT_PAIRS |= {('elu_dot', 'proportional')}
DEFAULT_PAIRS |= {(score, EVERY_ALIGNMENT[0]) for score in EVERY_SCORE if score not in TANH_SUMS}
SHARED_MASK_SCORES = ('additive', 'scaled_dot')  # tested with a mask per query and with one mask for all queries
ORDERED_DEFAULT_PAIRS = [pair for pair in PAIRS if pair in DEFAULT_PAIRS]
OTHER_PAIRS = [pytest.param(*pair, marks=pytest.mark.product) for pair in PAIRS if pair not in DEFAULT_PAIRS]
SHARED_MASK_PAIRS = {
  (score, alignment)
  for score, alignment in PAIRS
  if score in SHARED_MASK_SCORES or 'window' in supporting(score, alignment)
}
UNSUPPORTED = [
  (name, *pair) for name in aj.IMPLEMENTATIONS for pair in PAIRS if name != 'xla' and name not in supporting(*pair)
]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr(chunked, 'MAX_BLOCK_SCORES', 2 * S)
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': dict.fromkeys(auto.CANDIDATES, 0)})


def assert_equal_xla(score, alignment, names, masks, biases):
  """Asserts that values and gradients equal those of 'xla', mapped over the first axis of masks and, if any, biases."""
  problem = make_problem(score, alignment, batch=(2,))

  def run(implementation, problem):
    def loss_and_gradients(mask, bias):
      def total(problem):
        return loss(score, alignment, problem, mask, bias=bias, implementation=implementation)

      return jax.value_and_grad(total, has_aux=True)(problem)

    return jax.vmap(loss_and_gradients)(masks, biases)

  results = jax.jit(lambda problem: {name: run(name, problem) for name in ('xla', *names)})(problem)
  for result in results.values():
    assert_same(result, results['xla'], **CLOSE)


# A quarter of DEFAULT_PAIRS; `make test-all` tests every pair.
@pytest.mark.parametrize(('score', 'alignment'), sample_cases(ORDERED_DEFAULT_PAIRS, 4) + OTHER_PAIRS)
def test_equals_xla_with_a_mask_per_query(score, alignment):
  rng = np.random.default_rng(1)
  masks = jnp.asarray(rng.random((2, 2, T, S)) < 0.5).at[0, 0, 1].set(False)  # all positions of a query masked
  biases = jnp.asarray(rng.normal(size=(2, 2, T, S)), jnp.float32).at[1, 0, 1, 2].set(-jnp.inf)
  # 'auto' runs one of the other implementations: it is tested only for pairs with both kinds of masks.
  names = [name for name in supporting(score, alignment) if name != 'auto' or (score, alignment) in SHARED_MASK_PAIRS]
  assert_equal_xla(score, alignment, names, masks, biases)


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment'),
  [pair for pair in sample_cases(ORDERED_DEFAULT_PAIRS, 4) + OTHER_PAIRS if pair.values in SHARED_MASK_PAIRS],
)
def test_equals_xla_with_a_mask_for_all_queries(score, alignment):
  masks = jnp.stack([jnp.ones((2, 1, S), bool), aj.padding_mask(jnp.asarray([S, 3]), S)[:, None]])
  assert_equal_xla(score, alignment, supporting(score, alignment), masks, None)


@pytest.mark.long
@pytest.mark.parametrize(('name', 'score', 'alignment'), UNSUPPORTED[:: len(UNSUPPORTED) // 12])
def test_unsupported_pairs_raise_with_the_reason(name, score, alignment):
  reason = aj.IMPLEMENTATIONS[name].unsupported_reason(*lookup_rows(score, alignment))
  with pytest.raises(aj.UserError, match=re.escape(f"implementation '{name}' cannot compute this: {reason}")):
    attend(score, alignment, make_problem(score, alignment), implementation=name)


@pytest.mark.parametrize(('name', 'alignment'), [('flash', 'softmax'), ('window', 'local_m(width=2)')])
def test_flash_and_window_do_not_support_an_alignment_with_a_test_time_function(name, alignment):
  row = lookup(alignment, aj.ALIGNMENTS, 'alignment')
  unsupported_reason = aj.IMPLEMENTATIONS[name].unsupported_reason
  assert not unsupported_reason(aj.SCORES['dot'], row)
  assert unsupported_reason(aj.SCORES['dot'], row._replace(at_test=aj.ALIGNMENTS['hardmax'].fn))


SUPPORTED_EXAMPLES = [
  ('xla', 'dot', 'monotonic'),
  ('chunked', 'dot', 'sparsemax'),
  ('factored', 'additive', 'softmax'),
  ('flash', 'scaled_dot', 'softmax'),
  ('window', 'dot', 'local_m(width=2)'),
]


@pytest.mark.long
@pytest.mark.parametrize(('name', 'score', 'alignment'), sample_cases(SUPPORTED_EXAMPLES, 4))
def test_mask_and_bias_shared_along_batch_axes_equal_their_copies(name, score, alignment):
  full_shape = (2, 3, T, S)
  problem = make_problem(score, alignment, batch=(2, 3))
  rng = np.random.default_rng(1)
  mask = jnp.asarray(rng.random(full_shape) < 0.6).at[0, 0, 1].set(False)
  bias = jnp.asarray(rng.normal(size=full_shape), jnp.float32).at[0, 0, 1, 2].set(-jnp.inf)

  @jax.jit
  def run(mask, bias):
    def total(problem, bias):
      return loss(score, alignment, problem, mask, bias=bias, implementation=name)

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(problem, bias)

  for index in (np.s_[:1, :1], np.s_[0], np.s_[:, :1], np.s_[0, 0]):
    shared = run(mask[index], bias[index])
    full_bias, bias_vjp = jax.vjp(lambda bias: jnp.broadcast_to(bias, full_shape), bias[index])
    value, (problem_gradient, bias_gradient) = run(jnp.broadcast_to(mask[index], full_shape), full_bias)
    assert_same(shared, (value, (problem_gradient, *bias_vjp(bias_gradient))), **CLOSE)


@pytest.mark.long
@pytest.mark.parametrize(('name', 'score', 'alignment'), SUPPORTED_EXAMPLES)
def test_no_queries_give_empty_results_and_zero_gradients(name, score, alignment):
  problem = make_problem(score, alignment, batch=(2,), queries=0)

  def total(problem):
    return loss(score, alignment, problem, implementation=name)

  (value, attended), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(problem)
  assert value == 0
  assert attended.weights.shape == (2, 0, S)
  assert attended.context.shape[:2] == (2, 0)
  assert attend(score, alignment, problem, implementation=name, return_weights=False).weights is None
  assert not any(jnp.any(x) for x in jax.tree.leaves(gradients))
