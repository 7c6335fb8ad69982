"""Every implementation equals 'xla' in value and gradient, or raises with the reason."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import Pointwise, TanhSum, lookup
from attention_jax.kernels import auto, chunked
from attention_jax.kernels.target import compile_for
from tests.functional.alignment_cases import PAIRS
from tests.functional.cases import S, T
from tests.functional.helpers import assert_same, attend, loss, make_problem
from tests.sampled_cases import sample_cases

CLOSE = {'rtol': 1e-4, 'atol': 1e-5}


def lookup_rows(score, alignment):
  return lookup(score, aj.SCORES, 'score'), lookup(alignment, aj.ALIGNMENTS, 'alignment')


def supporting(score, alignment):
  """The implementations other than 'xla' that compute this pair."""
  rows = lookup_rows(score, alignment)
  return [
    name
    for name, implementation in aj.IMPLEMENTATIONS.items()
    if name != 'xla' and not implementation.unsupported_reason(*rows)
  ]


# The default run covers every score under every implementation. It pairs sums of tanh, which 'factored' supports, with
# one alignment of each kind: over all scores, by a threshold, in a window, and recurrent. `make test-all` sweeps all.
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
DEFAULT_PAIRS |= {(score, EVERY_ALIGNMENT[0]) for score in EVERY_SCORE if score not in TANH_SUMS}
SHARED_MASK_SCORES = ('additive', 'scaled_dot')  # tested with a mask per query and with one mask for all queries
PAIRS_OF_ROWS = [pair for pair in PAIRS if pair in DEFAULT_PAIRS]
OTHER_PAIRS = [pytest.param(*pair, marks=pytest.mark.product) for pair in PAIRS if pair not in DEFAULT_PAIRS]
SHARED_MASK_PAIRS = {
  (score, alignment)
  for score, alignment in PAIRS
  if score in SHARED_MASK_SCORES or 'window' in supporting(score, alignment)
}
UNSUPPORTED = [
  (name, *pair) for name in aj.IMPLEMENTATIONS for pair in PAIRS if name != 'xla' and name not in supporting(*pair)
]
MIN_SCORES = auto.MIN_SCORES


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
  monkeypatch.setattr(chunked, 'MAX_BLOCK_SCORES', 2 * S)
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': dict.fromkeys(auto.CANDIDATES, 0)})


def assert_equal_xla(score, alignment, names, masks, biases):
  """Compares values and gradients, mapped over an axis of masks and biases, which are None or have the same axis."""
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


# A quarter of the rows; `make test-all` tests every pair.
@pytest.mark.parametrize(('score', 'alignment'), sample_cases(PAIRS_OF_ROWS, 4) + OTHER_PAIRS)
def test_equals_xla_with_a_mask_per_query(score, alignment):
  rng = np.random.default_rng(1)
  masks = jnp.asarray(rng.random((2, 2, T, S)) < 0.5).at[0, 0, 1].set(False)  # all positions of a query masked
  biases = jnp.asarray(rng.normal(size=(2, 2, T, S)), jnp.float32).at[1, 0, 1, 2].set(-jnp.inf)
  # 'auto' runs one of the other implementations: it is tested only where both kinds of masks are.
  names = [name for name in supporting(score, alignment) if name != 'auto' or (score, alignment) in SHARED_MASK_PAIRS]
  assert_equal_xla(score, alignment, names, masks, biases)


@pytest.mark.parametrize(
  ('score', 'alignment'),
  [pair for pair in sample_cases(PAIRS_OF_ROWS, 4) + OTHER_PAIRS if pair.values in SHARED_MASK_PAIRS],
)
def test_equals_xla_with_a_mask_for_all_queries(score, alignment):
  masks = jnp.stack([jnp.ones((2, 1, S), bool), aj.padding_mask(jnp.asarray([S, 3]), S)[:, None]])
  assert_equal_xla(score, alignment, supporting(score, alignment), masks, None)


@pytest.mark.parametrize(('name', 'score', 'alignment'), UNSUPPORTED[:: len(UNSUPPORTED) // 12])
def test_unsupported_pairs_raise(name, score, alignment):
  with pytest.raises(aj.UserError, match=f"implementation '{name}' cannot compute this: "):
    attend(score, alignment, make_problem(score, alignment), implementation=name)


@pytest.mark.parametrize('alignment', ['local_m(width=2)', 'local_p(width=2)'])
def test_window_reads_only_its_window(alignment):
  sizes = []

  def recording_score(query, key):
    sizes.append(key.shape[0])
    return key @ query

  def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

  row = aj.Row(recording_score, form=Pointwise())
  params = aj.init_params(jax.random.key(0), score=row, alignment=alignment, query=5, key=5, features=3)
  inputs = draw(T, 5), draw(500, 5), draw(500, 2)
  options = {'score': row, 'alignment': alignment, 'params': params}
  attended = jax.jit(lambda inputs: aj.attend(*inputs, **options, implementation='window'))(inputs)
  assert sizes == [5]
  assert_same(attended, jax.jit(lambda inputs: aj.attend(*inputs, **options))(inputs), **CLOSE)


@pytest.mark.parametrize('size', [1, 2, 5])
def test_memory_shorter_than_the_window(size):
  problem = make_problem('dot', 'local_p(width=4)', size=size)

  @jax.jit
  def attend_both(problem):
    return [attend('dot', 'local_p(width=4)', problem, implementation=name) for name in ('xla', 'window')]

  assert_same(*attend_both(problem), **CLOSE)


def choose_implementation(score, alignment, scores):
  return auto.choose_implementation(*lookup_rows(score, alignment), scores)


def test_auto_chooses_by_pair_and_size(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100}})
  assert [choose_implementation('additive', 'softmax', n) for n in (99, 100)] == ['xla', 'factored']
  assert [choose_implementation('additive', 'local_m', n) for n in (99, 149, 150)] == ['xla', 'factored', 'window']
  assert choose_implementation('dot', 'softmax', 10**6) == 'xla'
  assert auto.describe_choice(*lookup_rows('additive', 'softmax')) == 'xla, factored from T S = 100'
  assert auto.describe_choice(*lookup_rows('location', 'hard')) == 'xla'


def test_auto_chooses_chunked_where_memory_is_the_limit(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'window': 150, 'factored': 100}})
  assert auto.describe_choice(*lookup_rows('location_sensitive', 'softmax')) == f'xla, chunked from T S = {2**7}'
  monkeypatch.setattr(auto, 'MIN_SCORES', {'gpu': {'factored': 0}})  # no measurement for this backend
  assert choose_implementation('additive', 'softmax', 10**6) == 'xla'
  assert choose_implementation('additive', 'softmax', 2**20) == 'chunked'


def test_auto_estimates_on_accelerators_and_logs_it(monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', MIN_SCORES)
  query = jnp.zeros([2, 8], jnp.bfloat16)
  memory = aj.Memory(query, query, jnp.ones(2, bool))
  product = lookup_rows('scaled_dot', 'softmax')
  with compile_for('gpu'):
    choices = [auto.choose_implementation(*product, n, (query, memory)) for n in (2**14 - 1, 2**14)]
    assert choices == ['xla', 'cudnn']
    assert auto.choose_implementation(*product, 2**14, (query.astype(jnp.float32), memory)) == 'xla'
    assert auto.describe_choice(*product) == (
      'xla, cudnn (16-bit) from T S = 16384; estimated by the roofline, not measured on a gpu'
    )
  with compile_for('tpu'):
    assert auto.choose_implementation(*lookup_rows('additive', 'softmax'), 2**10) == 'pallas_additive'
    assert auto.describe_choice(*product) == 'xla'
  assert 'estimated' not in auto.describe_choice(*product)


def test_auto_runs_its_choice(monkeypatch):
  calls = []

  def recording_attend(*args, **options):
    calls.append(args)
    return aj.Attended(0.0, None)

  monkeypatch.setattr(auto.factored, 'attend', recording_attend)
  attend('additive', 'softmax', make_problem('additive', 'softmax'), implementation='auto')
  assert calls


@pytest.mark.parametrize(('name', 'alignment'), [('flash', 'softmax'), ('window', 'local_m(width=2)')])
def test_alignment_with_a_test_time_function_is_unsupported(name, alignment):
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


@pytest.mark.parametrize(('name', 'score', 'alignment'), sample_cases(SUPPORTED_EXAMPLES, 4))
def test_mask_and_bias_shared_along_batch_axes(name, score, alignment):
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


@pytest.mark.parametrize(('name', 'score', 'alignment'), SUPPORTED_EXAMPLES)
def test_no_queries(name, score, alignment):
  problem = make_problem(score, alignment, batch=(2,), queries=0)

  def total(problem):
    return loss(score, alignment, problem, implementation=name)

  (value, attended), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(problem)
  assert value == 0
  assert attended.weights.shape == (2, 0, S)
  assert attended.context.shape[:2] == (2, 0)
  assert not any(jnp.any(x) for x in jax.tree.leaves(gradients))


def test_chunked_stores_a_part_of_the_array_of_queries_keys_and_features():
  length = 512
  features = 128
  sizes = {'query': features, 'key': features, 'features': features}
  params = jax.eval_shape(lambda: aj.init_params(jax.random.key(0), score='additive', **sizes))
  x = jax.ShapeDtypeStruct((length, features), jnp.float32)

  def temporary_bytes(implementation):
    def total(params, x):
      options = {'score': 'additive', 'alignment': 'sparsemax', 'return_weights': False}
      return aj.attend(x, x, x, params=params, implementation=implementation, **options).context.sum()

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  array_bytes = 4 * length * length * features
  assert temporary_bytes('xla') > array_bytes > 1.5 * temporary_bytes('chunked')
