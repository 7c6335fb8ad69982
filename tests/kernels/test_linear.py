"""Implementation 'linear' equals the definition, and stores no array of all queries and positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from tests.modules.helpers import draw

B, T, S, D, V = 2, 31, 37, 5, 3
VARIANTS = {'score': 'elu_dot', 'alignment': 'proportional', 'params': {}}
PADDING = aj.padding_mask(jnp.array([S, 11]), S)[:, None]  # one mask for all queries of a sequence
CAUSAL = aj.window_mask(S, S, 0, jnp.arange(T))[None]  # a mask for each query


def make_inputs(dtype=jnp.float32):
  return [draw(*shape).astype(dtype) for shape in ((B, T, D), (B, S, D), (B, S, V))]


def value_and_gradients(implementation, inputs, mask, bias=None):
  def total(inputs):
    options = {'bias': bias, 'implementation': implementation, 'return_weights': False}
    context = aj.attend(*inputs, mask, **VARIANTS, **options).context
    return jnp.sum(jnp.sin(context.astype(jnp.float32))), context

  return jax.jit(jax.value_and_grad(total, has_aux=True))(inputs)


@pytest.mark.long
@pytest.mark.parametrize(
  ('mask', 'bias'),
  [(PADDING, None), (None, None), (CAUSAL, None), (PADDING & CAUSAL, None), (PADDING, jnp.linspace(-1.0, 1.0, S))],
)
def test_contexts_and_gradients_equal_those_of_the_definition(mask, bias):
  actual, expected = (value_and_gradients(name, make_inputs(), mask, bias) for name in ('linear', 'xla'))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), actual, expected)


def test_contexts_of_16_bits_are_near_the_definition():
  inputs = make_inputs(jnp.bfloat16)
  (_, actual), (_, expected) = (value_and_gradients(name, inputs, PADDING)[0] for name in ('linear', 'xla'))
  assert actual.dtype == jnp.bfloat16
  np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.02)


@pytest.mark.long
def test_masked_content_and_an_empty_memory_have_no_effect():
  query, key, value = make_inputs()
  is_dead = ~PADDING[:, 0, :, None]
  (_, context), gradients = value_and_gradients('linear', (query, key, value), PADDING)
  changed = tuple(jnp.where(is_dead, jnp.nan, x) for x in (key, value))
  (_, same), _ = value_and_gradients('linear', (query, *changed), PADDING)
  np.testing.assert_array_equal(same, context)
  assert all(np.isfinite(x).all() for x in gradients)
  (_, empty), zeros = value_and_gradients('linear', (query, *changed), jnp.zeros((B, 1, S), bool))
  assert not empty.any() and not any(gradient.any() for gradient in zeros)


@pytest.mark.parametrize(('implementation', 'stores_scores'), [('linear', False), ('xla', True)])
def test_memory_grows_with_the_sum_of_the_lengths(implementation, stores_scores):
  program = jax.jit(lambda *inputs: value_and_gradients(implementation, inputs, PADDING))
  text = program.lower(*make_inputs()).compile().as_text()
  assert (f'{T},{S}]' in text or f'{S},{T}]' in text) == stores_scores


def test_weights_are_those_of_the_definition():
  inputs = make_inputs()
  weights = [aj.attend(*inputs, PADDING, **VARIANTS, implementation=name).weights for name in ('linear', 'xla')]
  np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize(
  ('variants', 'message'),
  [
    ({'score': 'dot'}, 'the score is not a product q . k of vectors without negative'),
    ({'alignment': 'softmax'}, 'the alignment is not proportional'),
    (
      {'alignment': aj.Row(aj.alignments.proportional, at_test=aj.alignments.hardmax)},
      'the alignment is not proportional, or .* a test-time counterpart changes it',
    ),
  ],
)
def test_other_pairs_are_errors(variants, message):
  with pytest.raises(aj.UserError, match=f"'linear' cannot compute this: {message}"):
    aj.attend(*make_inputs(), implementation='linear', **VARIANTS | variants)
