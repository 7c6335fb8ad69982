"""One update: parts equal the whole, devices agree, nothing compiles twice, randomness is a function of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.errors import UserError
from attention_jax.losses.sequence import sequence_loss
from attention_jax.training.anneal import apply_schedules, make_anneal
from attention_jax.training.loss import Loss
from attention_jax.training.optim import make_optimizer, make_schedule
from attention_jax.training.partition import make_mesh, replicate
from attention_jax.training.state import evaluation_params, init_state, is_finite
from attention_jax.training.step import make_train_step
from tests.training.helpers import BUCKETS, Toy, init_params, make_batch


def leaning(params, batch, rngs, running, update):
  """A loss that its running means change, and nothing random does."""
  sums = sequence_loss(Toy(0.0), 0.1)(params, batch)
  return {**sums, 'loss': sums['loss'] * (1 + 10 * running['accuracy'])}


LEANING = Loss(leaning, ('accuracy',))


def setup(devices=1, dropout=0.0, optimizer='adam', average=0.9, seed=1, loss=None, anneal='', **options):
  mesh = make_mesh(jax.devices()[:devices])
  schedule = make_schedule('constant(rate=0.1)', 10)
  transform = make_optimizer(optimizer, schedule, clip=1.0)
  loss = loss or sequence_loss(Toy(dropout), 0.1)
  anneal = make_anneal(anneal, init_params(), 10)
  step = make_train_step(loss, transform, schedule, mesh, seed=seed, average=average, anneal=anneal, **options)
  params = apply_schedules(init_params(), anneal, 1)
  return step, replicate(init_state(params, transform, average, loss.running), mesh)


def run(step, state, steps=4):
  losses = []
  for i in range(steps):
    state, metrics = step(state, make_batch(i))
    losses.append(float(metrics['loss']))
  return state, losses


def close(a, b, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_update_is_the_gradient_of_the_mean_over_real_tokens():
  step, state = setup(optimizer='sgd', average=0.0)
  params, batch = init_params(), make_batch(0)
  loss = lambda p: (lambda s: s['loss'] / s['tokens'])(sequence_loss(Toy(0.0), 0.1)(p, batch))
  value, grads = jax.value_and_grad(loss)(params)
  norm = optax.tree.norm(grads)
  state, metrics = step(state, batch)
  close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g / max(norm, 1), params, grads), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(metrics['loss'], value, rtol=1e-5)
  np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-5)
  assert metrics['tokens'] == batch.target_mask.sum() and metrics['learning_rate'] == np.float32(0.1)
  assert state.step == 1 and state.average == () and evaluation_params(state) is state.params


@pytest.mark.parametrize(('devices', 'parts'), [(1, 2), (1, 16), (8, 2)])
def test_accumulated_parts_equal_the_full_batch(devices, parts):
  whole, losses = run(*setup())
  in_parts, same = run(*setup(devices, accumulate=parts))
  np.testing.assert_allclose(losses, same, rtol=1e-5)
  close(whole, in_parts, rtol=2e-3, atol=1e-5)
  assert in_parts.step == 4 and in_parts.opt_state[1][0].count == 4  # updates, not parts


@pytest.mark.parametrize('dropout', [0.0, 0.3])
def test_one_device_and_eight_give_the_same_losses(dropout):
  one, losses = run(*setup(1, dropout))
  eight, same = run(*setup(8, dropout))
  np.testing.assert_allclose(losses, same, rtol=1e-5)
  close(one.params, eight.params, rtol=2e-3, atol=1e-5)
  assert len(eight.step.sharding.device_set) == 8


def test_compiled_once_per_shape():
  step, state = setup(8)
  for i in range(6):
    state, _ = step(state, make_batch(i, lengths=BUCKETS))
    assert step.compilations() == min(i + 1, len(BUCKETS))


def test_randomness_is_a_function_of_seed_and_step():
  first, losses = run(*setup(dropout=0.5))
  again, same = run(*setup(dropout=0.5))
  assert losses == same
  jax.tree.map(np.testing.assert_array_equal, first, again)
  assert run(*setup(dropout=0.5, seed=2))[1] != losses
  step, state = setup(dropout=0.5)
  state, _ = step(state, make_batch(0))
  state = state._replace(params=replicate(jax.tree.map(np.asarray, init_params()), step.mesh))
  _, metrics = step(state, make_batch(0))  # the same parameters and batch at the next step
  assert metrics['loss'] != losses[0]


def test_state_is_donated_but_the_callers_parameters_survive():
  mesh = make_mesh(jax.devices()[:1])
  schedule = make_schedule('constant', 10)
  optimizer = make_optimizer('adam', schedule)
  params = jax.tree.map(jnp.asarray, init_params())
  state = replicate(init_state(params, optimizer, 0.9), mesh)
  after, _ = make_train_step(sequence_loss(Toy()), optimizer, schedule, mesh, seed=0, average=0.9)(state, make_batch(0))
  assert all(x.is_deleted() for x in jax.tree.leaves(state))
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, after)))


def test_average_follows_the_parameters():
  step, state = setup(average=0.5)
  literal = jax.tree.map(np.array, state.params)
  for n in range(1, 5):
    state, _ = step(state, make_batch(n))
    d = min(0.5, (1 + n) / (10 + n))
    literal = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * np.asarray(p), literal, state.params)
  close(state.average, literal, rtol=1e-4, atol=1e-6)
  assert evaluation_params(state) is state.average


def test_running_means_are_those_of_the_updates_before():
  step, state = setup(loss=LEANING)
  assert state.running == {'accuracy': 0}
  mean = 0.0
  for n in range(1, 15):
    wanted = sequence_loss(Toy(0.0), 0.1)(state.params, make_batch(n))
    state, metrics = step(state, make_batch(n))
    np.testing.assert_allclose(metrics['loss'], wanted['loss'] / wanted['tokens'] * (1 + 10 * mean), rtol=1e-5)
    mean += (metrics['accuracy'] - mean) * max(0.1, 1 / n)
    np.testing.assert_allclose(state.running['accuracy'], mean, rtol=1e-5)
  assert mean > 0


@pytest.mark.parametrize(('devices', 'parts'), [(1, 4), (8, 1), (8, 2)])
def test_running_means_do_not_depend_on_parts_and_devices(devices, parts):
  whole, losses = run(*setup(loss=LEANING))
  split, same = run(*setup(devices, loss=LEANING, accumulate=parts))
  np.testing.assert_allclose(losses, same, rtol=1e-4)
  close(whole.running, split.running, rtol=1e-4)


@pytest.mark.parametrize('average', [0.0, 0.9])
def test_an_annealed_parameter_follows_its_schedule_instead_of_its_gradient(average):
  loss = sequence_loss(Toy(0.0), 0.1, 'diagonal')
  schedule = make_schedule('linear(peak=2.0, end=0.5)', 10)
  step, state = setup(loss=loss, average=average, anneal='temperature: linear(peak=2.0, end=0.5)', optimizer='adamw')
  for n in range(1, 13):
    for held in (state.params, evaluation_params(state)):
      np.testing.assert_allclose(held['temperature'], schedule(n), rtol=1e-6)
    grads = jax.grad(lambda p: (lambda s: s['loss'] / s['tokens'])(loss(p, make_batch(n))))(state.params)  # noqa: B023
    assert grads['temperature'] != 0
    state, metrics = step(state, make_batch(n))
    np.testing.assert_allclose(metrics['grad_norm'], optax.tree.norm(grads | {'temperature': 0.0}), rtol=1e-4)


def test_a_batch_of_filler_rows_only_changes_nothing_but_the_step():
  step, state = setup(optimizer='sgd', average=0.0)
  batch = make_batch(0)
  empty = batch._replace(source_mask=batch.source_mask & False, target_mask=batch.target_mask & False)
  after, metrics = step(state, empty)
  jax.tree.map(np.testing.assert_array_equal, after.params, init_params())
  assert metrics['loss'] == 0 and is_finite(after)


def test_rows_that_do_not_divide_are_told():
  step, state = setup(8)
  with pytest.raises(UserError, match='batch of 12 rows does not divide over 8 devices; possible: a multiple of 8'):
    step(state, make_batch(0, rows=12))
  step, state = setup(8, accumulate=4)
  with pytest.raises(UserError, match='8 devices x 4 accumulated parts; possible: a multiple of 32'):
    step(state, make_batch(0, rows=16))
