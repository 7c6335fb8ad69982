"""Attention as a pure function, in NNX and in Equinox equals the Linen module with the same parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.modules import attention_nnx
from attention_jax.modules.heads import attend_heads, init_heads
from tests.modules.helpers import attend_all
from tests.sampled_cases import sample_cases

B, T, S, DQ, DK, FEATURES = 3, 5, 7, 11, 13, 4
CASES = [
  ('additive', 'softmax', 1),
  ('additive', 'sparsemax', 2),
  ('scaled_dot', 'entmax15', 4),
  ('location_sensitive', 'local_p(width=3)', 2),
  ('general', 'softmax', 1),
]


def inputs():
  query = jax.random.normal(jax.random.key(1), (B, T, DQ))
  encoded = jax.random.normal(jax.random.key(2), (B, S, DK))
  return query, encoded, aj.padding_mask(jnp.array([S, 4, 1]), S)


def linen(score, alignment, heads, **options):
  """Parameters of the Linen module, and its result."""
  module = aj.Attention(score, alignment, features=FEATURES, heads=heads, **options)
  result, variables = jax.jit(lambda: module.init_with_output(jax.random.key(0), *inputs(), method=attend_all))()
  return variables['params'], result


def init(**options):
  return init_heads(**{'rng': jax.random.key(0), 'query': DQ, 'key': DK, 'features': FEATURES} | options)


def assert_equal(actual, expected):
  for array, expected_array in zip(actual, expected, strict=True):
    np.testing.assert_allclose(array, expected_array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('score', 'alignment', 'heads'), sample_cases(CASES, 4))
def test_attend_heads_equals_linen(score, alignment, heads):
  params, expected = linen(score, alignment, heads)
  query, encoded, mask = inputs()
  attend = jax.jit(functools.partial(attend_heads, score=score, alignment=alignment))
  assert_equal(attend(params, query, encoded, mask[:, None]), expected)
  assert_equal(attend(params, query, encoded, aj.Mask.lengths(mask.sum(1))), expected)
  initial_params = jax.eval_shape(lambda: init(score=score, alignment=alignment, heads=heads))
  assert jax.tree.map(jnp.shape, initial_params) == jax.tree.map(jnp.shape, params)


@pytest.mark.long
def test_nnx_equals_linen_and_has_gradients():
  (score, alignment, heads), (query, encoded, mask) = CASES[3], inputs()
  params, expected = linen(*CASES[3])
  module = attention_nnx.Attention(DQ, DK, FEATURES, heads, score, alignment, rngs=nnx.Rngs(0))
  gradient = nnx.jit(nnx.grad(lambda module: module(query, encoded, mask[:, None]).context.sum()))(module)
  assert all(bool(jnp.any(x != 0)) for x in jax.tree.leaves(gradient['params']['value_kernel']))
  nnx.update(module, nnx.State({'params': jax.tree.map(nnx.Param, params)}))
  assert_equal(nnx.jit(lambda module, *x: module(*x))(module, query, encoded, mask[:, None]), expected)


@pytest.mark.long
def test_equinox_equals_linen_and_trains():
  eqx = pytest.importorskip('equinox')
  from attention_jax.modules import attention_equinox

  (score, alignment, heads), (query, encoded, mask) = CASES[3], inputs()
  params, expected = linen(*CASES[3])
  module = attention_equinox.Attention(DQ, DK, FEATURES, heads, score, alignment, rng=jax.random.key(0))
  gradient = eqx.filter_jit(eqx.filter_grad(lambda m: m(query, encoded, mask[:, None]).context.sum()))(module)
  updates, _ = optax.sgd(0.1).update(gradient, optax.sgd(0.1).init(eqx.filter(module, eqx.is_array)))
  assert not eqx.tree_equal(eqx.apply_updates(module, updates), module)
  module = eqx.tree_at(lambda module: module.params, module, params)
  assert_equal(eqx.filter_jit(module)(query, encoded, mask[:, None]), expected)


@pytest.mark.parametrize('heads', [1, 2])
def test_queries_and_memories_without_batch_axes_are_shared(heads):
  query, encoded, mask = inputs()
  params = init(heads=heads)
  attend = jax.jit(attend_heads)
  every_query = jnp.broadcast_to(query[0], query.shape)
  assert_equal(attend(params, query[0], encoded, mask[:, None]), attend(params, every_query, encoded, mask[:, None]))
  every_memory = jnp.broadcast_to(encoded[0], encoded.shape)
  assert_equal(attend(params, query, encoded[0]), attend(params, query, every_memory))


@pytest.mark.long
@pytest.mark.parametrize('shared', [False, True])
def test_masked_content_reaches_no_gradient(shared):
  query, encoded, mask = inputs()
  if shared:
    encoded, mask = encoded[1], mask[1:2]
  gradient = jax.jit(jax.grad(lambda params, x: attend_heads(params, query, x, mask[:, None]).context.sum()))
  params = init(heads=2)
  dirty = jnp.where(mask.reshape(*encoded.shape[:-1], 1), encoded, jnp.nan)
  jax.tree.map(np.testing.assert_array_equal, gradient(params, dirty), gradient(params, jnp.nan_to_num(dirty)))


@pytest.mark.long
def test_attend_heads_equals_linen_for_one_head_with_projected_values():
  query, encoded, mask = inputs()
  params, expected = linen('scaled_dot', 'softmax', 1, project_values=True)
  assert_equal(attend_heads(params, query, encoded, mask[:, None], score='scaled_dot'), expected)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'bias': True}, r"bias=False, got params\['\w+'\]\['bias'\]"),
    ({'gate': True}, r"gate=False, got params\['gate_kernel'\]"),
    ({'differential': True}, r"differential=False, got params\['difference'\]"),
    ({'kv_heads': 1}, r'kv_heads=0, got kernels of \[2, 1, 1\] heads'),
  ],
)
def test_parameters_that_are_not_supported_are_errors(options, message):
  query, encoded, mask = inputs()
  params, _ = linen('scaled_dot', 'softmax', 2, **options)
  with pytest.raises(aj.UserError, match=message):
    attend_heads(params, query, encoded, mask[:, None], score='scaled_dot')


@pytest.mark.long
@pytest.mark.parametrize('shape', [(B, 0, DQ), (0, 3, DQ)])
def test_several_heads_attend_with_no_query_at_all(shape):
  query, encoded, mask = jnp.zeros(shape), jnp.zeros((shape[0], S, DK)), jnp.ones((shape[0], S), bool)
  params = init(heads=2)
  apply = functools.partial(aj.Attention(features=FEATURES, heads=2).apply, {'params': params}, method=attend_all)
  for attend in (lambda: attend_heads(params, query, encoded), lambda: apply(query, encoded, mask)):
    assert jax.eval_shape(attend).context.shape == (*shape[:2], FEATURES)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'heads': 3}, 'heads must be at least 1 and divide features, got features=4 and heads=3'),
    ({'features': 0}, 'query, key and features must be at least 1, got 11, 13 and 0'),
    ({'rng': 0}, 'attention: rng must be a single PRNG key'),
  ],
)
def test_sizes_that_are_invalid_raise(options, message):
  with pytest.raises(aj.UserError, match=message):
    init(**options)


def without(*names):
  return lambda params: {name: entry for name, entry in params.items() if name not in names}


INCOMPLETE = r"must have both 'value_kernel' and 'join' if .*; got query_kernel"


@pytest.mark.parametrize('heads', [1, 2])
@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda q, k, m: {'mask': m}, r'attend: mask \(3, 7\) does not broadcast to'),
    (lambda q, k, m: {'mask': m[:, None, 1:]}, r'attend: mask \(3, 1, 6\) does not broadcast to'),
    (lambda q, k, m: {'encoded': k[..., :DQ]}, r'must be \[.*11, F.*\] to project \w+ \[3, 7, 11\], got \[.*13, \d\]'),
    (lambda q, k, m: {'encoded': k[0, 0]}, r'attention: encoded must be \[..., S, D\], got \[13\]'),
    (lambda q, k, m: {'encoded': k.astype(jnp.int32)}, 'attention: encoded must be float, got int32'),
    (lambda q, k, m: {'rng': 0}, 'attention: rng must be a single PRNG key'),
  ],
)
def test_arguments_that_are_invalid_raise(change, message, heads):
  query, encoded, mask = inputs()
  params = init(heads=heads)
  arguments = {'query': query, 'encoded': encoded} | change(query, encoded, mask)
  with pytest.raises(aj.UserError, match=message):
    attend_heads(params, **arguments)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (without('value_kernel'), INCOMPLETE),
    (without('join'), INCOMPLETE),
    (without('value_kernel', 'join'), INCOMPLETE),
    (lambda params: {**params, 'positions': {'gate': {}}}, r"with positions=None, got params\['pos"),
    (lambda params: {'params': params}, r"some of query_kernel, .*, got params\['params'\]"),
  ],
)
def test_missing_and_unknown_parameters_raise(change, message):
  with pytest.raises(aj.UserError, match=message):
    attend_heads(change(init(heads=2)), *inputs()[:2])
