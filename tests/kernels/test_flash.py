"""Products block by block equal the definition for any mask, bias and shape, and leave out what nobody may look at."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import attention_jax as aj
from attention_jax.functional.table import Product, lookup
from attention_jax.kernels import flash

B, T, S, D, V = 2, 13, 11, 6, 5
PRODUCTS = [name for name, row in aj.SCORES.items() if isinstance(row.form, Product)]
RANDOM = np.random.default_rng(0)
OWN = jnp.asarray(RANDOM.random((B, T, S)) < 0.5).at[0, 3].set(False).at[:, :, 4].set(False)
MASKS = {
  'none': None,
  'padding': aj.padding_mask(jnp.asarray([S, 4]), S)[:, None],
  'nothing': jnp.zeros((B, 1, S), bool),
  'own': OWN,
  'causal': aj.causal_mask(T)[:, :S],
}
BIAS = jnp.asarray(RANDOM.normal(size=(B, T, S)), jnp.float32).at[1, 2].set(-jnp.inf).at[0, :, 1].set(-jnp.inf)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(flash, 'BLOCK', 4)


def problem(score='scaled_dot', dtype=jnp.float32, shapes=((B, T, D), (B, S, D), (B, S, V))):
  draw = lambda shape: jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)
  params = aj.init_params(jax.random.key(1), score=score, query=D, key=D, features=7)
  return jax.tree.map(lambda x: x.astype(dtype), params), *map(draw, shapes)


def run(implementation, params, query, key, value, mask=None, bias=None, **options):
  options = {'score': 'scaled_dot', 'return_weights': False} | options
  return aj.attend(query, key, value, mask, bias=bias, params=params, implementation=implementation, **options).context


def gradients(implementation, given, mask=None, bias=None, **options):
  def loss(given, bias):
    return jnp.sum(jnp.sin(run(implementation, *given, mask, bias, **options).astype(jnp.float32)))

  wanted = 0 if bias is None else (0, 1)
  return jax.jit(jax.value_and_grad(loss, argnums=wanted))(given, bias)


def assert_close(one, other, rtol=1e-4, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), one, other)


@pytest.mark.parametrize('bias', [None, BIAS], ids=['plain', 'biased'])
@pytest.mark.parametrize('mask', MASKS.values(), ids=MASKS)
def test_it_equals_the_definition_for_any_mask(mask, bias):
  given = problem()
  same = functools.partial(gradients, given=given, mask=mask, bias=bias)
  assert_close(same('flash'), same('xla'))
  assert_close(run('flash', *given, mask, bias), run('xla', *given, mask, bias))


@pytest.mark.parametrize('bias', [None, BIAS], ids=['plain', 'biased'])
def test_it_drops_the_weights_that_the_definition_drops(bias):
  row = aj.with_dropout(lookup('softmax(temperature=0.3)', aj.ALIGNMENTS, 'alignment'), 0.4)
  options = {'alignment': row, 'rng': jax.random.key(5), 'deterministic': False}
  same = functools.partial(gradients, given=problem(), mask=OWN, bias=bias, **options)
  assert_close(same('flash'), same('xla'))
  params, *inputs = problem()
  weights = lambda name: aj.attend(*inputs, OWN, params=params, bias=bias, implementation=name, **options).weights
  assert_close(weights('flash'), weights('xla'))
  still = functools.partial(run, 'flash', *problem(), OWN, bias)
  assert_close(still(alignment=row, deterministic=True), still(alignment='softmax(temperature=0.3)'))


@pytest.mark.parametrize('alignment', ['softmax', 'softmax(temperature=0.3)'])
@pytest.mark.parametrize('score', PRODUCTS)
def test_every_product_and_temperature(score, alignment):
  same = functools.partial(gradients, given=problem(score), mask=OWN, score=score, alignment=alignment)
  assert_close(same('flash'), same('xla'))


@pytest.mark.parametrize(('steps', 'size'), [(1, 1), (1, 9), (4, 4), (5, 1), (17, 3)])
def test_any_length(steps, size):
  given = problem(shapes=((steps, D), (size, D), (size, V)))
  assert_close(gradients('flash', given), gradients('xla', given))


def test_what_is_hidden_changes_nothing_and_what_is_extreme_stays_finite():
  params, query, key, value = problem()
  hidden = aj.padding_mask(jnp.asarray([S, 4]), S)
  behind = lambda x, filler: jnp.where(hidden[..., None], x, filler)
  expected = gradients('flash', (params, query, key, value), hidden[:, None])
  for filler in (jnp.nan, jnp.inf, 1e30):
    found = gradients('flash', (params, query, behind(key, filler), behind(value, filler)), hidden[:, None])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  for scale in (1e4, -1e4):
    given = params, scale * query, key, value
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradients('flash', given, OWN)))
    assert_close(run('flash', *given, OWN), run('xla', *given, OWN))


# Of float32 both are so large that a sum of exponentials cannot be told beside them.
@pytest.mark.parametrize('size', [-1e9, 8e5, 8e7])
def test_scores_that_are_all_large(size):
  """As those of a query that sees nothing but padding by a bias of -1e9."""
  params, query, key, value = problem()
  bias = jnp.zeros((B, T, S)).at[:, 2].set(size).at[0].set(size)
  same = functools.partial(gradients, given=(params, query, key, value), bias=bias)
  assert_close(same('flash'), same('xla'))
  both = [aj.attend(query, key, value, params=params, bias=bias, implementation=name) for name in ('flash', 'xla')]
  assert_close(*both)
  np.testing.assert_allclose(both[0].weights.sum(-1), 1, rtol=1e-5)


def test_a_nan_that_is_seen_shows_where_the_definition_shows_it():
  params, query, key, value = problem()
  key = key.at[0, 5].set(jnp.nan)
  mask = OWN.at[0, :4, 5].set(True).at[0, 4:, 5].set(False)
  both = [aj.attend(query, key, value, mask, params=params, implementation=name) for name in ('flash', 'xla')]
  assert np.isnan(both[0].context[0, :4]).all() and not np.isnan(both[0].context[0, 4:]).any()
  assert_close(*both)


def test_types():
  given = problem(dtype=jnp.bfloat16)
  found, expected = (run(name, *given, OWN) for name in ('flash', 'xla'))
  assert found.dtype == expected.dtype == jnp.bfloat16
  assert_close(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=1e-2)
  with jax.enable_x64(True):
    given = problem(dtype=jnp.float64)
    one = lambda *given: run('flash', *given, OWN, BIAS.astype(jnp.float64))
    assert one(*given).dtype == jnp.float64
    check_grads(jax.jit(one), given, order=1, modes=('rev',), eps=1e-6, rtol=1e-5, atol=1e-7)


def test_under_vmap_scan_and_shard_map():
  given = problem()
  expected = run('flash', *given, OWN)
  arrays = (*given[1:], OWN)
  one = lambda query, key, value, mask: run('flash', given[0], query, key, value, mask)
  mesh = jax.make_mesh((B,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.shard_map(jax.vmap(one), mesh=mesh, in_specs=P('data'), out_specs=P('data'))
  loss = lambda fn: jax.jit(jax.grad(lambda query: jnp.sum(jnp.sin(fn(query, *arrays[1:])))))(arrays[0])
  scanned = jax.jit(lambda *arrays: jax.lax.scan(lambda _, x: ((), one(*x)), (), arrays)[1])
  for fn in (jax.jit(jax.vmap(one)), scanned, jax.jit(sharded)):
    assert_close(fn(*arrays), expected)
  assert_close(loss(sharded), loss(jax.vmap(one)))


def test_only_blocks_that_are_seen_are_walked():
  blocks = flash.Blocks.of(16, 16)
  assert blocks == (4, 4, 4, 4)
  order, full, live = flash._block_order(*blocks.classify_blocks(blocks.pad(aj.causal_mask(16))))
  assert live.tolist() == [1, 2, 3, 4] and full.tolist() == [0, 1, 2, 3]
  for i in range(4):
    assert sorted(order[i, : live[i]].tolist()) == list(range(i + 1)) and order[i, full[i]] == i
  assert flash._block_order(*blocks.classify_blocks(blocks.pad(aj.window_mask(16, 1, 0))))[2].tolist() == [1, 2, 2, 2]
  _, full, live = flash._block_order(*blocks.classify_blocks(blocks.pad(aj.padding_mask(5, 16)[None])))
  assert full.tolist() == [1] * 4 and live.tolist() == [2] * 4


@pytest.mark.parametrize('bias', [None, BIAS], ids=['plain', 'biased'])
def test_weights_on_request_have_gradients_of_their_own(bias):
  params, query, key, value = problem()

  def loss(implementation, query, key):
    given = {'params': params, 'bias': bias, 'implementation': implementation}
    attended = aj.attend(query, key, value, OWN, **given)
    return jnp.sum(jnp.sin(attended.context)) + jnp.sum(jnp.cos(3 * attended.weights)), attended

  run = lambda name: jax.jit(jax.value_and_grad(functools.partial(loss, name), (0, 1), has_aux=True))(query, key)
  assert_close(run('flash'), run('xla'))


def test_the_kernel_runs_when_a_model_attends(monkeypatch):
  seen, attended = [], flash.attention_context
  monkeypatch.setattr(flash, 'attention_context', lambda *given: seen.append(1) or attended(*given))
  module = aj.Attention('general', 'softmax', 6, implementation='flash')
  query, encoded = jnp.ones((B, T, D)), jnp.ones((B, S, D))
  look = lambda module: module.parallel(query, module.remember(encoded, jnp.ones((B, S), bool)))
  module.init_with_output(jax.random.key(0), method=look)
  assert seen


def test_what_it_refuses():
  params, query, key, value = problem()
  with pytest.raises(aj.UserError, match="'flash' cannot compute this: the score is not a product"):
    run('flash', params, query, key, value, score='location')
  with pytest.raises(aj.UserError, match="'flash' cannot compute this: the alignment is not softmax"):
    run('flash', params, query, key, value, alignment='sparsemax')
