"""Adaptive computation time against a literal loop, padding, gradients, and its loss in a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.data.batching import Batch
from attention_jax.losses.sequence import sequence_loss
from attention_jax.modules.adaptive import AdaptiveLayer
from attention_jax.modules.recurrent import RECURRENCES, RecurrentLayer
from tests.models.helpers import build_tiny
from tests.models.helpers import inputs as model_inputs
from tests.modules.helpers import (
  assert_close,
  assert_padding_has_no_gradient,
  assert_same,
  draw,
  gradient_error_of_16_bits,
  variables,
)
from tests.modules.reference_cells import REFERENCE_CELLS, sigmoid

B, S, D, F = 3, 7, 5, 4
LENGTHS = [S, 4, 0]
MASK = aj.padding_mask(jnp.asarray(LENGTHS), S)
LIMIT = 4
EPSILON = 0.05


def literal(kind, params, inputs):
  """Outputs [S, F], the last state, updates N [S] and costs N + R [S] of one sequence. Graves 2016, section 2."""
  arrays, formula = REFERENCE_CELLS[kind]
  cell = params['RecurrentCell_0']
  state = (np.zeros(F),) * arrays
  outputs, updates, costs = [], [], []
  for x in inputs:
    projected = x @ cell['inputs']['kernel'] + cell['inputs']['bias']
    current = state
    states, probabilities = [], []
    while True:
      flag = params['flag'][0] if not states else 0
      current = formula(projected + flag, current, cell['kernel'], cell['bias'])
      states.append(current)
      halting = sigmoid(current[0] @ params['halting_kernel'][:, 0] + params['halting_bias'][0])
      if sum(probabilities) + halting >= 1 - EPSILON or len(states) == LIMIT:
        break
      probabilities.append(halting)
    remainder = 1 - sum(probabilities)
    probabilities.append(remainder)
    state = tuple(sum(p * s[n] for p, s in zip(probabilities, states, strict=True)) for n in range(arrays))
    outputs.append(state[0])
    updates.append(len(states))
    costs.append(len(states) + remainder)
  return np.array(outputs).reshape(-1, F), state, np.array(updates), np.array(costs)


@pytest.mark.long
@pytest.mark.parametrize(('kind', 'reverse'), [('gru', False), ('lstm', True)])
def test_a_layer_equals_the_literal_loop_over_unmasked_steps(kind, reverse):
  layer = AdaptiveLayer(kind, F, reverse, LIMIT, EPSILON)
  inputs = draw(B, S, D)
  params = variables(layer, inputs, MASK, scale=1.0)
  run = jax.jit(layer.apply)
  outputs, state, pondered = run(params, inputs, MASK)
  order = slice(None, None, -1 if reverse else 1)
  update_counts = set()
  for b, length in enumerate(LENGTHS):
    expected, last, updates, costs = literal(
      kind, jax.tree.map(np.asarray, params['params']), np.asarray(inputs)[b, :length][order]
    )
    assert_close(outputs[b, :length], expected[order])
    assert_close(tuple(part[b] for part in state), last)
    assert_close(pondered.updates[b, :length], updates[order])
    assert_close(pondered.cost[b, :length], costs[order])
    assert not any(np.any(x[b, length:]) for x in (outputs, *pondered))
    update_counts |= set(updates)
  assert len(update_counts) > 1, f'expected steps with different numbers of updates, got {update_counts}'
  assert_same(run(params, jnp.where(MASK[..., None], inputs, jnp.nan), MASK), (outputs, state, pondered))


@pytest.mark.long
def test_a_step_that_halts_at_once_is_the_plain_recurrence():
  inputs = draw(B, S, D)
  params = variables(AdaptiveLayer('gru', F), inputs, MASK)['params']
  params |= {'halting_bias': jnp.full(1, 30.0), 'flag': jnp.zeros_like(params['flag'])}
  outputs, state, pondered = jax.jit(AdaptiveLayer('gru', F).apply)({'params': params}, inputs, MASK)
  plain = {'params': {'RecurrentCell_0': params['RecurrentCell_0']}}
  assert_close((outputs, state), jax.jit(RecurrentLayer('gru', F).apply)(plain, inputs, MASK))
  assert np.all(pondered.updates == MASK) and np.all(pondered.cost == 2 * MASK)


@pytest.mark.long
def test_gradients_are_finite_and_reach_all_parameters_but_not_the_padding():
  assert_padding_has_no_gradient(AdaptiveLayer('gru', F, limit=LIMIT), draw(B, S, D), MASK)


@pytest.mark.parametrize('kind', RECURRENCES)
def test_bfloat16_layers_compute_in_bfloat16(kind):
  layer = AdaptiveLayer(kind, F, dtype=jnp.bfloat16)
  params = variables(layer, draw(B, S, D), MASK)
  outputs, state, pondered = jax.eval_shape(layer.apply, params, draw(B, S, D), MASK)
  assert {leaf.dtype for leaf in (outputs, *state)} == {jnp.dtype(jnp.bfloat16)}
  assert {leaf.dtype for leaf in pondered} == {jnp.dtype(jnp.float32)}


@pytest.mark.long
def test_gradients_in_16_bits_keep_small_terms_over_many_steps():
  inputs = draw(2, 1024, D)
  mask = jnp.ones((2, 1024), bool)

  def make_layer(dtype):
    return AdaptiveLayer('gru', F, limit=1, dtype=dtype)  # with a larger limit, N would depend on the precision

  params = variables(make_layer(jnp.float32), inputs, mask, scale=0.3)
  assert gradient_error_of_16_bits(make_layer, params, inputs, mask) < 0.03


@pytest.mark.long
def test_the_loss_of_a_model_reports_the_updates_and_contains_their_cost():
  model = build_tiny(encoder=f'act(features=10, limit={LIMIT}, layers=2)')
  source, source_mask, target = model_inputs()
  batch = Batch(source, source_mask, target, jnp.ones(target.shape, bool), jnp.arange(len(source)), None)
  params = variables(model, source, source_mask, target)['params']
  sums = jax.jit(sequence_loss(model, 0.0, 'ponder'))(params, batch)
  assert model.encoder.incremental and 1 <= sums['ponder_updates'] / sums['tokens'] <= LIMIT
  np.testing.assert_allclose(sums['loss'], sums['cross_entropy'] + 0.01 * sums['ponder'], rtol=1e-6)
