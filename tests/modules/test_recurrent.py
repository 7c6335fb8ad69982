"""Recurrent layers: every recurrence against a literal loop, both directions, padding, and stacked layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.recurrent import RECURRENCES, RecurrentCell, RecurrentLayer, RecurrentStack
from tests.modules.helpers import (
  assert_close,
  assert_padding_has_no_gradient,
  assert_same,
  draw,
  gradient_error_of_16_bits,
  variables,
)
from tests.modules.reference_cells import REFERENCE_CELLS

B, S, D, F = 3, 7, 5, 4
LENGTHS = [S, 4, 0]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)
every_kind = pytest.mark.parametrize('kind', RECURRENCES)  # each has a formula in REFERENCE_CELLS


def literal(kind, cell, inputs):
  """Returns the outputs [S, F] and the last state of one unpadded sequence, step by step in NumPy."""
  states, formula = REFERENCE_CELLS[kind]
  cell = jax.tree.map(np.asarray, cell)
  state = (np.zeros(F),) * states
  outputs = []
  for x in np.asarray(inputs):
    x = x @ cell['inputs']['kernel'] + cell['inputs']['bias']
    state = formula(x, state, cell['kernel'], cell['bias'])
    outputs.append(state[0])
  return np.array(outputs).reshape(-1, F), state


@pytest.mark.long
@every_kind
@pytest.mark.parametrize('reverse', [False, True])
def test_a_layer_equals_the_literal_loop_over_unmasked_steps(kind, reverse):
  layer = RecurrentLayer(kind, F, reverse)
  inputs = draw(B, S, D)
  params = variables(layer, inputs, MASK)
  run = jax.jit(layer.apply)
  outputs, state = run(params, inputs, MASK)
  assert outputs.shape == (B, S, F) and len(state) == RECURRENCES[kind].states
  order = slice(None, None, -1 if reverse else 1)
  for b, length in enumerate(LENGTHS):
    expected, last = literal(kind, params['params']['RecurrentCell_0'], inputs[b, :length][order])
    assert_close(outputs[b, :length], expected[order])
    assert_close(tuple(part[b] for part in state), last)
    assert np.all(outputs[b, length:] == 0)
  for filler in (jnp.nan, jnp.inf):
    assert_same(run(params, jnp.where(MASK[..., None], inputs, filler), MASK), (outputs, state))


@pytest.mark.long
@every_kind
def test_padding_has_no_gradient(kind):
  assert_padding_has_no_gradient(RecurrentLayer(kind, F, reverse=True), draw(B, S, D), MASK)


@pytest.mark.long
@every_kind
def test_steps_equal_the_layer(kind):
  layer = RecurrentLayer(kind, F)
  cell = RecurrentCell(kind, F)
  inputs = draw(B, S, D)
  mask = jnp.ones((B, S), bool)
  params = variables(layer, inputs, mask)
  cell_params = {'params': params['params']['RecurrentCell_0']}

  def stepped(inputs):
    projected = cell.apply(cell_params, inputs, method='project')

    def step(state, x):
      return (cell.apply(cell_params, state, x),) * 2

    start = (jnp.zeros((B, F)),) * RECURRENCES[kind].states
    return jax.lax.scan(step, start, jnp.moveaxis(projected, 1, 0))

  state, states = jax.jit(stepped)(inputs)
  outputs, last = jax.jit(layer.apply)(params, inputs, mask)
  assert_close((jnp.moveaxis(states[0], 0, 1), state), (outputs, last))


@pytest.mark.long
def test_initial_recurrent_kernels_are_orthogonal_and_forget_gates_open():
  params = RecurrentCell('lstm', F).init(jax.random.key(0), jnp.ones((1, D)), method='project')['params']
  for gate in np.split(np.asarray(params['kernel']), 4, axis=1):
    np.testing.assert_allclose(gate @ gate.T, np.eye(F), atol=1e-5)
  assert np.all(params['bias'] == 1)


# ---------------------------------------------------------------------------------------------------------- the stack


def start_and_step(stack, summary, inputs, deterministic=True):
  states = stack.start(summary)
  return states, *stack(states, stack.project(inputs), deterministic)


def stack_and_run(*args, **options):
  """Returns random parameters of a stack, and (params, deterministic, rngs) -> the results of one step."""
  stack = RecurrentStack(*args, **options)
  summary, inputs = draw(B, 11), draw(B, D)

  def run(params, deterministic=True, rngs=None):
    return stack.apply(params, summary, inputs, deterministic, method=start_and_step, rngs=rngs)

  return variables(stack, summary, inputs, method=start_and_step), jax.jit(run, static_argnums=1)


@pytest.mark.long
@every_kind
@pytest.mark.parametrize('residual', [False, True])
def test_a_stack_equals_the_literal_step_layer_by_layer(kind, residual):
  params, run = stack_and_run(kind, F, layers=3, residual=residual)
  states, new_states, output = run(params)
  numpy_params, summary, inputs = jax.tree.map(np.asarray, (params['params'], draw(B, 11), draw(B, D)))
  for b in range(B):
    below = inputs[b]
    for layer in range(3):
      bridges = [numpy_params[f'bridges_{layer}_{i}'] for i in range(RECURRENCES[kind].states)]
      start = [summary[b] @ bridge['kernel'] + bridge['bias'] for bridge in bridges]
      start[0] = np.tanh(start[0])
      assert_close([part[b] for part in states[layer]], start)
      cell = numpy_params[f'cells_{layer}']
      x = below @ cell['inputs']['kernel'] + cell['inputs']['bias']
      expected = REFERENCE_CELLS[kind][1](x, tuple(start), cell['kernel'], cell['bias'])
      assert_close(tuple(part[b] for part in new_states[layer]), expected)
      below = expected[0] + (below if residual and layer else 0)
    assert_close(output[b], below)


@pytest.mark.long
@pytest.mark.parametrize(
  ('dropout', 'deterministic', 'is_random'), [(0.5, False, True), (0.5, True, False), (0.0, False, False)]
)
def test_dropout_is_between_layers_and_during_training_alone(dropout, deterministic, is_random):
  def output(layers, seed):
    params, run = stack_and_run('gru', F, layers, dropout=dropout)
    return np.asarray(run(params, deterministic, {'dropout': jax.random.key(seed)})[2])

  assert np.any(output(2, 1) != output(2, 2)) == is_random
  assert_same(output(2, 1), output(2, 1))
  assert_same(output(1, 1), output(1, 2))


def test_residual_connections_add_outputs_after_dropout():
  params, run = stack_and_run('gru', F, layers=2, residual=True, dropout=0.999999)  # drops outputs of the lower layer
  _, states, output = run(params, False, {'dropout': jax.random.key(0)})
  assert_same(output, states[1][0])


@pytest.mark.long
@every_kind
def test_bfloat16_layers_compute_in_bfloat16(kind):
  layer = RecurrentLayer(kind, F, dtype=jnp.bfloat16)
  of_layer = jax.eval_shape(layer.apply, variables(layer, draw(B, S, D), MASK), draw(B, S, D), MASK)
  params, run = stack_and_run(kind, F, layers=2, residual=True, dtype=jnp.bfloat16)
  leaves = jax.tree.leaves((of_layer, jax.eval_shape(run, params)))
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.long
@every_kind
def test_gradients_in_16_bits_keep_small_terms_over_many_steps(kind):
  inputs = draw(2, 1024, D)
  mask = jnp.ones((2, 1024), bool)
  params = variables(RecurrentLayer(kind, F), inputs, mask, scale=0.3)
  error = gradient_error_of_16_bits(lambda dtype: RecurrentLayer(kind, F, dtype=dtype), params, inputs, mask)
  assert error < 0.03


@pytest.mark.parametrize(
  ('kind', 'layers', 'message'),
  [
    ('gru', 0, 'layers must be at least 1, got 0'),
    ('gruu', 1, r"unknown rnn 'gruu' \(did you mean 'gru'\?\); expected one of: gru, gru_reset_first, lstm, simple"),
  ],
)
def test_invalid_options_raise(kind, layers, message):
  with pytest.raises(aj.UserError, match=message):
    stack_and_run(kind, F, layers=layers)
