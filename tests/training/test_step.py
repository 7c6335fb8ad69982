"""One update: parts equal the whole, devices agree, shapes compile once, randomness is a function of the step."""

import functools

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
from tests.training import helpers
from tests.training.helpers import Toy, init_params, make_batch


def loss_with_running_mean(params, batch, rngs, running, update):
  """A deterministic loss that depends on a running mean."""
  sums = toy_loss()(params, batch)
  return {**sums, 'loss': sums['loss'] * (1 + 10 * running['accuracy'])}


RUNNING_LOSS = Loss(loss_with_running_mean, ('accuracy',))


def scaled_sums(params, batch, rngs, running, update):
  sums = helpers.light_sums(params, batch, rngs, running, update)
  return sums | {'loss': params['temperature'] * sums['loss']}


SCALED = {'loss': Loss(scaled_sums), 'params': helpers.LIGHT_PARAMS | {'temperature': np.float32(1)}}
ANNEAL = 'temperature: linear(peak=2.0, end=0.5)'


@functools.cache
def make_step(devices, loss, optimizer, average_decay, anneal, options):
  """Returns a training step, which tests share, and a function that makes its initial state from parameters."""
  mesh = make_mesh(jax.devices()[:devices])
  schedule = make_schedule('constant(rate=0.1)', 10)
  transform = make_optimizer(optimizer, schedule, clip=1.0)
  schedules = make_anneal(anneal, init_params(), 10)
  options = dict(options) | {'average_decay': average_decay, 'anneal': schedules}
  step = make_train_step(loss, transform, schedule, mesh, seed=1, **options)

  def init(params):
    params = apply_schedules(params, schedules, 1)
    return replicate(init_state(params, transform, average_decay, loss.running), mesh)

  return step, init


@functools.cache
def toy_loss(dropout=0.0):
  return sequence_loss(Toy(dropout), 0.1)


def setup(
  devices=1, dropout=0.0, optimizer='adam', average_decay=0.9, seed=1, loss=None, anneal='', params=None, **options
):
  """Returns a training step and its initial state."""
  loss = loss or toy_loss(dropout)
  step, init = make_step(devices, loss, optimizer, average_decay, anneal, tuple(options.items()))
  return step.with_seed(seed), init(init_params() if params is None else params)


def run(step, state, steps=4):
  """Returns the last state and the loss of each update."""
  losses = []
  for i in range(steps):
    state, metrics = step(state, make_batch(i))
    losses.append(float(metrics['loss']))
  return state, losses


def mean_loss(loss, params, batch):
  sums = loss(params, batch)
  return sums['loss'] / sums['tokens']


def assert_close(a, b, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.long
@pytest.mark.parametrize('seed', [1, np.int64(1), (1, 2)], ids=['int', 'numpy', 'several'])
def test_an_update_that_is_not_finite_is_skipped(seed):
  """Everything but the number of the update stays as it was, including the moments of Adam and the moving average."""

  def sums(params, batch, rngs, running, update):
    factor = jnp.where(batch['bad'], jnp.nan, 1.0)
    return {'loss': jnp.sum(jnp.square(params['w'])) * factor.sum(), 'tokens': jnp.float32(1)}

  several = np.ndim(seed) > 0
  mesh = make_mesh(jax.devices()[:1], seeds=2 if several else 1)
  schedule = make_schedule('constant(rate=0.1)', 10)
  transform = make_optimizer('adam', schedule)
  step = make_train_step(Loss(sums), transform, schedule, mesh, seed=seed, average_decay=0.9, skip_nonfinite=True)
  state = init_state({'w': jnp.ones(3)}, transform, 0.9)
  bad = {'bad': np.array([True, False])}
  good = {'bad': np.array([False, False])}
  if several:  # the first run alone has a bad batch
    state = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    bad = {'bad': np.array([[True, False], [False, False]])}
    good = {'bad': np.zeros((2, 2), bool)}
  state, _ = step(replicate(state, mesh), good)
  before = jax.device_get(state)
  after, metrics = step(state, bad)
  first = (lambda tree: jax.tree.map(lambda x: x[0], tree)) if several else (lambda tree: tree)
  assert jnp.isnan(first(metrics['loss']))
  after_first, unchanged = first(after), first(before)._replace(step=2)
  moments, schedule_state = unchanged.opt_state
  unchanged = unchanged._replace(opt_state=(moments, schedule_state._replace(count=2)))
  jax.tree.map(np.testing.assert_array_equal, after_first, unchanged)
  if several:
    assert not np.array_equal(after.params['w'][1], before.params['w'][1])


@pytest.mark.long
def test_the_update_is_the_gradient_of_the_mean_over_unmasked_tokens():
  step, state = setup(optimizer='sgd', average_decay=0.0)
  params = init_params()
  batch = make_batch(0)
  value, grads = jax.jit(jax.value_and_grad(lambda params: mean_loss(toy_loss(), params, batch)))(params)
  norm = optax.tree.norm(grads)
  state, metrics = step(state, batch)
  expected = jax.tree.map(lambda p, g: p - 0.1 * g / max(norm, 1), params, grads)
  assert_close(state.params, expected, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(metrics['loss'], value, rtol=1e-5)
  np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-5)
  assert metrics['tokens'] == batch.target_mask.sum() and metrics['learning_rate'] == np.float32(0.1)
  assert state.step == 1 and state.average == () and evaluation_params(state) is state.params


@pytest.mark.long
@pytest.mark.parametrize(('devices', 'parts', 'dropout'), [(1, 2, 0), (1, 16, 0), (8, 2, 0), (8, 1, 0), (8, 1, 0.3)])
def test_devices_and_accumulated_parts_equal_the_whole_batch(devices, parts, dropout):
  whole, losses = run(*setup(dropout=dropout))
  split, split_losses = run(*setup(devices, dropout, accumulate=parts))
  np.testing.assert_allclose(losses, split_losses, rtol=1e-5)
  assert_close(whole, split, rtol=2e-3, atol=1e-5)
  assert split.step == 4 and split.opt_state[1][0].count == 4  # updates, not parts
  assert len(split.step.sharding.device_set) == devices


@pytest.mark.long
def test_randomness_is_a_function_of_seed_and_step():
  first, losses = run(*setup(dropout=0.5))
  second, repeated_losses = run(*setup(dropout=0.5))
  assert losses == repeated_losses
  jax.tree.map(np.testing.assert_array_equal, first, second)
  assert run(*setup(dropout=0.5, seed=2))[1] != losses
  step, state = setup(dropout=0.5)
  state, _ = step(state, make_batch(0))
  state = state._replace(params=replicate(jax.tree.map(np.asarray, init_params()), step.mesh))
  _, metrics = step(state, make_batch(0))  # the same parameters and batch at the next step
  assert metrics['loss'] != losses[0]


def test_the_state_is_donated_but_the_callers_parameters_are_not():
  params = jax.tree.map(jnp.asarray, helpers.LIGHT_PARAMS)
  step, state = setup(loss=helpers.LIGHT_LOSS, params=params)
  next_state, _ = step(state, make_batch(0))
  assert all(x.is_deleted() for x in jax.tree.leaves(state))
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, next_state)))


@pytest.mark.long
def test_the_loss_reads_the_running_means_of_the_previous_updates():
  step, state = setup(loss=RUNNING_LOSS)
  assert state.running == {'accuracy': 0}
  mean = 0.0
  plain_loss = jax.jit(functools.partial(mean_loss, toy_loss()))
  for n in range(1, 15):
    expected = plain_loss(state.params, make_batch(n))
    state, metrics = step(state, make_batch(n))
    np.testing.assert_allclose(metrics['loss'], expected * (1 + 10 * mean), rtol=1e-5)
    mean += (metrics['accuracy'] - mean) * max(0.1, 1 / n)
    np.testing.assert_allclose(state.running['accuracy'], mean, rtol=1e-5)
  assert mean > 0


@pytest.mark.long
@pytest.mark.parametrize(('devices', 'parts'), [(1, 4), (8, 1), (8, 2)])
def test_running_means_do_not_depend_on_parts_and_devices(devices, parts):
  whole, losses = run(*setup(loss=RUNNING_LOSS))
  split, split_losses = run(*setup(devices, loss=RUNNING_LOSS, accumulate=parts))
  np.testing.assert_allclose(losses, split_losses, rtol=1e-4)
  assert_close(whole.running, split.running, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('average_decay', [0.0, 0.9])
def test_an_annealed_parameter_follows_its_schedule_instead_of_its_gradient(average_decay):
  schedule = make_schedule('linear(peak=2.0, end=0.5)', 10)
  step, state = setup(**SCALED, average_decay=average_decay, anneal=ANNEAL, optimizer='adamw')
  gradient = jax.jit(jax.grad(functools.partial(mean_loss, SCALED['loss'])))
  for n in range(1, 13):
    batch = make_batch(n)
    for params in (state.params, evaluation_params(state)):
      np.testing.assert_allclose(params['temperature'], schedule(n), rtol=1e-6)
    grads = gradient(state.params, batch)
    assert grads['temperature'] != 0
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics['grad_norm'], optax.tree.norm(grads | {'temperature': 0.0}), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('optimizer', ['sgd', 'adafactor', 'muon'])
def test_the_learning_rate_is_that_of_the_update_number_after_a_skipped_update(optimizer):
  def sums(params, batch, rngs, running, update):
    return {'loss': jnp.sum(params['w']) * jnp.where(update == 1, jnp.nan, 1.0), 'tokens': jnp.float32(1)}

  def run_updates(skipped_rate):
    mesh = make_mesh(jax.devices()[:1])

    def schedule(n):
      return jnp.where(n == 1, skipped_rate, 0.5**n)

    transform = make_optimizer(optimizer, schedule)
    step = make_train_step(Loss(sums), transform, schedule, mesh, seed=1, skip_nonfinite=True)
    state = replicate(init_state({'w': jnp.ones(3)}, transform), mesh)
    for _ in range(2):
      state, metrics = step(state, {'x': np.zeros(1)})
    assert metrics['learning_rate'] == 0.25
    return state.params['w']

  assert jnp.all(run_updates(1.0) != 1.0)
  np.testing.assert_array_equal(run_updates(1.0), run_updates(100.0))


def test_an_annealed_parameter_follows_its_schedule_after_a_skipped_update():
  def sums(params, batch, rngs, running, update):
    sums = scaled_sums(params, batch, rngs, running, update)
    return sums | {'loss': jnp.where(update == 1, jnp.nan, sums['loss'])}

  schedule = make_schedule('linear(peak=2.0, end=0.5)', 10)
  step, state = setup(**SCALED | {'loss': Loss(sums)}, anneal=ANNEAL, skip_nonfinite=True)
  for n in (1, 2, 3):
    for params in (state.params, state.average):
      np.testing.assert_allclose(params['temperature'], schedule(n), rtol=1e-6)
    assert evaluation_params(state) is state.average
    state, _ = step(state, make_batch(n))


def test_a_batch_of_filler_rows_leaves_the_parameters_unchanged():
  step, state = setup(optimizer='sgd', average_decay=0.0)
  batch = make_batch(0)
  masked = batch._replace(source_mask=batch.source_mask & False, target_mask=batch.target_mask & False)
  next_state, metrics = step(state, masked)
  jax.tree.map(np.testing.assert_array_equal, next_state.params, init_params())
  assert metrics['loss'] == 0 and is_finite(next_state)


def test_rows_that_do_not_divide_evenly_are_an_error():
  light = {'params': helpers.LIGHT_PARAMS, 'loss': helpers.LIGHT_LOSS}
  step, state = setup(8, **light)
  message = r'a batch of 12 rows does not divide over 8 devices \(data x fsdp\); expected a multiple of 8'
  with pytest.raises(UserError, match=message):
    step(state, make_batch(0, rows=12))
  step, state = setup(8, accumulate=4, **light)
  with pytest.raises(UserError, match=r'8 devices \(data x fsdp\) x 4 accumulated parts; expected a multiple of 32'):
    step(state, make_batch(0, rows=16))
