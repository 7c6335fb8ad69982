"""Recurrent layers: every recurrence against a literal loop, both directions, padding, and stacked layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.recurrent import RECURRENCES, RecurrentCell, RecurrentLayer, RecurrentStack
from tests.modules.helpers import assert_close, assert_same, draw, gradient_error_of_16_bits, variables
from tests.modules.reference_cells import REFERENCE_CELLS

B, S, D, F = 3, 7, 5, 4
LENGTHS = [S, 4, 0]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)
every_kind = pytest.mark.parametrize('kind', RECURRENCES)
every_direction = pytest.mark.parametrize('reverse', [False, True])


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


def test_every_recurrence_has_a_reference():
  assert set(REFERENCE_CELLS) == set(RECURRENCES)


@pytest.mark.long
@every_kind
@every_direction
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
  layer = RecurrentLayer(kind, F, reverse=True)
  inputs = draw(B, S, D)
  params = variables(layer, inputs, MASK)

  def loss(params, inputs):
    outputs, state = layer.apply(params, inputs, MASK)
    return jnp.sum(outputs) + sum(jnp.sum(part) for part in state)

  param_gradients, input_gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(
    params, jnp.where(MASK[..., None], inputs, jnp.nan)
  )
  assert all(np.all(np.isfinite(leaf)) and np.any(leaf != 0) for leaf in jax.tree.leaves(param_gradients))
  assert np.all((input_gradients != 0).any(-1) == MASK)


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


def start_and_step(stack, summary, inputs):
  states = stack.start(summary)
  return states, *stack(states, stack.project(inputs), deterministic=True)


@pytest.mark.long
@every_kind
@pytest.mark.parametrize('residual', [False, True])
def test_a_stack_equals_the_literal_step_layer_by_layer(kind, residual):
  stack = RecurrentStack(kind, F, layers=3, residual=residual)
  summary = draw(B, 11)
  inputs = draw(B, D)
  params = variables(stack, summary, inputs, method=start_and_step)
  run = jax.jit(functools.partial(stack.apply, method=start_and_step))
  states, new_states, output = run(params, summary, inputs)
  numpy_params = jax.tree.map(np.asarray, params['params'])
  for b in range(B):
    below = np.asarray(inputs[b])
    for layer in range(3):
      bridges = [numpy_params[f'bridges_{layer}_{i}'] for i in range(RECURRENCES[kind].states)]
      start = [np.asarray(summary[b]) @ bridge['kernel'] + bridge['bias'] for bridge in bridges]
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
  def step(stack, summary, inputs):
    return stack(stack.start(summary), stack.project(inputs), deterministic)

  def run(layers, seed):
    stack = RecurrentStack('gru', F, layers, dropout=dropout)
    params = variables(stack, draw(B, 11), draw(B, D), method=step)
    rngs = {'dropout': jax.random.key(seed)}
    apply = jax.jit(lambda params, rngs: stack.apply(params, draw(B, 11), draw(B, D), method=step, rngs=rngs)[1])
    return np.asarray(apply(params, rngs))

  assert np.any(run(2, 1) != run(2, 2)) == is_random
  assert_same(run(2, 1), run(2, 1))
  assert_same(run(1, 1), run(1, 2))


def test_residual_connections_add_outputs_after_dropout():
  stack = RecurrentStack('gru', F, layers=2, residual=True, dropout=0.999999)  # drops all outputs of the lower layer

  def step(stack, summary, inputs):
    return stack(stack.start(summary), stack.project(inputs), False)

  params = variables(stack, draw(B, 11), draw(B, D), method=step)
  rngs = {'dropout': jax.random.key(0)}
  states, output = jax.jit(functools.partial(stack.apply, method=step))(params, draw(B, 11), draw(B, D), rngs=rngs)
  assert_same(output, states[1][0])


@pytest.mark.long
@every_kind
def test_bfloat16_layers_compute_in_bfloat16(kind):
  layer = RecurrentLayer(kind, F, dtype=jnp.bfloat16)
  params = variables(layer, draw(B, S, D), MASK)
  outputs, state = jax.eval_shape(layer.apply, params, draw(B, S, D), MASK)
  assert {leaf.dtype for leaf in (outputs, *state)} == {jnp.dtype(jnp.bfloat16)}
  stack = RecurrentStack(kind, F, layers=2, residual=True, dtype=jnp.bfloat16)
  params = variables(stack, draw(B, 11), draw(B, D), method=start_and_step)
  result = jax.eval_shape(functools.partial(stack.apply, method=start_and_step), params, draw(B, 11), draw(B, D))
  assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.long
@every_kind
def test_gradients_in_16_bits_keep_small_terms_over_many_steps(kind):
  inputs = draw(2, 1024, D)
  mask = jnp.ones((2, 1024), bool)
  params = variables(RecurrentLayer(kind, F), inputs, mask, scale=0.3)
  error = gradient_error_of_16_bits(lambda dtype: RecurrentLayer(kind, F, dtype=dtype), params, inputs, mask)
  assert error < 0.03


@pytest.mark.parametrize(
  ('stack', 'message'),
  [
    (RecurrentStack('gru', F, layers=0), 'layers must be at least 1, got 0'),
    (
      RecurrentStack('gruu', F),
      r"unknown rnn 'gruu' \(did you mean 'gru'\?\); expected one of: gru, gru_reset_first, lstm, simple",
    ),
  ],
)
def test_invalid_options_raise(stack, message):
  with pytest.raises(aj.UserError, match=message):
    variables(stack, draw(B, 11), draw(B, D), method=start_and_step)
