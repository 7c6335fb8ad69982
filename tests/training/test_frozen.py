"""Frozen parameters keep their values, have no state in the optimiser, and no part in the norm of the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.errors import UserError
from attention_jax.training.config import Training
from attention_jax.training.frozen import check_frozen, freeze_loss, freeze_optimizer, parse_frozen
from attention_jax.training.loss import Loss
from attention_jax.training.optim import OPTIMIZERS, make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh
from attention_jax.training.seeds import prepare_training

PARAMS = {
  'encoder': {'embedding': {'table': jnp.ones((4, 3))}, 'cell': {'kernel': jnp.ones((3, 3)), 'bias': jnp.ones(3)}},
  'encoder_2': {'kernel': jnp.ones((3, 3))},
}
GRADIENTS = jax.tree.map(lambda x: 2 * x, PARAMS)


def names_of(tree):
  return {jax.tree_util.keystr(path, simple=True, separator='.'): x for path, x in jax.tree.leaves_with_path(tree)}


def sum_params(params, *_):
  return {'loss': sum(jnp.sum(x) for x in jax.tree.leaves(params)), 'tokens': jnp.float32(1)}


FROZEN = {
  '': set(),
  'encoder': {'encoder.embedding.table', 'encoder.cell.kernel', 'encoder.cell.bias'},  # and not encoder_2
  'encoder.embedding, encoder_2.kernel': {'encoder.embedding.table', 'encoder_2.kernel'},
}


@pytest.mark.long
@pytest.mark.parametrize('name', sorted(OPTIMIZERS))
def test_only_frozen_parameters_keep_their_values(name):
  options = '(weight_decay=0.1)' if name == 'adamw' else ''

  @jax.jit
  def update():
    results = {}
    for spec in FROZEN:
      optimizer = make_optimizer(name + options, make_schedule('constant(rate=0.1)', 10), frozen=spec)
      updates, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
      results[spec] = optax.apply_updates(PARAMS, updates)
    return results

  for spec, params in update().items():
    new = names_of(params)
    assert {key for key, old in names_of(PARAMS).items() if np.array_equal(old, new[key])} == FROZEN[spec]


@pytest.mark.long
def test_the_optimizer_has_no_state_for_frozen_parameters_and_clips_the_norm_of_the_others():
  optimizer = make_optimizer('sgd(momentum=0.5)', make_schedule('constant(rate=1.0)', 10), 1.0, 'encoder')
  state = optimizer.init(PARAMS)
  assert [x.shape for x in jax.tree.leaves(state) if x.ndim] == [(3, 3)]
  updates, _ = optimizer.update(GRADIENTS, state, PARAMS)
  np.testing.assert_allclose(optax.tree.norm(updates), 1.0, rtol=1e-6)


@pytest.mark.long
def test_gradients_of_frozen_parameters_are_zero():
  loss = freeze_loss(Loss(sum_params, running=('loss',)), 'encoder.cell')
  assert loss.running == ('loss',)
  gradients = names_of(jax.grad(lambda params: loss(params, None)['loss'])(PARAMS))
  assert {name for name, x in gradients.items() if not x.any()} == {'encoder.cell.kernel', 'encoder.cell.bias'}
  assert loss(PARAMS, None)['loss'] == sum_params(PARAMS)['loss']


@pytest.mark.long
def test_the_reported_norm_of_the_gradients_excludes_frozen_parameters():
  training = Training(steps=3, optimizer='adamw(weight_decay=0.1)', frozen='encoder', average=0.9)
  step, initial = prepare_training(training, Loss(sum_params), lambda seed: PARAMS, make_mesh(), 0)
  state, metrics = step(initial(0), {'x': np.zeros((8, 1), np.float32)})
  assert metrics['grad_norm'] == 3  # of the nine numbers of encoder_2
  for tree in (state.params, state.average):
    jax.tree.map(np.testing.assert_array_equal, tree['encoder'], PARAMS['encoder'])
    assert (np.asarray(tree['encoder_2']['kernel']) < 1).all()


def test_annealed_parameters_follow_their_schedules_even_if_frozen():
  params = {'decoder': {'beta': jnp.ones(()), 'kernel': jnp.ones(3)}, 'output': jnp.ones(3)}

  training = Training(steps=3, frozen='decoder', anneal='beta: linear(peak=4.0, end=1.0)')
  step, initial = prepare_training(training, Loss(sum_params), lambda seed: params, make_mesh(), 0)
  state, _ = step(initial(0), {'x': np.zeros((8, 1), np.float32)})
  assert state.params['decoder']['beta'] == make_schedule('linear(peak=4.0, end=1.0)', 3)(2)  # of the next update
  np.testing.assert_array_equal(state.params['decoder']['kernel'], params['decoder']['kernel'])


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('encodr', "training.frozen: the model has no module or array 'encodr'; expected one of: encoder, encoder_2, or"),
    ('encoder.cel', "no module or array 'encoder.cel'"),
    ('encoder, encoder_2', "training.frozen='encoder, encoder_2' leaves no parameter to train"),
  ],
)
def test_wrong_names_are_reported(spec, message):
  with pytest.raises(UserError, match=message):
    check_frozen(spec, PARAMS)


def test_an_empty_spec_changes_nothing():
  optimizer, loss = optax.sgd(0.1), Loss(lambda *args: {})
  assert parse_frozen(' , ') == () and freeze_optimizer(optimizer, '') is optimizer and freeze_loss(loss, '') is loss
  check_frozen('', PARAMS)
