"""Intra-attention against a literal loop over the tape of past states, padding, and user errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.intra_attention import IntraAttentionLayer
from tests.modules.helpers import assert_close, assert_padding_has_no_gradient, assert_same, draw, variables
from tests.modules.reference_cells import REFERENCE_CELLS

B, S, D, F = 3, 7, 5, 4
LENGTHS = [S, 4, 0]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)


def literal(kind, params, inputs):
  """Outputs [S, F], the last state and the weights [S, S] of one sequence. Cheng, Dong & Lapata 2016, section 3."""
  arrays, formula = REFERENCE_CELLS[kind]
  cell = params['cell']
  query, key = (params['attention'][f'{name}_kernel']['kernel'][0] for name in ('query', 'key'))
  v = params['attention']['score_params']['v'][0]
  summary = np.zeros(F)
  tape = []  # the whole state after each step
  weights = np.zeros((len(inputs), len(inputs)))
  for t, x in enumerate(inputs):
    scores = [v @ np.tanh(state[0] @ key + x @ query[:D] + summary @ query[D:]) for state in tape]
    weights[t, :t] = np.exp(scores) / np.exp(scores).sum()
    before = [sum((weights[t, i] * state[n] for i, state in enumerate(tape)), np.zeros(F)) for n in range(arrays)]
    summary = before[0]
    tape.append(formula(x @ cell['inputs']['kernel'] + cell['inputs']['bias'], before, cell['kernel'], cell['bias']))
  return np.array([state[0] for state in tape]).reshape(-1, F), (tape or [(np.zeros(F),) * arrays])[-1], weights


@pytest.mark.long
@pytest.mark.parametrize(('kind', 'reverse'), [('lstm', False), ('gru', True)])
def test_a_layer_equals_the_literal_loop_over_unmasked_steps(kind, reverse):
  layer = IntraAttentionLayer(kind, F, reverse)
  inputs = draw(B, S, D)
  params = variables(layer, inputs, MASK)
  run = jax.jit(layer.apply)
  outputs, state, weights = run(params, inputs, MASK)
  order = slice(None, None, -1 if reverse else 1)
  for b, length in enumerate(LENGTHS):
    expected, last, expected_weights = literal(
      kind, jax.tree.map(np.asarray, params['params']), np.asarray(inputs)[b, :length][order]
    )
    assert_close(outputs[b, :length], expected[order])
    assert_close(tuple(part[b] for part in state), tuple(last))
    assert_close(weights[b, :length, :length], expected_weights[order, order])
    assert np.all(outputs[b, length:] == 0)
    assert np.all(weights[b, length:] == 0) and np.all(weights[b, :, length:] == 0)
  assert_same(run(params, jnp.where(MASK[..., None], inputs, jnp.nan), MASK), (outputs, state, weights))


@pytest.mark.long
@pytest.mark.parametrize('alignment', ['local_m(width=2)', 'windowed(width=2)'])
def test_a_backward_layer_counts_its_tape_as_a_forward_layer_over_the_reversed_steps_does(alignment):
  forward, backward = (IntraAttentionLayer('simple', F, reverse, alignment=alignment) for reverse in (False, True))
  inputs = draw(B, S, D)
  params = variables(forward, inputs, MASK)
  lengths = jnp.asarray(LENGTHS)[:, None]
  order = jnp.where(MASK, lengths - 1 - jnp.arange(S)[None], jnp.arange(S)[None])
  mirrored = jnp.take_along_axis(inputs, order[..., None], 1)
  outputs, state, weights = jax.jit(backward.apply)(params, inputs, MASK)
  expected, expected_state, expected_weights = jax.jit(forward.apply)(params, mirrored, MASK)
  assert_close(outputs, jnp.take_along_axis(expected, order[..., None], 1))
  assert_close(state, expected_state)
  for b, length in enumerate(LENGTHS):
    assert_close(weights[b, :length, :length], expected_weights[b, :length, :length][::-1, ::-1])
    assert_close(weights[b].sum(-1), (jnp.arange(S) < length - 1).astype(jnp.float32))


@pytest.mark.long
def test_padding_has_no_gradient():
  assert_padding_has_no_gradient(IntraAttentionLayer('lstm', F), draw(B, S, D), MASK)


@pytest.mark.long
def test_bfloat16_layers_compute_in_bfloat16_with_float32_weights():
  layer = IntraAttentionLayer('lstm', F, alignment='sparsemax', dtype=jnp.bfloat16)
  params = variables(layer, draw(B, S, D), MASK)
  outputs, state, weights = jax.eval_shape(layer.apply, params, draw(B, S, D), MASK)
  assert {leaf.dtype for leaf in (outputs, *state)} == {jnp.dtype(jnp.bfloat16)} and weights.dtype == jnp.float32


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'alignment': 'hard'}, r"intra-attention: the alignment must train by backpropagation alone; 'hard' needs"),
    ({'alignment': 'mocha(width=2)'}, r"'mocha\(width=2\)' starts at the first .*; expected one of: softmax, "),
    ({'kind': 'gruu'}, "unknown rnn 'gruu'"),
    ({'score': 'dot'}, r'query \(9,\) and key \(7, 4\) .* must be of the same width'),
  ],
)
def test_invalid_options_raise(options, message):
  with pytest.raises(aj.UserError, match=message):
    variables(IntraAttentionLayer(**{'features': F} | options), draw(B, S, D), MASK)
