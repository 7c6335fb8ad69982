"""The Attention module: agreement with `aj.attend`, several heads, and steps against all queries at once."""

import doctest
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.table import LocalWindow
from attention_jax.modules import attention as attention_module
from attention_jax.modules.attention import Attention
from attention_jax.modules.positions import POSITIONS
from tests.modules.helpers import assert_close, assert_same, attend_all, draw, variables
from tests.sampled_cases import sample_cases

B, T, S, QUERY, ENCODED, FEATURES = 2, 3, 7, 5, 11, 6
LENGTHS = [S, 4]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)
# With one head, query and memory must have the same width.
EQUAL_WIDTH_SCORES = ('dot', 'scaled_dot', 'cosine', 'normed_dot', 'elu_dot')
# Every row once: each score with softmax, and each other alignment with a recurrent score.
CORE_PAIRS = [(score, 'softmax') for score in aj.SCORES] + [('coverage', a) for a in aj.ALIGNMENTS if a != 'softmax']
# An eighth of the rows; `make test-all` tests all of them.
sampled_rows = pytest.mark.parametrize(('score', 'alignment'), sample_cases(CORE_PAIRS, 8))


def make_inputs(score: str, heads: int = 1) -> tuple[jax.Array, jax.Array]:
  """Returns queries [B, T, D] and an encoded source [B, S, D']."""
  return draw(B, T, QUERY), draw(B, S, QUERY if score in EQUAL_WIDTH_SCORES and heads == 1 else ENCODED)


def attend_at(module, query, encoded, mask=None, of_queries=None, of_keys=None, **options):
  memory = module.remember(encoded, mask, of_keys)
  return module.parallel(query, memory, positions=of_queries, **options)


def parameters(module, query, encoded):
  return variables(module, query, encoded, MASK, method=attend_all)


def both_ways(module, params, query, encoded, mask):
  """Returns the results for all queries at once and for one query after the other."""
  memory = module.apply(params, encoded, mask, method='remember')
  carry = module.apply(params, memory, method='init_carry')

  def step(carry, query):
    return module.apply(params, carry, query, memory)

  _, stepped = jax.lax.scan(step, carry, jnp.moveaxis(query, 1, 0))
  stepped = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), stepped)
  return module.apply(params, query, memory, method='parallel'), stepped


run_both_ways = jax.jit(both_ways, static_argnums=0)


@sampled_rows
def test_one_head_equals_attend_and_steps_equal_all_queries(score, alignment):
  module = aj.Attention(score, alignment, FEATURES)
  query, encoded = make_inputs(score)
  params = parameters(module, query, encoded)
  attended, stepped = run_both_ways(module, params, query, encoded, MASK)
  assert attended.context.shape == (B, T, encoded.shape[-1]) and attended.weights.shape == (B, T, S)
  assert_close(stepped, attended)

  of_head = jax.tree.map(lambda leaf: leaf[0], params.get('params', {}))
  attend_params = {'score': of_head.get('score_params', {}), 'alignment': of_head.get('alignment_params', {})}
  attend_params |= {
    name: of_head[f'{name}_kernel']['kernel'] for name in ('query', 'key') if f'{name}_kernel' in of_head
  }
  fn = functools.partial(aj.attend, score=score, alignment=alignment, params=attend_params)
  assert_close(attended, jax.jit(fn)(query, encoded, encoded, MASK[:, None]))


@pytest.mark.parametrize(
  ('alignment', 'heads'),
  [
    pytest.param(name, heads, marks=[pytest.mark.long] if (i + heads) % 2 else [])
    for i, (name, row) in enumerate(aj.ALIGNMENTS.items())
    if isinstance(row.form, LocalWindow)
    for heads in (1, 2)
  ],
)
def test_the_window_implementation_equals_xla(alignment, heads):
  alignment = f'{alignment}(width=1)'
  query, encoded = make_inputs('additive', heads)
  xla = aj.Attention('additive', alignment, FEATURES, heads)
  params = parameters(xla, query, encoded)
  window = aj.Attention('additive', alignment, FEATURES, heads, implementation='window')
  assert_close(run_both_ways(window, params, query, encoded, MASK), run_both_ways(xla, params, query, encoded, MASK))


LITERAL_SCORES = {
  'scaled_dot': lambda q, k, params: [q @ row / np.sqrt(len(q)) for row in k],
  'additive': lambda q, k, params: [np.tanh(q + row) @ params['v'] for row in k],
  'general': lambda q, k, params: [q @ params['w'] @ row for row in k],
}


@pytest.mark.long
@pytest.mark.parametrize('score', LITERAL_SCORES)
def test_heads_are_projected_attended_and_joined(score):
  heads = 2
  module = aj.Attention(score, 'softmax', FEATURES, heads)
  query, encoded = make_inputs(score, heads)
  params = parameters(module, query, encoded)
  attended, _ = run_both_ways(module, params, query, encoded, MASK)
  numpy_params, query, encoded = jax.tree.map(np.asarray, (params['params'], query, encoded))
  for b, length in enumerate(LENGTHS):
    for t in range(T):
      contexts = []
      for n in range(heads):
        q = query[b, t] @ numpy_params['query_kernel']['kernel'][n]
        k = encoded[b, :length] @ numpy_params['key_kernel']['kernel'][n]
        value = encoded[b, :length] @ numpy_params['value_kernel']['kernel'][n]
        learned = {name: param[n] for name, param in numpy_params.get('score_params', {}).items()}
        exponentials = np.exp(LITERAL_SCORES[score](q, k, learned))
        weights = exponentials / exponentials.sum()
        np.testing.assert_allclose(attended.weights[b, n, t, :length], weights, rtol=1e-4, atol=1e-5)
        contexts.append(weights @ value)
      joined = np.concatenate(contexts) @ numpy_params['join']['kernel']
      np.testing.assert_allclose(attended.context[b, t], joined, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('bias', [False, True])
def test_a_gate_multiplies_the_contexts_of_each_head_before_they_are_joined(bias):
  query, encoded = make_inputs('scaled_dot', heads=2)
  gated = aj.Attention('scaled_dot', 'softmax', FEATURES, heads=2, gate=True, bias=bias)
  params = parameters(gated, query, encoded)
  assert_close(*run_both_ways(gated, params, query, encoded, MASK))

  identity = {'kernel': np.eye(FEATURES), 'bias': np.zeros(FEATURES)}
  without = {name: param for name, param in params['params'].items() if name not in ('gate_kernel', 'join')}
  ungated = aj.Attention('scaled_dot', 'softmax', FEATURES, heads=2, bias=bias)
  contexts = attend_all(ungated.bind({'params': without | {'join': identity}}), query, encoded, MASK).context
  gate, join, query = jax.tree.map(np.asarray, (params['params']['gate_kernel'], params['params']['join'], query))
  expected = join.get('bias', 0.0)
  for n, context in enumerate(np.split(np.asarray(contexts), 2, axis=-1)):
    logits = query @ gate['kernel'][n] + gate.get('bias', np.zeros((2, FEATURES // 2)))[n]
    expected = expected + context / (1 + np.exp(-logits)) @ join['kernel'][3 * n : 3 * n + 3]
  assert_close(attend_all(gated.bind(params), query, encoded, MASK).context, expected)


@pytest.mark.long
def test_an_edit_of_one_head_changes_the_context_by_that_head_alone():
  """Heads 2 and 3 of 4 share keys and values; the result is the same under jit, vmap and scan."""
  options = {'features': 8, 'heads': 4, 'kv_heads': 2, 'implementation': 'xla'}
  natural = aj.Attention('scaled_dot', 'softmax', **options)
  edited = natural.clone(alignment=aj.with_edit('softmax', 'fixed(at=1, position=2, head=3)'))
  query, encoded = make_inputs('scaled_dot', 4)
  params = parameters(natural, query, encoded)
  before = jax.jit(lambda params: natural.apply(params, query, encoded, MASK, method=attend_all))(params)
  after, stepped = jax.jit(lambda params: both_ways(edited, params, query, encoded, MASK))(params)
  assert_close(stepped, after)
  expected = np.array(before.weights)
  expected[:, 3, 1] = np.eye(S)[2]
  np.testing.assert_allclose(after.weights, expected, rtol=1e-6)
  kernels = jax.tree.map(np.asarray, params['params'])
  value = np.asarray(encoded) @ kernels['value_kernel']['kernel'][1]  # [B, S, F] of heads 2 and 3
  joined = np.array(before.context)
  for b in range(B):
    change = value[b, 2] - before.weights[b, 3, 1] @ value[b]
    joined[b, 1] += change @ kernels['join']['kernel'][6:8]
  np.testing.assert_allclose(after.context, joined, rtol=1e-4, atol=1e-5)

  def attend_row(query, encoded, mask):
    return edited.apply(params, query[None], encoded[None], mask[None], method=attend_all).context[0]

  np.testing.assert_allclose(jax.jit(jax.vmap(attend_row))(query, encoded, MASK), after.context, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment', 'heads'),
  [
    ('location_sensitive', 'entmax', 3),
    ('coverage', 'sparsemax', 2),
    ('general', 'sigmoid', 3),
    ('cosine', 'entmax15', 1),
  ],
)
def test_padding_does_not_change_results_and_steps_equal_all_queries(score, alignment, heads):
  module = aj.Attention(score, alignment, FEATURES, heads)
  query, encoded = make_inputs(score, heads)
  params = parameters(module, query, encoded)
  result = run_both_ways(module, params, query, encoded, MASK)
  assert_close(*result)
  assert not np.any(result[0].weights[1, ..., LENGTHS[1] :])
  for filler in (jnp.nan, 1e30):
    filled = np.where(MASK[..., None], encoded, np.float32(filler))
    assert_same(run_both_ways(module, params, query, filled, MASK), result)
  short = LENGTHS[1]
  unpadded_result = run_both_ways(module, params, query[1:], encoded[1:, :short], MASK[1:, :short])
  for padded, unpadded in zip(result, unpadded_result, strict=True):
    assert_close(padded.context[1:], unpadded.context)
    assert_close(padded.weights[1:, ..., :short], unpadded.weights)


@pytest.mark.long
@pytest.mark.parametrize('heads', [1, 2])
def test_an_empty_memory_has_zero_results_and_zero_gradients(heads):
  module = aj.Attention('coverage', 'softmax', FEATURES, heads)
  query, encoded = make_inputs('coverage', heads)
  params = parameters(module, query, encoded)
  empty = MASK & jnp.asarray([[True], [False]])
  attended, stepped = run_both_ways(module, params, query, encoded, empty)
  for result in (attended, stepped):
    assert np.all(result.weights[1] == 0) and np.all(result.context[1] == 0)
    assert np.all(np.isfinite(result.context))

  def loss(query, encoded):
    return jnp.sum(module.apply(params, query, encoded, empty, method=attend_all).context)

  for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(query, encoded):
    assert np.all(np.isfinite(gradient)) and np.all(gradient[1] == 0) and np.any(gradient[0] != 0)


@pytest.mark.long
@pytest.mark.parametrize('heads', [1, 2])
def test_masks_of_flax_and_shared_masks_are_accepted(heads):
  module = aj.Attention('dot', 'softmax', FEATURES, heads)
  query, encoded = make_inputs('dot', heads)
  params = parameters(module, query, encoded)
  run = jax.jit(functools.partial(module.apply, method=attend_all))
  window = np.array(aj.window_mask(S, 1, 2)[:T])
  each_query = MASK[:, None] & window[None]
  equal_masks = {
    'of each row': [MASK, MASK[:, None], MASK[:, None, None], np.asarray(MASK)],
    'of each query': [each_query, each_query[:, None]],
    'shared by all rows': [jnp.broadcast_to(window, (B, T, S)), window[None], window[None, None]],
    'none': [jnp.ones((B, S), bool), None, jnp.ones((1, S), bool)],
  }
  for first, *others in equal_masks.values():
    expected = run(params, query, encoded, first)
    for mask in others:
      assert_same(run(params, query, encoded, mask), expected)
  attended = run(params, query, encoded, each_query)
  for t in range(T):
    row = run(params, query, encoded, each_query[:, t])
    assert_close([x[..., t, :] for x in attended], [x[..., t, :] for x in row])


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda m, q, k: m.remember(k, jnp.ones((T, S), bool)), r'mask must be \[B, S\] = \[2, 7\], .*, got \[3, 7\]'),
    (lambda m, q, k: m.remember(k, jnp.ones(S, bool)), r'mask must be .* got \[7\]; pass a mask .* mask\[None\]'),
    (lambda m, q, k: m.remember(k, jnp.ones((B, 2, T, S), bool)), r'mask must be .* got \[2, 2, 3, 7\]'),
    (lambda m, q, k: m.remember(k, jnp.ones((B, S))), 'mask must be bool, True = may be attended to, got float32'),
    (lambda m, q, k: m.remember(k[0]), r'encoded must be \[B, S, D\] .* got \[7, 5\] and \[7, 5\]; add a batch axis'),
    (lambda m, q, k: m.remember(k, value=k[:, 1:]), r'value \[B, S, V\], got \[2, 7, 5\] and \[2, 6, 5\]'),
    (lambda m, q, k: m.parallel(q[0], m.remember(k)), r'query must be \[B, T, D\] with B = 2, .* got \[3, 5\]; add'),
    (lambda m, q, k: m.parallel(q, k), r'memory must be a Memory, as remember returns it, got float32 \[2, 7, 5\]'),
    (lambda m, q, k: attend_all(m, q, k, jnp.ones((B, T + 1, S), bool)), r'got mask \[2, 4, 7\] and query \[2, 3, 5\]'),
    (lambda m, q, k: m(q, k, k), r'a call takes \(carry, query \[B, D\], memory\), .* got float32 .* parallel'),
    (lambda m, q, k: step(m, q, k), r'query must be \[B, D\] with B = 2, .* got \[2, 3, 5\]'),
    (lambda m, q, k: step(m, q[:, 0], k, jnp.ones((B, T, S), bool)), r'mask \[2, 3, 7\] and query \[2, 5\]'),
    (lambda m, q, k: step(m, q[:, 0], k, position=jnp.zeros(B, int)), r'position must be one number .* int32 \[2\]'),
  ],
)
def test_arguments_of_another_shape_are_one_line(call, message):
  module = aj.Attention('dot').bind({})
  with pytest.raises(aj.UserError, match=f'^attention: .*{message}') as error:
    call(module, draw(B, T, QUERY), draw(B, S, QUERY))
  assert '\n' not in str(error.value)


def step(module, query, encoded, mask=None, position=None):
  memory = module.remember(encoded, mask)
  return module(module.init_carry(memory), query, memory, position=position)


@pytest.mark.long
def test_the_rng_may_have_the_name_dropout():
  module = aj.Attention('dot', 'gumbel', FEATURES)
  query, encoded = make_inputs('dot')

  def run(**rngs):
    attend = functools.partial(attend_all, deterministic=False)
    return module.apply({}, query, encoded, None, method=attend, rngs=rngs).weights

  rng, other = jax.random.split(jax.random.key(0))
  sampled = jax.jit(lambda: [run(dropout=rng), run(attention=rng, dropout=other), run(attention=other, dropout=rng)])()
  assert_same(sampled[0], sampled[1])
  assert np.any(sampled[0] != sampled[2])


@pytest.mark.long
def test_the_carry_has_the_dtype_of_the_weights():
  with jax.enable_x64(True):
    for dtype, expected in ((jnp.float64, jnp.float64), (jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32)):
      module = aj.Attention('coverage', 'monotonic', FEATURES, dtype=dtype)

      def run(module):
        memory = module.remember(np.ones((B, S, ENCODED)))
        carry = module.init_carry(memory)
        return carry, *module(carry, np.ones((B, QUERY)), memory)

      before, after, attended = jax.eval_shape(
        lambda m=module, run=run: m.init_with_output(jax.random.key(0), method=run)[0]
      )
      assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
      assert before.previous.dtype == attended.weights.dtype == expected


@pytest.mark.long
@sampled_rows
@pytest.mark.parametrize('heads', [1, 2])
def test_contexts_are_bfloat16_and_weights_float32(score, alignment, heads):
  if aj.ALIGNMENTS[alignment].latent:
    heads = 1
  module = aj.Attention(score, alignment, FEATURES, heads, dtype=jnp.bfloat16)
  query, encoded = make_inputs(score, heads)
  params = parameters(module, query, encoded)
  for attended in jax.eval_shape(functools.partial(both_ways, module), params, query, encoded, MASK):
    assert attended.context.dtype == jnp.bfloat16 and attended.weights.dtype == jnp.float32


def noisy(scores, mask, *, rng):
  return jnp.where(mask, jax.random.uniform(rng, scores.shape), 0.0)


@pytest.mark.long
def test_rows_heads_and_queries_draw_independently():
  module = aj.Attention('additive', noisy, FEATURES, heads=2)
  query = jnp.ones((B, T, QUERY))
  encoded = jnp.ones((B, S, ENCODED))
  mask = jnp.ones((B, S), bool)
  params = variables(module, query, encoded, mask, method=attend_all)
  run = jax.jit(lambda rng: module.apply(params, query, encoded, mask, method=attend_all, rngs={'attention': rng}))
  weights = np.asarray(run(jax.random.key(0)).weights)
  assert len(np.unique(weights)) == weights.size
  assert_same(run(jax.random.key(0)).weights, weights)
  assert np.all(run(jax.random.key(1)).weights != weights)


def test_the_test_time_counterpart_needs_no_rng():
  row = aj.Row(noisy, at_test=aj.alignments.hardmax)
  module = aj.Attention('additive', row, FEATURES)
  query, encoded = make_inputs('additive')
  params = parameters(module, query, encoded)
  run = jax.jit(functools.partial(module.apply, method=attend_all))
  assert set(np.unique(run(params, query, encoded, MASK).weights)) == {0.0, 1.0}


def test_options_of_specs_determine_the_parameters():
  module = aj.Attention('low_rank(rank=3)', 'entmax(alpha=1.2)', FEATURES)
  params = parameters(module, *make_inputs('low_rank'))['params']
  shapes = {name: leaf.shape for name, leaf in params['score_params'].items()}
  assert shapes == {'u': (1, QUERY, 3), 'v': (1, ENCODED, 3)} and 'alignment_params' not in params


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'features': 7, 'heads': 2}, 'heads must be at least 1 and divide features, got features=7 and heads=2'),
    ({'heads': 0}, 'heads must be at least 1 and divide features, got features=6 and heads=0'),
    ({'score': 'aditive'}, r"unknown score 'aditive' \(did you mean 'additive'\?\); expected one of: additive, concat"),
    ({'alignment': 'softmx'}, r"unknown alignment 'softmx' \(did you mean 'softmax'\?\)"),
    ({'alignment': 'softmax(heat=2)'}, r"unknown option of alignment 'softmax': 'heat'"),
    ({'implementation': 'window'}, "'window' cannot compute this: the alignment is not local_m or local_p"),
    ({'alignment': 'latent', 'heads': 2}, 'heads must be 1 for a latent alignment, got heads=2'),
    ({'alignment': 'latent', 'project_values': True}, "project_values must be False .* latent alignment 'latent'"),
    ({'bias': True, 'score': 'general'}, "bias must be False for one head and score 'general'"),
    ({'gate': True}, 'gate must be False for one head without project_values=True, got gate=True'),
  ],
)
def test_invalid_fields_raise(fields, message):
  module = aj.Attention(**{'features': FEATURES} | fields)
  with pytest.raises(aj.UserError, match=message):
    parameters(module, *make_inputs('additive'))


def test_implementations_without_steps_raise_before_there_are_parameters():
  for implementation, message in (
    ('fused', "unknown implementation 'fused'"),
    ('flash', "'flash' computes all queries at once, .*; expected one of: auto, .*xla"),
  ):
    with pytest.raises(aj.UserError, match=message):
      aj.Attention('dot', implementation=implementation).check_step_support()


def test_a_memory_longer_than_max_positions_is_an_error():
  module = aj.Attention(f'location(max_positions={S - 1})', 'softmax', FEATURES)
  with pytest.raises(ValueError, match=f'max_positions={S}'):
    parameters(module, *make_inputs('location'))


@pytest.mark.parametrize(
  ('kind', 'of_memory', 'of_queries', 'message'),
  [
    ('rope', None, None, 'the memory are required'),
    ('alibi', range(S), None, 'the queries are required'),
    ('alibi', range(S - 1), range(T), f'the memory must be whole numbers \\[{S}\\], got int32 \\[{S - 1}\\]'),
    ('alibi', range(S), [0.0, 1.0, 2.0], f'the queries must be whole numbers \\[{T}\\], got float32 \\[{T}\\]'),
  ],
)
def test_missing_and_invalid_positions_raise(kind, of_memory, of_queries, message):
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, positions=POSITIONS[kind]())
  of_keys, of_steps = (x and list(x) for x in (of_memory, of_queries))
  with pytest.raises(aj.UserError, match=f'positions of {message}'):
    variables(module, *make_inputs('scaled_dot'), MASK, of_steps, of_keys, method=attend_at)


@pytest.mark.parametrize(
  ('positions', 'message'),
  [
    ('rope', r"positions must be a module such as .*POSITIONS\['alibi'\]\(heads=2, features=3\), got 'rope'"),
    (POSITIONS['alibi'](), 'positions must have heads=2, got heads=1; the attention has 2 heads of 3 features'),
    (POSITIONS['contextual'](), 'positions must have features=3, got features=64'),
    (POSITIONS['sinusoidal'](), 'positions must be applied by attention, got Sinusoidal, .* expected one of: shaw, t5'),
  ],
)
def test_positions_that_do_not_fit_the_attention_raise(positions, message):
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, heads=2, positions=positions)
  with pytest.raises(aj.UserError, match=f'^attention: {message}'):
    parameters(module, *make_inputs('scaled_dot'))


@pytest.mark.long
@pytest.mark.parametrize('score', ['general', 'low_rank', 'concat', 'normed_dot', 'additive'])
def test_annotations_of_keys_are_no_features_of_a_learned_score(score):
  """Gates that forget nothing have no effect."""
  x = draw(B, S, FEATURES)
  args = (x, x, MASK, jnp.arange(S), jnp.arange(S))

  def module(kind):
    return aj.Attention(score, 'softmax', FEATURES, heads=2, positions=POSITIONS[kind](heads=2, features=FEATURES // 2))

  params = variables(module('none'), *args, method=attend_at)
  gate = {'kernel': jnp.zeros((FEATURES, 2)), 'bias': jnp.full(2, 100.0)}
  expected = module('none').apply(params, *args, method=attend_at)
  params = {'params': params['params'] | {'positions': {'gate': gate}}}
  assert_close(module('forgetting').apply(params, *args, method=attend_at), expected)


@pytest.mark.long
def test_the_examples_of_the_docstring_run():
  results = doctest.testmod(attention_module)
  assert results.attempted > 20 and results.failed == 0


def test_the_examples_show_every_public_method():
  names = [name for name, value in vars(Attention).items() if inspect.isfunction(value) and not name.startswith('_')]
  docstring = Attention.__doc__
  assert [name for name in names if name != 'setup' and f'.{name}(' not in docstring] == []


def test_features_of_a_head_need_not_divide_the_features():
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, heads=4, kv_heads=2, head_dim=5)
  query, encoded = make_inputs('scaled_dot', 4)
  params = parameters(module, query, encoded)
  attended, stepped = run_both_ways(module, params, query, encoded, MASK)
  assert_close(stepped, attended)
  kernels = {name: leaf['kernel'] for name, leaf in params['params'].items()}
  shapes = [kernels[name].shape for name in ('query_kernel', 'key_kernel', 'value_kernel', 'join')]
  assert shapes == [(4, QUERY, 5), (2, ENCODED, 5), (2, ENCODED, 5), (20, FEATURES)]
  heads = []
  for n in range(4):
    key, value = (encoded @ kernels[name][n // 2] for name in ('key_kernel', 'value_kernel'))
    heads.append(aj.attend(query @ kernels['query_kernel'][n], key, value, MASK[:, None]).context)
  assert_close(attended.context, jnp.concatenate(heads, -1) @ kernels['join'])
  with pytest.raises(aj.UserError, match=r'head_dim must be 0 for one head .* got head_dim=3'):
    parameters(aj.Attention('dot', head_dim=3), query, query)


@pytest.mark.parametrize('score', ['normed_dot(epsilon=0.01)', 'normed_dot(epsilon=0.01, scale=0.3)'])
def test_rotary_positions_rotate_normalised_queries_and_keys(score):
  """Qwen3 and Gemma 3: an RMSNorm of the projected queries and keys, then the rotation, then the product."""
  rotary = POSITIONS['rope']()
  module = aj.Attention(score, 'softmax', FEATURES, heads=4, kv_heads=2, head_dim=6, positions=rotary)
  x, indices = draw(B, S, QUERY), jnp.arange(S)
  params = variables(module, x, x, MASK, indices, indices, method=attend_at)
  attended = jax.jit(functools.partial(module.apply, method=attend_at))(params, x, x, MASK, indices, indices)
  learned = params['params']
  gains = learned['score_params']
  assert {name: gain.shape for name, gain in gains.items()} == {'query_gain': (4, 6), 'key_gain': (2, 6)}

  def normalise(x, gain):
    return rotary.rotate(x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 0.01) * gain[None, None], indices)

  for n in range(4):
    q = normalise((x @ learned['query_kernel']['kernel'][n])[:, None], gains['query_gain'][n][None])
    k = normalise((x @ learned['key_kernel']['kernel'][n // 2])[:, None], gains['key_gain'][n // 2][None])
    scores = (q @ k.swapaxes(2, 3))[:, 0] * (0.3 if 'scale' in score else 6**-0.5)
    weights = jax.nn.softmax(scores, where=MASK[:, None] & jnp.ones_like(scores, bool))
    assert_close(attended.weights[:, n], jnp.where(MASK[:, None], weights, 0))


@pytest.mark.long
@pytest.mark.parametrize('kind', ['rope', 'alibi', 't5', 'shaw'])
def test_sequences_may_have_positions_of_their_own(kind):
  """Padding on the left: the positions of a sequence count from its first token."""
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, heads=1, positions=POSITIONS[kind](1, FEATURES))
  x = draw(B, S, QUERY)
  padding = jnp.array([0, 2])
  positions = jnp.arange(S)[None] - padding[:, None]
  mask = positions >= 0
  params = variables(module, x, x, mask, positions[0], positions[0], method=attend_at)
  run = jax.jit(functools.partial(module.apply, method=attend_at))
  attended = run(params, x, x, mask, positions, positions)
  for row, start in enumerate(padding.tolist()):
    alone = x[row : row + 1, start:]
    indices = jnp.arange(S - start)
    expected = run(params, alone, alone, None, indices, indices)
    assert_close(attended.context[row, start:], expected.context[0])
    assert_close(attended.weights[row, start:, start:], expected.weights[0])
  memory = module.apply(params, x, mask, positions, method='remember')
  carry = module.apply(params, memory, method='init_carry')
  _, step = jax.jit(module.apply)(params, carry, x[:, 4], memory, position=positions[:, 4])
  assert_close(step, jax.tree.map(lambda x: x[:, 4], attended))


def test_positions_that_are_counted_in_order_are_shared_by_all_sequences():
  module = aj.Attention('scaled_dot', 'softmax', FEATURES, positions=POSITIONS['forgetting']())
  with pytest.raises(aj.UserError, match=r'must be 0 ... S - 1 for every sequence with Forgetting, got \[2, 7\]'):
    positions = jnp.zeros((B, S), int)
    variables(module, draw(B, S, QUERY), draw(B, S, QUERY), MASK, positions, positions, method=attend_at)


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['xla', 'flash'])
@pytest.mark.parametrize('shape', [(S,), (T, 1), (4, 1, S), (B, 4, T, S), (B, 1, 1, S)], ids=str)
def test_a_bias_is_added_to_the_scores_of_all_queries(shape, implementation):
  positions = POSITIONS['alibi'](4)
  module = aj.Attention('scaled_dot', 'softmax', 8, heads=4, kv_heads=2, positions=positions, implementation='xla')
  query, encoded = draw(B, T, QUERY), draw(B, S, ENCODED)
  indices = jnp.arange(T), jnp.arange(S)
  params = variables(module, query, encoded, MASK, *indices, method=attend_at)
  bias = draw(*shape).at[..., :1].set(-jnp.inf)

  def attend(module, bias=None, implementation='xla'):
    module = module.clone(implementation=implementation)
    return module.apply(params, query, encoded, MASK, *indices, bias=bias, method=attend_at)

  attended = jax.jit(attend, static_argnums=(0, 2))(module, bias, implementation)
  plain = jax.jit(attend, static_argnums=0)(module)
  full = jnp.broadcast_to(bias.reshape((1,) * (4 - bias.ndim) + bias.shape), (B, 4, T, S))
  weights = plain.weights * jnp.exp(full)
  total = weights.sum(-1, keepdims=True)
  assert_close(attended.weights, jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0))


def test_a_bias_of_another_shape_is_an_error():
  module = aj.Attention('dot').bind({})
  memory = module.remember(draw(B, S, QUERY))
  with pytest.raises(aj.UserError, match=r'attention: bias \(3, 3, 7\) does not broadcast to .* \(2, 1, 3, 7\)'):
    module.parallel(draw(B, T, QUERY), memory, bias=jnp.zeros((T, T, S)))
