"""Implementation 'flash' equals the definition for any mask, bias and shape, and skips masked blocks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.functional.table import Product, SoftmaxForm, SoftmaxTerms, lookup
from attention_jax.kernels import flash, flash_blocks
from attention_jax.kernels.target import compile_for
from tests.sampled_cases import sample_cases

B, T, S, D, V = 2, 13, 11, 6, 5
PRODUCTS = [name for name, row in aj.SCORES.items() if isinstance(row.form, Product)]
OTHER_SOFTMAXES = [
  name for name, row in aj.ALIGNMENTS.items() if isinstance(row.form, SoftmaxForm) and name != 'softmax'
]
OTHER_SOFTMAXES.append('softmax(temperature=0.5, length_scale=True, cap=2.0, sink=True)')
RANDOM = np.random.default_rng(0)
MASK = jnp.asarray(RANDOM.random((B, T, S)) < 0.5).at[0, 3].set(False).at[:, :, 4].set(False)
MASKS = {
  'no_mask': None,
  'padding': aj.padding_mask(jnp.asarray([S, 4]), S)[:, None],
  'all_masked': jnp.zeros((B, 1, S), bool),
  'per_query': MASK,
  'causal': aj.causal_mask(T)[:, :S],
  'causal_structure': aj.Mask.causal(),
  'every_part': (
    (aj.Mask.window(3, 2, sinks=1) & aj.Mask.lengths(jnp.asarray([S - 1, 0])) & MASK)
    & aj.Mask.segments(jnp.arange(T) // 5, jnp.arange(S) // 4)
  ).at(1),
}
BIAS = jnp.asarray(RANDOM.normal(size=(B, T, S)), jnp.float32).at[1, 2].set(-jnp.inf).at[0, :, 1].set(-jnp.inf)
MASKS_AND_BIASES = [f'{mask}-{bias}' for mask in MASKS for bias in ('plain', 'biased')]
biased_or_long = pytest.mark.parametrize(
  'bias', [pytest.param(None, id='plain', marks=pytest.mark.long), pytest.param(BIAS, id='biased')]
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(flash_blocks, 'BLOCK', 4)


def make_problem(score='scaled_dot', dtype=jnp.float32, shapes=((B, T, D), (B, S, D), (B, S, V)), alignment='softmax'):
  """Returns params, query, key and value."""
  params = aj.init_params(jax.random.key(1), score=score, alignment=alignment, query=D, key=D, features=7)
  params = jax.tree.map(lambda x: x.astype(dtype), params)
  return params, *(jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype) for shape in shapes)


def attend(implementation, params, query, key, value, mask=None, bias=None, **options):
  options = {'score': 'scaled_dot', 'return_weights': False} | options
  return aj.attend(query, key, value, mask, bias=bias, params=params, implementation=implementation, **options)


@functools.cache
def compiled(implementation, **options):
  """Returns a compiled function (problem, mask, bias) -> ((loss, attended), gradients of the problem and the bias)."""

  def loss(problem, bias, mask):
    attended = attend(implementation, *problem, mask, bias, rng=jax.random.key(5), **options)
    total = jnp.sum(jnp.sin(attended.context.astype(jnp.float32)))
    if attended.weights is not None:
      total += jnp.sum(jnp.cos(3 * attended.weights))
    return total, attended

  gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  return lambda problem, mask=None, bias=None: gradients(problem, bias, mask)


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), actual, expected)


def assert_equals_definition(problem, mask=None, bias=None, rtol=1e-4, atol=1e-5, **options):
  """Asserts that values and gradients are finite and equal those of 'xla', and returns them."""
  actual, expected = (compiled(name, **options)(problem, mask, bias) for name in ('flash', 'xla'))
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(expected))
  assert_close(actual, expected, rtol, atol)
  return actual


@pytest.mark.long
@pytest.mark.parametrize(
  ('mask', 'bias'), sample_cases([*itertools.product(MASKS.values(), [None, BIAS])], 4), ids=MASKS_AND_BIASES
)
def test_equals_definition_for_any_mask(mask, bias):
  assert_equals_definition(make_problem(), mask, bias)


def test_equals_definition_for_a_mask_with_every_part():
  assert_equals_definition(make_problem(), MASKS['every_part'])


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment'), sample_cases([*itertools.product(PRODUCTS, ['softmax', 'softmax(temperature=0.3)'])], 4)
)
def test_equals_definition_for_every_product_and_temperature(score, alignment):
  assert_equals_definition(make_problem(score), MASK, score=score, alignment=alignment)


@biased_or_long
def test_drops_the_same_weights_as_the_definition(bias):
  row = aj.with_dropout(lookup('softmax(temperature=0.3)', aj.ALIGNMENTS, 'alignment'), 0.4)
  assert_equals_definition(make_problem(), MASK, bias, alignment=row, deterministic=False)
  _, tested = compiled('flash', alignment=row)(make_problem(), MASK, bias)
  assert_close(tested, compiled('xla', alignment='softmax(temperature=0.3)')(make_problem(), MASK, bias)[1])


@pytest.mark.long
@pytest.mark.parametrize('alignment', [pytest.param('softmax', marks=pytest.mark.long), *OTHER_SOFTMAXES])
def test_requested_weights_and_dropout_equal_the_definition_for_every_form_of_softmax(alignment):
  """The gradients include those of a learned sink or scale, of the bias, and of requested weights after dropout."""
  row = aj.with_dropout(lookup(alignment, aj.ALIGNMENTS, 'alignment'), 0.3)
  problem = make_problem(alignment=alignment)
  _, (gradients, _) = assert_equals_definition(
    problem, MASK, BIAS, alignment=row, deterministic=False, return_weights=True
  )
  assert all(np.any(x != 0) for x in jax.tree.leaves(gradients[0].get('alignment', {})))


@pytest.mark.parametrize(
  'alignment',
  [
    'smoothed',
    pytest.param('capped_softmax(cap=0.7)', marks=pytest.mark.long),
    pytest.param('sink_softmax(sink=1.5)', marks=pytest.mark.long),
  ],
)
def test_contexts_equal_the_definition_for_other_forms_of_softmax(alignment):
  assert_equals_definition(make_problem(alignment=alignment), MASK, BIAS, alignment=alignment)


@pytest.mark.long
@biased_or_long
def test_gradients_of_requested_weights_equal_those_of_the_definition(bias):
  assert_equals_definition(make_problem(), MASK, bias, return_weights=True)


@pytest.mark.long
@pytest.mark.parametrize('size', [300.0, -300.0])
@pytest.mark.parametrize('alignment', ['sink_softmax', 'scalable_softmax', 'capped_softmax'])
def test_every_form_of_softmax_equals_the_definition_for_large_scores(alignment, size):
  bias = jnp.zeros((B, T, S)).at[:, 2].set(size).at[0, 5:, :4].set(size)
  # The scale rounds scores of this size by up to 2e-5 in either implementation.
  problem = make_problem(alignment=alignment)
  assert_equals_definition(problem, MASK, bias, rtol=1e-3, atol=1e-4, alignment=alignment)


@pytest.mark.long
@pytest.mark.parametrize(('steps', 'size'), [(1, 1), (1, 9), (4, 4), (5, 1), (17, 3)])
def test_equals_definition_for_any_length(steps, size):
  assert_equals_definition(make_problem(shapes=((steps, D), (size, D), (size, V))))


@pytest.mark.long
def test_masked_content_changes_nothing():
  params, query, key, value = make_problem()
  mask = aj.padding_mask(jnp.asarray([S, 4]), S)
  each_query = jnp.broadcast_to(mask[:, None], (B, T, S))
  expected = compiled('flash')((params, query, key, value), each_query)
  for filler in (jnp.nan, jnp.inf, 1e30):
    filled = [np.where(mask[..., None], x, np.float32(filler)) for x in (key, value)]
    actual = compiled('flash')((params, query, *filled), each_query)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.long
@pytest.mark.parametrize('scale', [1e4, pytest.param(-1e4, marks=pytest.mark.long)])
def test_extreme_scores_stay_finite(scale):
  params, query, key, value = make_problem()
  results = [compiled(name)((params, scale * query, key, value), MASK) for name in ('flash', 'xla')]
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(results))
  assert_close(*(attended for (_, attended), _ in results))


@pytest.mark.long
@pytest.mark.parametrize('size', [jnp.inf, 3e38, -3e38])
def test_a_bias_that_is_or_becomes_infinite_counts_as_the_nearest_finite_score(size):
  """The temperature makes a finite bias infinite. Only a bias that is -inf itself is a mask."""
  bias = jnp.zeros((B, T, S)).at[0, 1, :2].set(size).at[1, 4].set(size)
  assert_equals_definition(make_problem(), None, bias, alignment='softmax(temperature=0.3)')


@pytest.mark.long
def test_an_infinite_bias_of_a_single_position_gives_it_all_the_weight():
  """The scale of `scalable_softmax`, a log n, is 0 there."""
  mask = aj.padding_mask(1, size=S)
  options = {'bias': jnp.full((B, T, S), jnp.inf), 'alignment': 'scalable_softmax(scale=0.43)'}
  attended = aj.attend(*make_problem()[1:], mask, implementation='flash', **options)
  np.testing.assert_array_equal(attended.weights[..., 0], 1)
  np.testing.assert_array_equal(attended.context, jnp.broadcast_to(make_problem()[3][:, :1], attended.context.shape))


@pytest.mark.parametrize('size', [-1e9, 8e5, 8e7])
def test_equals_definition_for_scores_that_are_all_large(size):
  """For example, all scores of a query are large if all positions are padding, masked by a bias of -1e9.

  In float32, -1e9 and 8e7 are so large that adding the log of a sum of exponentials has no effect.
  """
  bias = jnp.zeros((B, T, S)).at[:, 2].set(size).at[0].set(size)
  mask = jnp.ones((B, T, S), bool)
  (_, attended), _ = assert_equals_definition(make_problem(), mask, bias, return_weights=True)
  np.testing.assert_allclose(attended.weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.long
def test_unmasked_nan_propagates_as_in_the_definition():
  params, query, key, value = make_problem()
  key = key.at[0, 5].set(jnp.nan)
  mask = MASK.at[0, :4, 5].set(True).at[0, 4:, 5].set(False)

  arguments = (params, query, key, value), mask, jnp.zeros((B, T, S))
  (_, attended), (_, expected) = (compiled(name, return_weights=True)(*arguments)[0] for name in ('flash', 'xla'))
  assert np.isnan(attended.context[0, :4]).all()
  assert not np.isnan(attended.context[0, 4:]).any()
  assert_close(attended, expected)


@pytest.mark.long
def test_bfloat16_equals_definition_and_gradients_in_float64_equal_numeric_gradients():
  problem = make_problem(dtype=jnp.bfloat16)
  actual, expected = (compiled(name)(problem, MASK)[0][1].context for name in ('flash', 'xla'))
  assert actual.dtype == expected.dtype == jnp.bfloat16
  assert_close(actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=1e-2)
  with jax.enable_x64(True):
    problem = make_problem(dtype=jnp.float64)

    def context(*problem):
      return attend('flash', *problem, MASK, BIAS.astype(jnp.float64)).context

    context = jax.jit(context)
    assert context(*problem).dtype == jnp.float64
    check_grads(context, problem, order=1, modes=('rev',), eps=1e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize('alignment', [pytest.param('softmax', marks=pytest.mark.long), 'capped_softmax'])
def test_vmap_scan_and_shard_map_do_not_change_the_result(alignment):
  params, *arrays = make_problem()
  arrays.append(MASK)
  expected = compiled('xla', alignment=alignment)((params, *arrays[:3]), MASK)[0][1].context

  def attend_example(query, key, value, mask):
    return attend('flash', params, query, key, value, mask, alignment=alignment).context

  def scanned(*arrays):
    return jax.lax.scan(lambda _, x: ((), attend_example(*x)), (), arrays)[1]

  def query_gradient(fn):
    return jax.jit(jax.grad(lambda query: jnp.sum(jnp.sin(fn(query, *arrays[1:])))))(arrays[0])

  mesh = jax.make_mesh((B,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  mapped = jax.vmap(attend_example)
  sharded = jax.shard_map(mapped, mesh=mesh, in_specs=P('data'), out_specs=P('data'))
  for fn in (mapped, scanned, sharded):
    assert_close(jax.jit(fn)(*arrays), expected)
  assert_close(query_gradient(sharded), query_gradient(mapped))


def scheduled_blocks(mask, blocks=None):
  """Returns, for each block of queries, the (first block of keys, span, has_masked) that run, in order."""
  blocks = blocks or flash_blocks.Blocks.of(*mask.shape)
  schedule = jax.device_get(jax.jit(lambda mask: blocks.schedule(*blocks.classify_blocks(blocks.pad(mask))))(mask))
  return [
    [
      (int(j), span, has_masked)
      for (span, has_masked), (order, count) in zip(blocks.kinds, schedule, strict=True)
      for j in order[i, : count[i]]
    ]
    for i in range(blocks.num_query_blocks)
  ]


@pytest.mark.long
def test_masked_blocks_are_skipped():
  assert flash_blocks.Blocks.of(16, 16) == (4, 4, 4, 4)
  assert scheduled_blocks(aj.causal_mask(16)) == [
    [(0, 1, True)],
    [(0, 1, False), (1, 1, True)],
    [(0, 2, False), (2, 1, True)],
    [(0, 2, False), (2, 1, False), (3, 1, True)],
  ]
  assert scheduled_blocks(aj.window_mask(16, 1, 0)) == [
    [(0, 1, True)],
    [(0, 1, True), (1, 1, True)],
    [(1, 1, True), (2, 1, True)],
    [(2, 1, True), (3, 1, True)],
  ]
  padding = jnp.broadcast_to(aj.padding_mask(5, 16), (16, 16))
  assert scheduled_blocks(padding) == [[(0, 1, False), (1, 1, True)]] * 4


@pytest.mark.long
@pytest.mark.parametrize('size', [1, *sample_cases([(size,) for size in (18, 4, 7, 28, 16)], 2)])
def test_every_block_with_unmasked_positions_runs_once(size):
  """Blocks that run together start at a multiple of their number, and the other blocks run one by one."""
  blocks = flash_blocks.Blocks.of(8, size)
  is_unmasked = np.random.default_rng(size).random((8, blocks.num_key_blocks)) < 0.8
  mask = jnp.asarray(np.repeat(is_unmasked, blocks.key_block, axis=1)[:, :size])
  grouped = np.asarray(blocks.pad(mask)).reshape(blocks.num_query_blocks, -1, blocks.num_key_blocks, blocks.key_block)
  for i, row in enumerate(scheduled_blocks(mask, blocks)):
    covered = [j + n for j, span, _ in row for n in range(span)]
    assert sorted(covered) == np.flatnonzero(grouped[i].any((0, 2))).tolist()
    for j, span, has_masked in row:
      assert grouped[i][:, j : j + span].all() == (not has_masked)


@pytest.mark.long
def test_attention_module_runs_the_kernel(monkeypatch):
  calls = []
  kernel = flash.attention_context

  def recording_kernel(*args):
    calls.append(args)
    return kernel(*args)

  monkeypatch.setattr(flash, 'attention_context', recording_kernel)
  module = aj.Attention('general', 'softmax', 6, implementation='flash')
  query = jnp.ones((B, T, D))
  encoded = jnp.ones((B, S, D))

  def attend_all(module):
    return module.parallel(query, module.remember(encoded, jnp.ones((B, S), bool)))

  jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), method=attend_all))
  assert calls


def test_unsupported_pairs_raise():
  with pytest.raises(aj.UserError, match="'flash' cannot compute this: the score is not a product"):
    attend('flash', *make_problem(), score='location')
  with pytest.raises(aj.UserError, match="'flash' cannot compute this: the alignment is not a form of softmax"):
    attend('flash', *make_problem(), alignment='sparsemax')


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['flash', 'xla'])
def test_a_traced_cap_has_the_gradient_of_the_formula(implementation):
  _, *arrays = make_problem()
  query, key, value = (np.asarray(x, np.float64) for x in arrays)

  def literal(cap):
    exps = np.exp(cap * np.tanh(np.einsum('btd,bsd->bts', query, key) / np.sqrt(D) / cap)) * np.asarray(MASK)
    return np.sum(np.einsum('bts,bsv->btv', exps / np.maximum(exps.sum(-1, keepdims=True), 1e-30), value) ** 2)

  def loss(cap):
    alignment = functools.partial(aj.alignments.capped_softmax, cap=cap)
    return jnp.sum(attend(implementation, {}, *arrays, MASK, alignment=alignment).context ** 2)

  expected = (literal(0.7 + 1e-5) - literal(0.7 - 1e-5)) / 2e-5
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.7), expected, rtol=1e-3)


def test_a_transform_that_is_no_partial_raises():
  row = aj.Row(aj.alignments.smoothed, form=SoftmaxForm(lambda count: SoftmaxTerms(1.0, jax.nn.log_sigmoid)))
  with pytest.raises(aj.UserError, match=r'attend: the transform of an alignment must be a jax.tree_util.Partial'):
    attend('flash', *make_problem(), alignment=row)


@pytest.mark.long
@pytest.mark.parametrize('mask', [aj.Mask.causal(), aj.Mask.lengths(jnp.asarray([7, 0])), aj.Mask.array(MASK)])
def test_sequences_run_together_on_other_devices(mask):
  _, *inputs = make_problem()

  def results(implementation, platform):
    def loss(inputs):
      context = attend(implementation, {}, *inputs, mask).context
      return jnp.sum(jnp.sin(context)), context

    with compile_for(platform):
      program = jax.jit(jax.grad(loss, has_aux=True))
      return program(inputs), str(jax.make_jaxpr(program)(inputs))

  (actual, together), (_, in_turn), (expected, _) = (
    results(*x) for x in (('flash', 'gpu'), ('flash', 'cpu'), ('xla', 'cpu'))
  )
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), actual, expected)
  assert together.count('scan[') < in_turn.count('scan[')
