"""The public `attend`: errors with the names and shapes of arguments and what is expected, and batch axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

import attention_jax as aj
from attention_jax.functional import attend as definition
from attention_jax.functional.table import Product
from attention_jax.kernels import chunked, flash_blocks
from attention_jax.kernels.api import IMPLEMENTATIONS
from attention_jax.kernels.target import compile_for

B, T, S, D, K, V, F = 2, 3, 7, 5, 11, 13, 17
ARGUMENTS = {'query': jnp.ones((B, T, D)), 'key': jnp.ones((B, S, D)), 'value': jnp.ones((B, S, V))}
ADDITIVE = {
  'score': 'additive',
  'params': {'score': {'v': jnp.ones(F)}, 'query': jnp.ones((D, F)), 'key': jnp.ones((K, F))},
}


COMBINED = 'softmax(temperature=0.7, cap=2.0, sink=True, length_scale=True)'
HEADS, KEY_HEADS = 4, 2
MASK_OF_HEADS = aj.Mask.causal().at(2) & aj.Mask.lengths(jnp.array([[S], [4]]))
EMPTY_MASK = aj.Mask.array(jnp.ones((B, 1, T, S), bool).at[0, 0, 1].set(False))


def heads_of(seed=0, dtype=jnp.float32):
  """Returns queries of four heads, and keys and values of two."""
  rngs = jax.random.split(jax.random.key(seed), 3)
  shapes = ((B, HEADS, T, D), (B, KEY_HEADS, S, D), (B, KEY_HEADS, S, V))
  return [jax.random.normal(rng, shape, dtype) for rng, shape in zip(rngs, shapes, strict=True)]


def value_and_gradients(inputs, params, implementation, **options):
  """Returns the results of attend, and the gradients of a loss of all finite ones."""

  def loss(inputs, params):
    attended = aj.attend(*inputs, params=params, implementation=implementation, **options)
    leaves = [jnp.where(jnp.isfinite(x), x, 0.0) for x in jax.tree.leaves(attended)]
    return sum((jnp.cos(jnp.arange(x.size, dtype=x.dtype)) * x.reshape(-1)).sum() for x in leaves), attended

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(inputs, params)


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), actual, expected)


def sampling_alignment(scores, mask, *, rng):
  return scores


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'query': jnp.ones(D)}, r'query must be \[..., T, Dq\].*, got query \(5,\), key \(2, 7, 5\), value \(2, 7, 13\)'),
    ({'query': jnp.ones((3, T, D))}, r'must broadcast to each other, got query \(3, 3, 5\), key \(2, 7, 5\)'),
    ({'value': jnp.ones((B, 6, V))}, r'the same number of positions S, got .*value \(2, 6, 13\)'),
    ({'key': jnp.ones((B, 0, D)), 'value': jnp.ones((B, 0, V))}, r'at least one position, .* key \(2, 0, 5\)'),
    ({'value': jnp.ones((B, S, V), int)}, 'attend: value must be float, got int32'),
    ({'key': 'memory'}, "attend: key must be float, got 'memory'"),
    ({'query': jnp.ones((B, T, 1))}, r'query \(1,\) and key \(7, 5\)'),
    ({'query': jnp.ones((B, T, 1)), 'implementation': 'flash'}, r'query \(1,\) and key \(7, 5\)'),
    ({'key': jnp.ones((B, S, 0)), 'query': jnp.ones((B, T, 0))}, 'must have at least one feature, got query'),
    ({'mask': jnp.ones((B, T, S))}, 'mask must be bool, .* got float32'),
    (
      {'mask': jnp.ones((B, S), bool)},
      r'mask \(2, 7\) does not broadcast to \[..., T, S\] = \(2, 3, 7\); pass a padding mask .* as mask\[:, None\]',
    ),
    ({'mask': jnp.ones((1, B, T, S), bool)}, r'mask \(1, 2, 3, 7\) does not broadcast'),
    ({'bias': jnp.ones((T, 6))}, r'bias \(3, 6\) does not broadcast to .*; pass a bias \[B, S\] as bias\[:, None\]'),
    ({'bias': jnp.ones((T, S), int)}, 'bias must be float, got int32'),
    ({'score': 'general'}, r"params\['score'\] must have the entries \['w'\], got \[\]; use init_params"),
    ({'params': {'scores': {}}}, r"unknown entry of attend's params 'scores' \(did you mean 'score'\?\)"),
    (
      {'score': 'general', 'params': {'score': {'w': jnp.ones((K, D))}}},
      r"params\['score'\]\['w'\] must be \[query = 5, key = 5\], got \[11, 5\]",
    ),
    (
      {'score': 'low_rank', 'params': {'score': {'u': jnp.ones((D, 3)), 'v': jnp.ones((D, 2))}}},
      r"params\['score'\]\['v'\] must be \[key = 5, rank = 3\], got \[5, 2\]",
    ),
    (
      dict(zip(ARGUMENTS, heads_of(), strict=True))
      | {'alignment': 'sink_softmax', 'params': {'alignment': {'sink': jnp.ones(3)}}},
      r"\['sink'\] must be \[\], got \[3\]; axes before these .* to \(2, 2, 2\)",
    ),
    ({'params': np.ones(2)}, r'params must be a dictionary .* as returned by init_params, got array\(\[1., 1.\]\)'),
    ({'params': {'query': None}}, r"params\['query'\] must be an array, got None; use init_params"),
    ({'params': {'score': None}}, r"params\['score'\] must be a dictionary, got None; use init_params"),
    ({'score': lambda query, key: None}, r'\[S\] = \[7\], got \(\)'),
    ({'alignment': lambda scores, mask: scores[1:]}, r'\[S\] = \[7\], got \(6,\)'),
    ({'alignment': aj.alignments.monotonic}, 'alignment: a function that takes state needs init_state: pass Row'),
    (ADDITIVE, r"params\['key'\] must be \[5, F\] to project key \[2, 7, 5\], got \[11, 17\]"),
    ({'score': 'location(max_positions=3)', 'params': {'score': {'w': jnp.ones((3, D))}}}, 'S=7 .*max_positions=3'),
    ({'alignment': sampling_alignment}, 'this alignment samples; rng must be a PRNG key, got None'),
    ({'rng': 3}, r'attend: rng must be a single PRNG key, such as jax\.random\.key\(0\), got 3'),
    ({'score': 'dott'}, r"unknown score 'dott' \(did you mean 'dot'\?\)"),
    ({'alignment': 'softmax(temperature=0.0)'}, 'temperature must be greater than 0, got 0.0'),
    ({'implementation': 'xlaa'}, r"unknown implementation 'xlaa' \(did you mean 'xla'\?\); expected one of: "),
    # Functions that are no bias.
    ({'bias': lambda score: score}, 'a bias that is a function takes only .*; got score'),
    ({'bias': lambda *, query_position, step: step}, 'takes only .*, by keyword; got step'),
    (
      {'bias': lambda *, query_position: query_position},
      r'a bias of positions must be float \[S\] = \[7\], got int32 \[\]',
    ),
    (
      {'bias': lambda *, key_position, slope: key_position},
      r"params\['bias'\] must have the entries \['slope'\], got \[\]",
    ),
  ],
)
def test_invalid_arguments_raise(changes, message, monkeypatch):
  # jaxtyping, without which users run, would report wrong shapes of a score first.
  monkeypatch.setattr(config, 'jaxtyping_disable', True)
  with pytest.raises(ValueError, match=message):
    aj.attend(**(ARGUMENTS | changes))


def test_error_inside_a_custom_score_keeps_its_type():
  def branching_score(query, key):
    return key[:, 0] if query[0] > 0 else key[:, 1]

  with pytest.raises(jax.errors.TracerBoolConversionError):
    aj.attend(**ARGUMENTS, score=branching_score)


REVERSE_MODE_ONLY = [
  ('dot', 'flash', 3),
  ('additive', 'factored', 3),
  *((score, 'auto', size) for score in ('scaled_dot', 'additive', 'location_sensitive') for size in (3, 300)),
]


@pytest.mark.long
@pytest.mark.parametrize(('score', 'implementation', 'size'), REVERSE_MODE_ONLY)
def test_implementations_without_forward_mode_and_second_derivatives_raise_at_every_size(score, implementation, size):
  query = jnp.ones((2, size, D))
  params = aj.init_params(jax.random.key(0), score=score, query=D, key=D, features=2)

  def total(query, implementation=implementation):
    return aj.attend(query, query, query, score=score, params=params, implementation=implementation).context.sum()

  no_second = f"'{implementation}' has no second derivatives; use 'xla'"
  for transformed in (jax.hessian(total), jax.grad(lambda query: jax.grad(total)(query).sum())):
    with pytest.raises(aj.UserError, match=no_second):
      jax.eval_shape(transformed, query)
  no_forward = f"'{implementation}' has no forward-mode derivatives .*; use 'xla'"
  with pytest.raises(aj.UserError, match=no_forward):
    jax.jit(lambda query: jax.jvp(total, (query,), (query,)))(query)
  definition = functools.partial(total, implementation='xla')
  assert jax.eval_shape(jax.hessian(definition), query).shape == (2, size, D, 2, size, D)
  assert jax.eval_shape(jax.jacfwd(definition), query).shape == query.shape


def test_eager_forward_mode_of_auto_raises_in_the_call():
  def total(query):
    return aj.attend(query, query, query, implementation='auto').context.sum()

  query = jnp.ones((T, D))
  for run in (jax.jacfwd(total), lambda query: jax.linearize(total, query)[1](query)):
    with pytest.raises(aj.UserError, match=r"'auto' has no forward-mode derivatives .*; use 'xla'"):
      run(query)


@pytest.mark.long
@pytest.mark.parametrize('score', ['scaled_dot', 'location_sensitive'])
def test_reverse_mode_of_auto_equals_that_of_the_definition(score):
  """In loops, with recomputation, and mapped."""
  query = jax.random.normal(jax.random.key(1), (2, 2, T, D))
  params = aj.init_params(jax.random.key(0), score=score, query=D, key=D, features=2)

  def gradients(implementation):
    @jax.checkpoint
    def layer(params, query):
      attended = aj.attend(query, query, query, score=score, params=params, implementation=implementation)
      return query + attended.context, attended.weights.max()

    def objective(params, query):
      query, weights = jax.lax.scan(lambda query, _: layer(params, query), query, length=2)
      return query.sum() + weights.sum()

    return jax.vmap(jax.grad(objective, (0, 1)), (None, 0))(params, query)

  assert_close(*jax.jit(lambda: (gradients('auto'), gradients('xla')))(), atol=1e-6)


@pytest.mark.long
def test_single_steps_of_auto_have_reverse_mode_alone():
  row = aj.SCORES['coverage'], aj.ALIGNMENTS['softmax']
  params = aj.init_params(jax.random.key(0), score='coverage', query=D, key=D, features=D)
  memory = aj.Memory(jnp.ones((S, D)), jnp.ones((S, V)), jnp.ones(S, bool))
  carry = definition.init_carry(*row, S)

  def context(query):
    _, attended = IMPLEMENTATIONS['auto'].attend_step(*row, definition.without_key(params), carry, query, memory)
    return attended.context.sum()

  with pytest.raises(aj.UserError, match="'auto' has no forward-mode derivatives"):
    jax.jit(jax.jacfwd(context))(jnp.ones(D))
  assert jax.eval_shape(jax.jacrev(context), jnp.ones(D)).shape == (D,)


@pytest.mark.long
@pytest.mark.parametrize('shape', [(), (3,), (2, 5), (0,)])
def test_any_batch_axes_are_accepted(shape):
  attended = jax.jit(aj.attend)(*(jnp.ones((*shape, *x.shape[1:])) for x in ARGUMENTS.values()))
  assert attended.context.shape == (*shape, T, V)
  assert attended.weights.shape == (*shape, T, S)


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['xla', 'auto', 'chunked', 'flash'])
def test_batch_axes_broadcast(implementation):
  rng = jax.random.split(jax.random.key(0), 3)
  query = jax.random.normal(rng[0], (4, B, T, D))  # four beams of each source
  key = jax.random.normal(rng[1], (B, S, D))
  value = jax.random.normal(rng[2], (1, S, V))  # one table of values for all sources
  mask = aj.padding_mask(jnp.array([5, 7]), S)[:, None]
  full = (jnp.broadcast_to(key[None], (4, B, S, D)), jnp.broadcast_to(value[None], (4, B, S, V)))

  @jax.jit
  def run(key, value):
    return aj.attend(query, key, value, mask, implementation=implementation)

  shared = run(key, value)
  expected = run(*full)
  assert_close(shared, expected, rtol=1e-5, atol=1e-6)
  assert np.all(shared.weights[:, 0, :, 5:] == 0)
  gradient = jax.jit(jax.grad(lambda value: run(key, value).context.sum()))(value)
  by_hand = expected.weights.sum((0, 1, 2))
  np.testing.assert_allclose(gradient[0], jnp.broadcast_to(by_hand[:, None], (S, V)), rtol=1e-4)


def test_a_memory_needs_no_batch_axes():
  attended = aj.attend(ARGUMENTS['query'], ARGUMENTS['key'][0], ARGUMENTS['value'][0])
  assert attended.context.shape == (B, T, V)


@pytest.mark.long
@pytest.mark.parametrize(
  'mask',
  [None, MASK_OF_HEADS, jax.random.bernoulli(jax.random.key(3), 0.7, (B, HEADS, T, S))],
  ids=['none', 'mask', 'array'],
)
def test_heads_of_queries_share_those_of_keys(mask):
  """Four heads of queries and two of keys equal four of keys, each repeated."""
  query, key, value = heads_of()
  bias = jax.random.normal(jax.random.key(3), (HEADS, T, S))
  actual = aj.attend(query, key, value, mask, bias=bias)
  expected = aj.attend(query, *(jnp.repeat(x, HEADS // KEY_HEADS, 1) for x in (key, value)), mask, bias=bias)
  assert actual.context.shape == (B, HEADS, T, V) and actual.weights.shape == (B, HEADS, T, S)
  assert_close(actual, expected, rtol=1e-7, atol=1e-6)
  with pytest.raises(aj.UserError, match='must broadcast to each other'):
    aj.attend(query[:, :3], key, value)


@pytest.mark.long
@pytest.mark.parametrize('alignment', ['softmax', 'smoothed', COMBINED])
@pytest.mark.parametrize('mask', [MASK_OF_HEADS, EMPTY_MASK], ids=['causal', 'empty'])
def test_the_log_of_the_sum_is_that_of_the_scores_of_the_softmax(mask, alignment):
  params = aj.init_params(jax.random.key(1), score='scaled_dot', alignment=alignment, query=D, key=D, features=D)
  options = {'alignment': alignment, 'mask': mask, 'return_log_sum': True}
  inputs = heads_of()
  (_, attended), gradients = expected = value_and_gradients(inputs, params, 'xla', **options)
  assert attended.log_sum.dtype == jnp.float32 and attended.log_sum.shape == (B, HEADS, T)
  for implementation in ('chunked', 'flash', 'auto'):
    assert_close(value_and_gradients(inputs, params, implementation, **options), expected)
  if mask is EMPTY_MASK:
    assert np.isneginf(attended.log_sum[0, :, 1]).all() and np.isfinite(attended.log_sum[1]).all()
    assert not np.any(gradients[0][0][0, :, 1])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
  if alignment == 'softmax':
    scores = jnp.einsum('bntd,bnsd->bnts', inputs[0], jnp.repeat(inputs[1], 2, 1)) / np.sqrt(D)
    dense = jnp.broadcast_to(mask.dense(T, S), scores.shape)
    assert_close(attended.log_sum, jax.nn.logsumexp(jnp.where(dense, scores, -jnp.inf), axis=-1))
  half = [x.astype(jnp.bfloat16) for x in inputs]
  assert aj.attend(*half, params=params, **options).log_sum.dtype == jnp.float32


def test_the_log_of_the_sum_of_an_additive_score_and_what_has_none():
  inputs, params = heads_of(), {'score': {'v': jnp.arange(5.0)}}
  options = {'score': 'additive', 'return_log_sum': True, 'return_weights': False}
  expected = value_and_gradients(inputs, params, 'xla', **options)
  assert_close(value_and_gradients(inputs, params, 'factored', **options), expected)
  with pytest.raises(
    aj.UserError, match=r'return_log_sum needs a form of softmax, .*; expected one of: softmax, smoot'
  ):
    aj.attend(*inputs, alignment='sparsemax', return_log_sum=True)
  for implementation, changes in (
    ('splash', {'return_log_sum': True}),
    ('pallas_additive', options | {'params': params}),
  ):
    message = f"'{implementation}': the kernel does not return the log of the sum"
    with pytest.raises(aj.UserError, match=message), compile_for('interpret'):
      aj.attend(*inputs, **changes, implementation=implementation)


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'implementation'),
  [('additive', 'xla'), ('additive', 'factored'), ('normed_dot', 'chunked'), ('normed_dot', 'flash')],
)
def test_parameters_may_have_the_leading_axes_of_queries(score, implementation):
  """A sink and projections of each head, and vectors of each head and sequence, equal attend for each head alone."""
  inputs = heads_of()
  rngs = jax.random.split(jax.random.key(2), 4)
  params = {'alignment': {'sink': jnp.arange(4.0)}}
  if score == 'additive':
    params['score'] = {'v': jax.random.normal(rngs[0], (B, HEADS, F))}
    params['query'] = jax.random.normal(rngs[2], (HEADS, D, F))
    params['key'] = jax.random.normal(rngs[3], (KEY_HEADS, D, F))
  else:
    gains = {'query_gain': (B, HEADS, D), 'key_gain': (D,)}
    params['score'] = {name: jax.random.normal(rngs[0], shape) for name, shape in gains.items()}
  options = {'score': score, 'alignment': 'sink_softmax'}
  (_, attended), gradients = value_and_gradients(inputs, params, implementation, mask=MASK_OF_HEADS, **options)

  def of_head(path, x, b, n):
    core = {'sink': 0, 'query': 2, 'key': 2}.get(path[-1].key, 1)
    head = n // 2 if path[-1].key == 'key' else n
    return x[(b, head)[2 - (x.ndim - core) :]]

  for b, n in np.ndindex(B, HEADS):
    of_this = jax.tree.map_with_path(lambda path, x, b=b, n=n: of_head(path, x, b, n), params)
    operands = inputs[0][b, n], inputs[1][b, n // 2], inputs[2][b, n // 2]
    alone = aj.attend(*operands, MASK_OF_HEADS.dense(T, S)[b, 0], params=of_this, **options)
    assert_close(jax.tree.map(lambda x, b=b, n=n: x[b, n], attended), alone)
  assert jax.tree.map(jnp.shape, gradients[1]) == jax.tree.map(jnp.shape, params)


def distance_bias(*, query_position, key_position, slope):
  """Distances, without the position before the query."""
  distance = query_position - key_position
  return jnp.where(distance == 1, -jnp.inf, -slope * jnp.abs(distance).astype(slope.dtype))


DISTANCE = aj.Row(distance_bias, params={'slope': aj.Param(())})


@pytest.mark.long
@pytest.mark.parametrize('alignment', ['softmax', COMBINED])
@pytest.mark.parametrize('implementation', ['chunked', 'flash', 'factored', 'linear', 'auto'])
def test_a_bias_may_be_a_function_of_positions(implementation, alignment, monkeypatch):
  monkeypatch.setattr(flash_blocks, 'BLOCK', 2)
  monkeypatch.setattr(chunked, 'MAX_BLOCK_SCORES', 2 * S)
  score = {'factored': 'additive', 'linear': 'elu_dot'}.get(implementation, 'scaled_dot')
  alignment = 'proportional' if implementation == 'linear' else alignment
  params = aj.init_params(jax.random.key(1), score=score, alignment=alignment, query=D, key=D, features=D)
  slopes = jnp.arange(1.0, 5.0) / 4
  options = {'score': score, 'alignment': alignment, 'mask': MASK_OF_HEADS}
  params_of_bias = params | {'bias': {'slope': slopes}}
  actual = value_and_gradients(heads_of(), params_of_bias, implementation, bias=DISTANCE, **options)
  assert_close(value_and_gradients(heads_of(), params_of_bias, 'xla', bias=DISTANCE, **options), actual)
  positions = {'query_position': jnp.arange(T)[:, None] + 2, 'key_position': jnp.arange(S)[None]}
  array = jnp.stack([distance_bias(**positions, slope=slope) for slope in slopes])
  (_, expected), gradients = value_and_gradients(heads_of(), params, 'xla', bias=array, **options)
  assert_close(actual[0][1], expected)
  assert_close(actual[1][0], gradients[0])


def sine_of_position(*, key_position, factor=1.0):
  return jnp.sin(factor * key_position.astype(jnp.float32))


@pytest.mark.long
def test_flash_stores_no_array_for_a_bias_of_positions():
  query, key, value = (jnp.ones((2048, 4)) for _ in range(3))

  def context(query):
    bias = functools.partial(sine_of_position, factor=2.0)
    return aj.attend(query, key, value, bias=bias, implementation='flash', return_weights=False).context.sum()

  memory = jax.jit(jax.grad(context)).lower(query).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 2 * 2048 * 2048  # an array [T, S] has twice as many bytes


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['chunked', 'flash', 'linear'])
def test_scores_may_depend_on_positions_without_being_recurrent(implementation, monkeypatch):
  """A product of rotated factors, that of rotary positions."""
  monkeypatch.setattr(chunked, 'MAX_BLOCK_SCORES', 2 * S)

  def turn(x, positions):  # [n, D], [n]
    angles = positions.astype(x.dtype)[:, None] * jnp.array([[0.3, 0.05]])
    first, second = x[:, :2], x[:, 2:4]
    return jnp.abs(
      jnp.concatenate([first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles)], axis=1)
    )

  def rotated(query, key, *, query_position, key_position):
    return turn(query[None], jnp.asarray(query_position)[None])[0], turn(key, key_position)

  def score(query, key, *, query_position, key_position):
    q, k = rotated(query, key, query_position=query_position, key_position=key_position)
    return k @ q

  row = aj.Row(score, form=Product(rotated, nonnegative=True))
  assert not row.is_recurrent and not row.is_pointwise
  alignment = 'proportional' if implementation == 'linear' else 'softmax'
  options = {'score': row, 'alignment': alignment, 'return_weights': False}
  options['mask'] = aj.Mask.lengths(jnp.array([[S], [4]])).at(2)
  expected = value_and_gradients(heads_of(), None, 'xla', **options)
  assert_close(value_and_gradients(heads_of(), None, implementation, **options), expected)
  query, key, value = (x[0, 0] for x in heads_of())
  scores = jnp.stack([score(q, key, query_position=t + 2, key_position=jnp.arange(S)) for t, q in enumerate(query)])
  weights = scores / scores.sum(1, keepdims=True) if implementation == 'linear' else jax.nn.softmax(scores)
  assert_close(expected[0][1].context[0, 0], weights @ value)


@pytest.mark.long
def test_an_alignment_may_depend_on_positions_one_query_at_a_time():
  def nearest(scores, mask, *, query_position, key_position):
    return jnp.where(mask & (key_position == query_position), 1.0, 0.0)

  attended = aj.attend(*ARGUMENTS.values(), alignment=nearest)
  np.testing.assert_array_equal(attended.weights, jnp.broadcast_to(jnp.eye(T, S), (B, T, S)))
  row = aj.Row(nearest)
  carry = aj.init_carry('dot', row, S)
  memory = aj.remember(ARGUMENTS['key'][0], ARGUMENTS['value'][0])
  for t in range(T):
    carry, step = aj.attend_step('dot', row, None, carry, ARGUMENTS['query'][0, t], memory)
    np.testing.assert_array_equal(step.weights, attended.weights[0, t])
