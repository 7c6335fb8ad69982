"""Masks: every part and combination against a loop over positions, and what kernels derive from the structure."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.mask import align_mask

T, S = 5, 7
IDS = jnp.array([0, 0, 1, 1, 2])
KEY_IDS = jnp.array([0, 1, 1, 2, 2, 3, 0])
ARRAY = jax.random.bernoulli(jax.random.key(0), 0.7, (T, S))
PARTS = {
  'all': (aj.Mask(), lambda t, s: True),
  'causal': (aj.Mask.causal(), lambda t, s: s <= t),
  'window': (aj.Mask.window(2, 1), lambda t, s: t - 2 <= s <= t + 1),
  'sinks': (aj.Mask.window(1, 0, sinks=2), lambda t, s: t - 1 <= s <= t or s < 2),
  'lengths': (aj.Mask.lengths(jnp.array(4)), lambda t, s: s < 4),
  'segments': (aj.Mask.segments(IDS, KEY_IDS), lambda t, s: IDS[t] == KEY_IDS[s]),
  'array': (aj.Mask.array(ARRAY), lambda t, s: ARRAY[t, s]),
  'shared': (aj.Mask.array(ARRAY[0]), lambda t, s: ARRAY[0, s]),
}
PAIRS = [*itertools.combinations_with_replacement(PARTS, 2)]


def loop(function):
  return np.array([[bool(function(t, s)) for s in range(S)] for t in range(T)])


@pytest.mark.long
@pytest.mark.parametrize(('first', 'second'), PAIRS, ids=map('-'.join, PAIRS))
def test_two_masks_are_those_positions_that_both_have(first, second):
  (mask, function), (other, other_function) = PARTS[first], PARTS[second]
  combined = mask & other
  expected = loop(function) & loop(other_function)
  assert (combined.dense(T, S) == expected).all()
  assert (combined.any_query(T, S) == expected.any(0)).all()
  assert not combined.is_shared or (expected == expected[:1]).all()
  for t in range(T):
    fields = jax.tree.map(lambda x, t=t: x[t], combined.by_query(T))
    assert (combined.row(fields, S) == expected[t]).all()
  blocks = combined.by_block(3, 2)  # the last one has a query too many
  dense = [dataclasses.replace(combined, **jax.tree.map(lambda x, i=i: x[i], blocks)).dense(2, S) for i in range(3)]
  assert (jnp.concatenate(dense)[:T] == expected).all()


def test_an_offset_moves_the_queries():
  mask = (aj.Mask.causal() & aj.Mask.lengths(jnp.array([3, 6]))).at(jnp.array([2, 4]))
  for row, (offset, length) in enumerate(((2, 3), (4, 6))):
    expected = [[s <= offset + t and s < length for s in range(S)] for t in range(2)]
    assert mask.dense(2, S)[row].tolist() == expected
    assert mask.any_query(2, S)[row].tolist() == np.any(expected, 0).tolist()
  with pytest.raises(aj.UserError, match=r'combine masks first, .* \(a & b\)\.at\(offset\)'):
    mask & aj.Mask.window(1, 1)


def test_batches_broadcast_and_arrays_are_masks():
  lengths = jnp.array([2, 5])
  mask = aj.Mask.lengths(lengths[:, None]) & aj.Mask.causal()
  assert mask.dense(T, S).shape == (2, 1, T, S)
  padding = aj.padding_mask(lengths, S)[:, None, None]
  for combined in (aj.Mask.causal() & padding, padding & aj.Mask.causal()):
    assert (combined.dense(T, S) == mask.dense(T, S)).all()
  assert (aj.Mask.window(3, None) & aj.Mask.causal()).bands == aj.Mask.window(3, 0).bands


def test_masks_pass_through_transformations():
  mask = aj.Mask.causal() & aj.Mask.lengths(jnp.array([2, 5]))
  dense = jax.jit(jax.vmap(lambda mask: mask.dense(T, S)))(mask)
  assert (dense == mask.dense(T, S)).all()


@pytest.mark.parametrize('implementation', ['xla', 'chunked', 'flash', 'auto'])
def test_attention_with_a_mask_equals_attention_with_its_array(implementation):
  rngs = jax.random.split(jax.random.key(1), 3)
  query, key, value = (jax.random.normal(rng, (2, 3, n, 4)) for rng, n in zip(rngs, (T, S, S), strict=True))
  for name, (mask, _) in PARTS.items():
    results = [aj.attend(query, key, value, x, implementation=implementation) for x in (mask, mask.dense(T, S))]
    jax.tree.map(lambda x, y, name=name: np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name), *results)


@pytest.mark.long
def test_the_definition_stores_no_array_for_a_mask():
  x = jax.ShapeDtypeStruct((1, 96, 8), jnp.float32)

  def compiled(mask):
    return jax.jit(lambda x: aj.attend(x, x, x, mask, return_weights=False).context).lower(x).compile().as_text()

  entry = compiled(aj.Mask.causal()).split('ENTRY')[1]
  assert 'pred[' not in entry.replace('pred[]', '')
  assert 'pred[' in compiled(jax.random.bernoulli(jax.random.key(0), 0.5, (96, 96))).split('ENTRY')[1]


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: aj.Mask.window(-1, 0), 'Mask.window: left must be a whole number of at least 0, got -1'),
    (lambda: aj.Mask.lengths(jnp.ones(2)), 'Mask.lengths: lengths must be whole numbers, got float32'),
    (lambda: aj.Mask.segments(jnp.array(1)), r'ids must be \[\.\.\., T\], got one number'),
    (lambda: aj.Mask.array(jnp.ones((T, S))), 'Mask.array: mask must be bool'),
    (
      lambda: align_mask('attend', aj.Mask.lengths(jnp.array([1, 2, 3])), (2, 4), T, S),
      r'attend: the length \(3,\) of the mask must broadcast to \(2, 4\), the batch axes',
    ),
    (
      lambda: align_mask('attend', aj.Mask.segments(IDS), (2,), T, S),
      r'the key segments \(5,\) of the mask must broadcast to \(2, 7\)',
    ),
  ],
)
def test_wrong_masks_are_errors(make, message):
  with pytest.raises(aj.UserError, match=message):
    make()
