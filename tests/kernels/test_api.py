"""The public `attend`: errors with the names and shapes of arguments and what is expected, and batch axes."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

import attention_jax as aj
from attention_jax.functional import attend as definition
from attention_jax.kernels.api import IMPLEMENTATIONS

B, T, S, D, K, V, F = 2, 3, 7, 5, 11, 13, 17
ARGUMENTS = {'query': jnp.ones((B, T, D)), 'key': jnp.ones((B, S, D)), 'value': jnp.ones((B, S, V))}
ADDITIVE = {
  'score': 'additive',
  'params': {'score': {'v': jnp.ones(F)}, 'query': jnp.ones((D, F)), 'key': jnp.ones((K, F))},
}


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
    ({'query': None}, 'attend: query must be float, got None'),
    ({'key': 'memory'}, "attend: key must be float, got 'memory'"),
    ({'key': jnp.ones((B, S, K))}, r'query \(5,\) and key \(7, 11\)'),
    ({'query': jnp.ones((B, T, 1))}, r'query \(1,\) and key \(7, 5\)'),
    ({'query': jnp.ones((B, T, 1)), 'implementation': 'flash'}, r'query \(1,\) and key \(7, 5\)'),
    ({'key': jnp.ones((B, S, 0)), 'query': jnp.ones((B, T, 0))}, 'must have at least one feature, got query'),
    ({'mask': jnp.ones((B, T, S))}, 'mask must be bool, .* got float32'),
    (
      {'mask': jnp.ones((B, S), bool)},
      r'mask \(2, 7\) does not broadcast to \[..., T, S\] = \(2, 3, 7\); pass a padding mask .* as mask\[:, None\]',
    ),
    ({'mask': jnp.ones(6, bool)}, r'mask \(1, 6\) does not broadcast to \[..., T, S\] = \(2, 3, 7\)'),
    ({'mask': jnp.ones((B, 1, 6), bool)}, r'mask \(2, 1, 6\) does not broadcast to \[..., T, S\] = \(2, 3, 7\)'),
    ({'mask': jnp.ones((1, B, T, S), bool)}, r'mask \(1, 2, 3, 7\) does not broadcast'),
    ({'bias': jnp.ones((T, 6))}, r'bias \(3, 6\) does not broadcast to .*; pass a bias \[B, S\] as bias\[:, None\]'),
    ({'bias': jnp.ones((T, S), int)}, 'bias must be float, got int32'),
    ({'score': 'general'}, r"params\['score'\] must have the entries \['w'\], got \[\]; use init_params"),
    ({'score': 'dot', 'params': {'score': {'w': 1}}}, r"params\['score'\] must have the entries \[\], got \['w'\]"),
    ({'alignment': 'entmax'}, r"params\['alignment'\] must have the entries \['alpha'\], got \[\]"),
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
      {'alignment': 'entmax', 'params': {'alignment': {'alpha': jnp.ones(S)}}},
      r"params\['alignment'\]\['alpha'\] must be \[\], got \[7\]",
    ),
    ({'params': [1]}, r'params must be a dictionary .* as returned by init_params, got \[1\]'),
    ({'params': np.ones(2)}, r'params must be a dictionary .* as returned by init_params, got array\(\[1., 1.\]\)'),
    ({'params': 0}, r'params must be a dictionary .* as returned by init_params, got 0'),
    ({'params': {'query': None}}, r"params\['query'\] must be an array, got None; use init_params"),
    ({'params': {'score': None}}, r"params\['score'\] must be a dictionary, got None; use init_params"),
    ({'score': lambda query, key: key}, r'\[S\] = \[7\], got \(7, 5\)'),
    ({'score': lambda query, key: None}, r'\[S\] = \[7\], got \(\)'),
    ({'alignment': lambda scores, mask: scores[1:]}, r'\[S\] = \[7\], got \(6,\)'),
    (
      {'alignment': aj.alignments.monotonic},
      'alignment: a function that takes state needs init_state: pass Row',
    ),
    (ADDITIVE, r"params\['key'\] must be \[5, F\] to project key \[2, 7, 5\], got \[11, 17\]"),
    (
      {'score': 'additive', 'params': {'score': {'v': jnp.ones(F)}}},
      r"params\['score'\]\['v'\] must be \[features = 5\], got \[17\]",
    ),
    (
      {'score': 'location(max_positions=3)', 'params': {'score': {'w': jnp.ones((3, D))}}},
      'S=7 .*max_positions=3',
    ),
    ({'alignment': sampling_alignment}, 'this alignment samples; rng must be a PRNG key, got None'),
    ({'rng': 3}, r'attend: rng must be a single PRNG key, such as jax\.random\.key\(0\), got 3'),
    ({'alignment': 'sofmax'}, "unknown alignment 'sofmax'"),
    ({'score': 'dott'}, r"unknown score 'dott' \(did you mean 'dot'\?\)"),
    ({'alignment': 'softmax(temperature=0.0)'}, 'temperature must be greater than 0, got 0.0'),
    ({'alignment': 'entmax(alpha=1)'}, 'alpha must be greater than 1, got 1'),
    ({'implementation': 'xlaa'}, r"unknown implementation 'xlaa' \(did you mean 'xla'\?\); expected one of: "),
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
  transformed = (
    lambda query: jax.jvp(total, (query,), (query,)),
    jax.jacfwd(total),
    lambda query: jax.linearize(total, query)[1](query),
  )
  for run in transformed:
    with pytest.raises(aj.UserError, match=r"'auto' has no forward-mode derivatives .*; use 'xla'"):
      run(query)


@pytest.mark.parametrize('score', ['scaled_dot', 'location_sensitive'])
def test_reverse_mode_of_auto_equals_that_of_the_definition(score):
  """In loops, with recomputation, mapped, and stepwise."""
  query = jax.random.normal(jax.random.key(1), (2, 2, T, D))
  params = aj.init_params(jax.random.key(0), score=score, query=D, key=D, features=2)

  def objective(params, query, implementation):
    @jax.checkpoint
    def layer(query, _):
      attended = aj.attend(query, query, query, score=score, params=params, implementation=implementation)
      return query + attended.context, attended.weights.max()

    query, weights = jax.lax.scan(layer, query, length=2)
    return query.sum() + weights.sum()

  @jax.jit
  def gradients(params, query):
    def gradient_of(implementation):
      return jax.vmap(jax.grad(functools.partial(objective, implementation=implementation), (0, 1)), (None, 0))

    return gradient_of('auto')(params, query), gradient_of('xla')(params, query)

  actual, expected = gradients(params, query)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), actual, expected)


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


def test_attend_step_rejects_a_projection_of_the_key():
  params = aj.init_params(jax.random.key(0), score='additive', query=D, key=D, features=D)
  carry = definition.init_carry('additive', 'softmax', S)
  memory = aj.Memory(jnp.ones((S, D)), jnp.ones((S, V)), jnp.ones(S, bool))
  with pytest.raises(aj.UserError, match=r'make it once by remember\('):
    aj.attend_step('additive', 'softmax', params, carry, jnp.ones(D), memory)


def test_xla_is_the_definition():
  assert IMPLEMENTATIONS['xla'].attend_batch is definition.attend_batch


@pytest.mark.parametrize('shape', [(), (3,), (2, 5), (0,)])
def test_any_batch_axes_are_accepted(shape):
  attended = jax.jit(aj.attend)(*(jnp.ones((*shape, *x.shape[1:])) for x in ARGUMENTS.values()))
  assert attended.context.shape == (*shape, T, V)
  assert attended.weights.shape == (*shape, T, S)


def test_a_name_that_needs_a_missing_package_raises(monkeypatch):
  monkeypatch.delitem(sys.modules, 'attention_jax.modules.attention', raising=False)
  monkeypatch.setitem(sys.modules, 'flax', None)
  with pytest.raises(ModuleNotFoundError, match=r"attention_jax\.Attention needs pip install 'attention_jax\[train\]'"):
    _ = aj.Attention


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
  np.testing.assert_allclose(shared.context, expected.context, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(shared.weights, expected.weights, rtol=1e-5, atol=1e-6)
  assert np.all(shared.weights[:, 0, :, 5:] == 0)
  gradient = jax.jit(jax.grad(lambda value: run(key, value).context.sum()))(value)
  by_hand = expected.weights.sum((0, 1, 2))
  np.testing.assert_allclose(gradient[0], jnp.broadcast_to(by_hand[:, None], (S, V)), rtol=1e-4)


def test_a_memory_needs_no_batch_axes():
  attended = aj.attend(ARGUMENTS['query'], ARGUMENTS['key'][0], ARGUMENTS['value'][0])
  assert attended.context.shape == (B, T, V)


@pytest.mark.parametrize('mask', [None, 'lengths', 'per head'])
def test_heads_of_queries_share_those_of_keys(mask):
  """Four heads of queries and two of keys equal four of keys, each repeated."""
  heads, groups = 4, 2
  rngs = jax.random.split(jax.random.key(0), 4)
  query = jax.random.normal(rngs[0], (B, heads, T, D))
  key, value = (jax.random.normal(rng, (B, groups, S, n)) for rng, n in zip(rngs[1:3], (D, V), strict=True))
  masks = {
    'lengths': aj.Mask.lengths(jnp.array([S, 3])[:, None]) & aj.Mask.causal(),
    'per head': jax.random.bernoulli(rngs[3], 0.7, (B, heads, T, S)),
  }
  bias = jax.random.normal(rngs[3], (heads, T, S))
  actual = aj.attend(query, key, value, masks.get(mask), bias=bias)
  expected = aj.attend(query, *(jnp.repeat(x, heads // groups, 1) for x in (key, value)), masks.get(mask), bias=bias)
  assert actual.context.shape == (B, heads, T, V) and actual.weights.shape == (B, heads, T, S)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), actual, expected)
  with pytest.raises(aj.UserError, match='must broadcast to each other'):
    aj.attend(query[:, :3], key, value)
