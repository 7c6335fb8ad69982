"""Positions against literal formulas, their gradients in 16 bits, and invalid options."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.modules.attention import Attention
from attention_jax.modules.positions import POSITIONS, alibi_slopes, bucket_of, parse_position
from tests.modules.helpers import assert_close, draw, variables

B, N, T, F = 2, 3, 11, 6
INDICES = jnp.arange(T)
ALL = jnp.ones((B, 1, T), bool)
QUERY_MASK = jnp.asarray(np.random.default_rng(0).random((B, T, T)) < 0.6)


@pytest.mark.long
def test_sinusoids_equal_the_formula():
  x = draw(B, T, 8)
  added = POSITIONS['sinusoidal']().embed(x, INDICES) - x
  for t in range(T):
    for i in range(4):
      angle = t / 10000 ** (2 * i / 8)
      np.testing.assert_allclose(added[:, t, [i, 4 + i]], [[np.sin(angle), np.cos(angle)]] * B, atol=1e-5)
  assert_close(POSITIONS['sinusoidal']().embed(x[:, 4:6], INDICES[4:6]), (x + added)[:, 4:6])


@pytest.mark.long
def test_learned_positions_have_a_maximum():
  learned = POSITIONS['learned'](max_positions=T)
  params = variables(learned, draw(B, T, 8), INDICES, method='embed')
  table = params['params']['table']
  assert_close(learned.apply(params, draw(B, 2, 8), INDICES[5:7], method='embed'), draw(B, 2, 8) + table[None, 5:7])
  message = "position 'learned': sequences must have at most max_positions=11 positions, got 12"
  with pytest.raises(UserError, match=message):
    learned.apply(params, draw(B, T + 1, 8), jnp.arange(T + 1), method='embed')
  with pytest.raises(UserError, match=message):
    learned.check(T + 1)


@pytest.mark.long
def test_shaw_equals_the_formulas_with_clipped_distances():
  shaw = POSITIONS['shaw'](N, F, max_distance=2)
  query = key = draw(B, N, T, F)
  weights = jax.nn.softmax(draw(B, N, T, T))
  params = variables(shaw, query, key, INDICES, ALL, method='bias')
  bias = shaw.apply(params, query, key, INDICES, ALL, method='bias')
  shift = shaw.apply(params, weights, INDICES, method='shift')
  query, weights, bias, shift, learned = jax.tree.map(np.asarray, (query, weights, bias, shift, params['params']))
  keys, values = learned['of_keys'], learned['of_values']
  for t in range(T):
    index = [2 + max(-2, min(2, s - t)) for s in range(T)]
    for s in range(T):
      np.testing.assert_allclose(bias[..., t, s], query[..., t, :] @ keys[index[s]] / np.sqrt(F), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(shift[:, :, t], weights[:, :, t] @ values[np.asarray(index)], rtol=1e-4, atol=1e-6)
  bias_at_3 = shaw.apply(params, query[:, :, 3:4], key, INDICES[3:4], ALL, method='bias')
  assert_close(bias_at_3, bias[:, :, 3:4])


def literal_bucket(distance, buckets, max_distance):
  """Returns the bucket of one distance: half of the buckets hold one distance each, the others are logarithmic."""
  exact = buckets // 2
  if distance < exact:
    return distance
  return min(buckets - 1, exact + int(np.log(distance / exact) / np.log(max_distance / exact) * (buckets - exact)))


@pytest.mark.long
def test_buckets_grow_with_the_logarithm_of_the_distance():
  offsets = jnp.asarray([-1000, -127, -90, -40, -17, -16, -15, -3, -1, 0, 1, 7, 8, 9, 30, 1000])
  expected = [literal_bucket(max(-int(o), 0), 32, 128) for o in offsets]
  assert bucket_of(offsets, 32, 128, bidirectional=False).tolist() == expected
  expected_bidirectional = [16 * (o > 0) + literal_bucket(abs(int(o)), 16, 128) for o in offsets]
  assert bucket_of(offsets, 32, 128, bidirectional=True).tolist() == expected_bidirectional

  module = POSITIONS['t5'](N, F, False, buckets=4, max_distance=8)
  key = draw(B, N, T, F)
  params = variables(module, None, key, INDICES, ALL, method='bias')
  bias = module.apply(params, None, key, INDICES, ALL, method='bias')
  assert bias.shape == (N, T, T)
  np.testing.assert_array_equal(bias[:, 9, 9 - 1], params['params']['table'][:, 1])


def test_rotary_rotates_pairs_and_products_depend_on_distances_alone():
  query = draw(B, N, T, F)
  key = draw(B, N, T, F)[:, ::-1]
  rotate = POSITIONS['rope']().rotate
  rotated = np.asarray(rotate(query, INDICES))
  angles = np.arange(T)[:, None] / 10000 ** (2 * np.arange(F // 2) / F)
  pairs = (np.asarray(query[..., : F // 2]) + 1j * np.asarray(query[..., F // 2 :])) * np.exp(1j * angles)
  np.testing.assert_allclose(rotated, np.concatenate([pairs.real, pairs.imag], -1), rtol=1e-4, atol=1e-5)

  def products(shift):
    return jnp.einsum('bntf,bnsf->bnts', rotate(query, INDICES + shift), rotate(key, INDICES + shift))

  assert_close(products(0), products(5), rtol=1e-4, atol=1e-4)
  with pytest.raises(UserError, match='the number of features per head must be even, got 5'):
    rotate(query[..., :5], INDICES)


def test_alibi_slopes_are_geometric():
  assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
  assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
  bias = POSITIONS['alibi'](8).bias(None, draw(B, 8, T, F), INDICES, ALL)
  assert bias.shape == (8, T, T)
  np.testing.assert_allclose(bias[2, 7], [-abs(7 - s) / 8 for s in range(T)])


@pytest.mark.parametrize('mask', [ALL, QUERY_MASK], ids=['unmasked', 'masked'])
def test_forgetting_adds_the_logs_of_the_unmasked_gates_between_position_and_query(mask):
  module = POSITIONS['forgetting'](4, F)
  encoded = draw(B, T, 5)
  params = variables(module, encoded, 2, method='annotate')
  params = jax.tree.map(lambda x: x + draw(*x.shape), params)
  annotations = module.apply(params, encoded, 2, method='annotate')
  kernel, offset = (np.asarray(params['params']['gate'][name]) for name in ('kernel', 'bias'))
  gates = 1 / (1 + np.exp(-(np.asarray(encoded) @ kernel + offset)))  # [B, T, G]
  np.testing.assert_allclose(annotations[..., 0], np.log(gates).transpose(0, 2, 1), rtol=1e-4, atol=1e-6)
  key = jnp.concatenate([draw(B, 2, T, F), annotations], axis=-1)
  bias = np.asarray(module.bias(draw(B, 4, T, F), key, INDICES, mask))
  counts = np.broadcast_to(mask, (B, T, T))
  for head in range(4):
    for t in range(T):
      for s in range(T):
        between = slice(min(s, t) + 1, max(s, t) + 1)
        logs = np.where(counts[:, t, between], np.log(gates[:, between, head // 2]), 0)
        np.testing.assert_allclose(bias[:, head, t, s], logs.sum(1), rtol=1e-4, atol=1e-4)
  bias_at_6 = module.bias(draw(B, 4, 1, F), key, INDICES[6:7], counts[:, 6:7])
  assert_close(bias_at_6, bias[:, :, 6:7], rtol=1e-6, atol=1e-6)
  is_undefined = np.isnan(module.bias(draw(B, 4, 3, F), key, jnp.array([-1, 0, T]), ALL))
  np.testing.assert_array_equal(is_undefined.all((0, 1, 3)), [True, False, True])
  assert not is_undefined[:, :, 1].any()


@pytest.mark.long
@pytest.mark.parametrize('kind', [kind for kind, cls in POSITIONS.items() if cls.in_attention])
def test_masked_content_before_a_query_has_no_effect(kind):
  x = draw(B, T, 6)
  mask = jnp.ones((B, T), bool).at[:, 2].set(False)
  module = Attention('scaled_dot', features=6, heads=3, positions=POSITIONS[kind](heads=3, features=2))

  def attend(module, x):
    return module.parallel(x[:, 3:], module.remember(x, mask, INDICES), positions=INDICES[3:]).context

  params = variables(module, x, method=attend)
  run = jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(module.apply(params, x, method=attend) ** 2)))
  assert_close(run(params, x.at[:, 2].set(jnp.nan)), run(params, x.at[:, 2].set(0)))


@pytest.mark.long
@pytest.mark.parametrize('bidirectional', [True, False])
@pytest.mark.parametrize('kind', POSITIONS)
def test_content_that_is_masked_for_a_query_has_no_effect_on_it(kind, bidirectional):
  """Position 4 is masked for query 8 alone, with unmasked positions on both sides of it."""
  positions = POSITIONS[kind](3, 2, bidirectional)
  attention = Attention('scaled_dot', features=6, heads=3, positions=positions if positions.in_attention else None)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)) | bidirectional, (B, T, T)).at[:, 8, 4].set(False)

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = positions.clone(parent=self).embed(x, INDICES)
      layer = attention.clone(parent=self)
      indices = INDICES if positions.in_attention else None
      return layer.parallel(x, layer.remember(x, mask, indices), positions=indices).context

  x = draw(B, T, 6)
  params = jax.tree.map(lambda p: p + draw(*p.shape), variables(Layer(), x))
  run = jax.jit(lambda x: Layer().apply(params, x))
  context, changed = np.asarray(run(x)), np.asarray(run(x.at[:, 4].add(1.0)))
  np.testing.assert_array_equal(changed[:, 8], context[:, 8])
  assert np.abs(changed[:, 9] - context[:, 9]).min() > 0


@pytest.mark.parametrize('mask', [ALL, QUERY_MASK], ids=['unmasked', 'masked'])
@pytest.mark.parametrize('bidirectional', [True, False])
def test_contextual_positions_count_matching_unmasked_positions(bidirectional, mask):
  module = POSITIONS['contextual'](4, F, bidirectional, max_positions=4)
  query = draw(B, 4, T, F)
  key = 2 * draw(B, 2, T, F)
  params = {'params': {'table': draw(4, F)}}
  apply = jax.jit(lambda *args: module.apply(params, *args, method='bias'))
  bias = np.asarray(apply(query, key, INDICES, mask))
  counts = np.broadcast_to(mask, (B, T, T))
  table, queries, keys = (np.asarray(x, np.float64) for x in (params['params']['table'], query, key))
  for row, head, t in np.ndindex(B, 4, T):
    q = queries[row, head, t] / np.sqrt(F)
    gates = counts[row, t] / (1 + np.exp(-keys[row, head // 2] @ q))  # as in the published code of the paper
    for s in range(T if bidirectional else t + 1):
      position = min(sum(gates[s : t + 1]) if s <= t else sum(gates[t + 1 : s + 1]), 3)
      share = position - int(position)
      upper = min(int(position) + 1, 3)
      vector = (1 - share) * table[int(position)] + share * table[upper]
      np.testing.assert_allclose(bias[row, head, t, s], q @ vector, rtol=1e-4, atol=1e-4)
  at_5 = apply(query[:, :, 5:6], key, INDICES[5:6], counts[:, 5:6])
  assert_close(at_5[..., :6], bias[:, :, 5:6, :6], rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_gradients_of_shaw_in_16_bits_keep_small_terms_of_equal_distances():
  layer = POSITIONS['shaw'](heads=1, features=4, max_distance=2)
  positions = jnp.arange(1024)
  mask = jnp.ones((1, 1, 1024), bool)
  query = draw(1, 1, 1024, 4)
  params = variables(layer, query, query, positions, mask, method='bias')
  weights = jnp.abs(draw(1024, 1024)) + 0.5

  def gradient(dtype):
    def loss(params):
      bias = layer.apply(params, query.astype(dtype), query, positions, mask, method='bias')
      return (bias.astype(jnp.float32)[0, 0] * weights).sum()

    return jax.jit(jax.grad(loss))(params)['params']['of_keys']

  assert_close(gradient(jnp.bfloat16), gradient(jnp.float32), rtol=0.01, atol=0.01 * 1024**0.5)


@pytest.mark.parametrize('base', [1e-300, 0.5])
def test_a_base_below_1_is_an_error(base):
  with pytest.raises(UserError, match=rf"^position 'rope': option base must be at least 1, got {base}$"):
    parse_position(f'rope(base={base})')
