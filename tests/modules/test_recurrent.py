"""Recurrent layers: every recurrence against a literal loop, both directions, padding, and the decoder's stack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.modules.recurrent import RECURRENCES, RecurrentCell, RecurrentLayer, RecurrentStack
from tests.modules.helpers import assert_close, assert_same, draw, variables
from tests.modules.reference_cells import REFERENCE_CELLS

B, S, D, F = 3, 7, 5, 4
LENGTHS = [S, 4, 0]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)
every_kind = pytest.mark.parametrize('kind', RECURRENCES)
every_direction = pytest.mark.parametrize('reverse', [False, True])


def literal(kind, cell, inputs):
  """Outputs [S, F] and the last state of one unpadded sequence, step by step in NumPy."""
  states, formula = REFERENCE_CELLS[kind]
  cell = jax.tree.map(np.asarray, cell)
  state, outputs = (np.zeros(F),) * states, []
  for x in np.asarray(inputs):
    x = x @ cell['inputs']['kernel'] + cell['inputs']['bias']
    state = formula(x, state, cell['kernel'], cell['bias'])
    outputs.append(state[0])
  return np.array(outputs).reshape(-1, F), state


def test_every_recurrence_has_a_literal_loop():
  assert set(REFERENCE_CELLS) == set(RECURRENCES)


@every_kind
@every_direction
def test_layer_is_the_literal_loop_over_what_is_real(kind, reverse):
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


@every_kind
def test_nothing_flows_back_from_padding(kind):
  layer = RecurrentLayer(kind, F, reverse=True)
  inputs = draw(B, S, D)
  params = variables(layer, inputs, MASK)

  def loss(params, inputs):
    outputs, state = layer.apply(params, inputs, MASK)
    return jnp.sum(outputs) + sum(jnp.sum(part) for part in state)

  of_params, of_inputs = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, jnp.where(MASK[..., None], inputs, jnp.nan))
  assert all(np.all(np.isfinite(leaf)) and np.any(leaf != 0) for leaf in jax.tree.leaves(of_params))
  assert np.all((of_inputs != 0).any(-1) == MASK)


@every_kind
def test_stepping_equals_the_layer(kind):
  layer, cell = RecurrentLayer(kind, F), RecurrentCell(kind, F)
  inputs, mask = draw(B, S, D), jnp.ones((B, S), bool)
  params = variables(layer, inputs, mask)
  own = {'params': params['params']['RecurrentCell_0']}

  def stepped(inputs):
    projected = cell.apply(own, inputs, method='project')
    step = lambda state, x: (cell.apply(own, state, x),) * 2
    start = (jnp.zeros((B, F)),) * RECURRENCES[kind].states
    return jax.lax.scan(step, start, jnp.moveaxis(projected, 1, 0))

  state, states = jax.jit(stepped)(inputs)
  outputs, last = jax.jit(layer.apply)(params, inputs, mask)
  assert_close((jnp.moveaxis(states[0], 0, 1), state), (outputs, last))


def test_hidden_kernels_start_orthogonal_gate_by_gate_and_forget_gates_open():
  params = RecurrentCell('lstm', F).init(jax.random.key(0), jnp.ones((1, D)), method='project')['params']
  for gate in np.split(np.asarray(params['kernel']), 4, axis=1):
    np.testing.assert_allclose(gate @ gate.T, np.eye(F), atol=1e-5)
  assert np.all(params['bias'] == 1)


# ---------------------------------------------------------------------------------------------------------- the stack


def whole_step(stack, summary, inputs):
  states = stack.start(summary)
  return states, *stack(states, stack.project(inputs), deterministic=True)


@every_kind
@pytest.mark.parametrize('residual', [False, True])
def test_stack_is_the_literal_step_layer_by_layer(kind, residual):
  stack = RecurrentStack(kind, F, layers=3, residual=residual)
  summary, inputs = draw(B, 11), draw(B, D)
  params = variables(stack, summary, inputs, method=whole_step)
  run = jax.jit(functools.partial(stack.apply, method=whole_step))
  states, new, output = run(params, summary, inputs)
  own, count = jax.tree.map(np.asarray, params['params']), RECURRENCES[kind].states
  for b in range(B):
    below = np.asarray(inputs[b])
    for layer in range(3):
      bridges = [own[f'bridges_{layer}_{i}'] for i in range(count)]
      start = [np.asarray(summary[b]) @ bridge['kernel'] + bridge['bias'] for bridge in bridges]
      start[0] = np.tanh(start[0])
      assert_close([part[b] for part in states[layer]], start)
      cell = own[f'cells_{layer}']
      x = below @ cell['inputs']['kernel'] + cell['inputs']['bias']
      expected = REFERENCE_CELLS[kind][1](x, tuple(start), cell['kernel'], cell['bias'])
      assert_close(tuple(part[b] for part in new[layer]), expected)
      below = expected[0] + (below if residual and layer else 0)
    assert_close(output[b], below)


@pytest.mark.parametrize(
  ('dropout', 'deterministic', 'differ'), [(0.5, False, True), (0.5, True, False), (0.0, False, False)]
)
def test_dropout_is_between_layers_and_only_while_training(dropout, deterministic, differ):
  def step(stack, summary, inputs):
    return stack(stack.start(summary), stack.project(inputs), deterministic)

  run = lambda layers, seed: _apply(RecurrentStack('gru', F, layers, dropout=dropout), step, seed)
  assert np.any(run(2, 1) != run(2, 2)) == differ
  assert_same(run(2, 1), run(2, 1))
  assert_same(run(1, 1), run(1, 2))


def _apply(stack, method, seed):
  given = draw(B, 11), draw(B, D)
  params = variables(stack, *given, method=method)
  return np.asarray(stack.apply(params, *given, method=method, rngs={'dropout': jax.random.key(seed)})[1])


@every_kind
def test_bfloat16_throughout(kind):
  layer = RecurrentLayer(kind, F, dtype=jnp.bfloat16)
  params = variables(layer, draw(B, S, D), MASK)
  outputs, state = jax.eval_shape(layer.apply, params, draw(B, S, D), MASK)
  assert {leaf.dtype for leaf in (outputs, *state)} == {jnp.dtype(jnp.bfloat16)}
  stack = RecurrentStack(kind, F, layers=2, residual=True, dtype=jnp.bfloat16)
  params = variables(stack, draw(B, 11), draw(B, D), method=whole_step)
  result = jax.eval_shape(functools.partial(stack.apply, method=whole_step), params, draw(B, 11), draw(B, D))
  assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
  ('stack', 'message'),
  [
    (RecurrentStack('gru', F, layers=0), 'layers must be at least 1, got 0'),
    (RecurrentStack('gruu', F), r"unknown rnn 'gruu' \(did you mean 'gru'\?\); possible: gru, lstm, simple"),
  ],
)
def test_mistakes_are_named(stack, message):
  with pytest.raises(aj.UserError, match=message):
    variables(stack, draw(B, 11), draw(B, D), method=whole_step)
