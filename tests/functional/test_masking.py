"""Masks against loops over their positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

import attention_jax as aj


@pytest.mark.parametrize(
  'lengths', [0, 3, 7, [0, 2, 7], [[1, 2, 3], [7, 0, 6]], np.zeros((2, 0, 3), int)], ids=lambda x: str(np.shape(x))
)
def test_padding_mask_equals_a_loop(lengths):
  lengths = np.asarray(lengths)
  expected = np.zeros((*lengths.shape, 7), bool)
  for index in np.ndindex(lengths.shape):
    expected[index][: lengths[index]] = True
  for argument in (lengths, jnp.asarray(lengths), *([int(lengths)] if lengths.ndim == 0 else ())):
    mask = aj.padding_mask(argument, 7)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
  ('lengths', 'size', 'message'),
  [
    (2.0, 7, 'lengths must be whole numbers, got float32'),
    ([True, False], 7, 'lengths must be whole numbers, got bool'),
    ([3, -1], 7, 'lengths must be 0 to 7, the size, got -1 to 3'),
    ([3, 8], 7, 'lengths must be 0 to 7, the size, got 3 to 8'),
    (None, 7, 'lengths must be whole numbers, got None'),
    *((1, size, 'padding_mask: size must be a whole number of at least 0, got ') for size in ('4', 4.0, -1)),
  ],
)
def test_invalid_lengths_and_sizes_raise(lengths, size, message, monkeypatch):
  monkeypatch.setattr(config, 'jaxtyping_disable', True)  # users run without jaxtyping
  for argument in (lengths,) if lengths is None else (jnp.asarray(lengths), np.asarray(jnp.asarray(lengths))):
    with pytest.raises(aj.UserError, match=message):
      aj.padding_mask(argument, size)


def test_types_but_not_values_of_lengths_are_checked_under_jit(monkeypatch):
  monkeypatch.setattr(config, 'jaxtyping_disable', True)
  padding_mask = jax.jit(aj.padding_mask, static_argnums=1)
  with pytest.raises(aj.UserError, match='whole numbers, got float32'):
    padding_mask(jnp.ones(2), 7)
  np.testing.assert_array_equal(padding_mask(9, 2), [True, True])
  # A size may be an array, but not a traced one.
  np.testing.assert_array_equal(aj.causal_mask(jnp.int32(2)), [[True, False], [True, True]])
  with pytest.raises(aj.UserError, match=r'causal_mask: size must be a whole number of at least 0, got .*Trac'):
    jax.jit(aj.causal_mask)(3)


@pytest.mark.parametrize(('size', 'left', 'right'), [(7, 2, 1), (5, 0, 0), (3, 9, 9), (1, 0, 0), (5, -1, 3)])
def test_window_and_causal_masks_equal_a_loop(size, left, right):
  expected = [[t - left <= s <= t + right for s in range(size)] for t in range(size)]
  np.testing.assert_array_equal(aj.window_mask(size, left, right), expected)
  np.testing.assert_array_equal(aj.causal_mask(size), [[s <= t for s in range(size)] for t in range(size)])


def test_combined_masks_equal_a_loop():
  padding = aj.padding_mask(jnp.asarray([2, 5, 0]), 5)[:, None]
  causal = aj.causal_mask(5)
  assert aj.combine_masks() is None
  assert aj.combine_masks(None, None) is None
  np.testing.assert_array_equal(aj.combine_masks(None, causal), causal)
  expected = [[[s <= t and s < n for s in range(5)] for t in range(5)] for n in (2, 5, 0)]
  np.testing.assert_array_equal(aj.combine_masks(padding, None, causal, jnp.ones(5, bool)), expected)
  message = r'masks \[4, 5\], \[3, 5\] do not broadcast; pass a padding mask \[B, S\] as mask\[:, None\]'
  with pytest.raises(aj.UserError, match=message):
    aj.combine_masks(jnp.ones((4, 5), bool), None, jnp.ones((3, 5), bool))


@pytest.mark.parametrize('mask', [jnp.asarray([1, 2]), jnp.asarray([0.0, -jnp.inf])], ids=['int', 'float'])
def test_masks_that_are_not_bool_raise(mask):
  for use in (
    lambda: aj.combine_masks(mask, jnp.ones(2, bool)),
    lambda: aj.remember(jnp.ones((2, 3)), jnp.ones((2, 3)), mask),
    lambda: aj.Attention('dot').bind({}).remember(jnp.ones((1, 2, 3)), mask[None]),
  ):
    with pytest.raises(aj.UserError, match=f'mask must be bool, True = may be attended to, got {mask.dtype}'):
      use()
