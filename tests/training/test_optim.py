"""Schedules against their formulas, every optimiser once, and errors of the specs."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.errors import UserError
from attention_jax.systems.glimpsing.deep_glimpses import DeepGlimpseNetwork
from attention_jax.systems.glimpsing.glimpses import GlimpseNetwork
from attention_jax.systems.glimpsing.model import SpatialTransformerNetwork
from attention_jax.systems.recall.model import RecallConfig, build_recaller
from attention_jax.training.optim import (
  OPTIMIZERS,
  OPTIONAL,
  SCHEDULES,
  SUPPLIED_OPTIONS,
  _hidden_kernels,
  describe_warmup,
  make_optimizer,
  make_schedule,
)
from tests.systems.classification.test_model import MASK, SOURCE, build_small

OUTPUTS = 11  # of every model below, and the width of no other layer
PICTURES = (jnp.zeros((2, 12, 12, 1)), jnp.zeros((2, 2)))


def cosine(n):
  return 0.1 + 1.9 * 0.5 * (1 + np.cos(np.pi * (n - 10) / 90)) if n >= 10 else 2.0 * n / 10


SCHEDULE_CASES = {
  'constant(rate=0.3)': lambda n: 0.3,
  'constant(rate=0.3, warmup=5)': lambda n: 0.3 * min(1, n / 5),
  'rsqrt(peak=2.0, warmup=10)': lambda n: 2.0 * min(n / 10, (10 / n) ** 0.5),
  'cosine(peak=2.0, warmup=10, end=0.1)': cosine,
  'linear(peak=2.0, warmup=10, end=0.5, steps=60)': lambda n: 0.2 * n if n < 10 else max(0.5, 2 - 1.5 * (n - 10) / 50),
  'wsd(peak=2.0, warmup=10, cooldown=0.4, end=0.5)': lambda n: 0.2 * n if n < 10 else min(2.0, 2 - 1.5 * (n - 60) / 40),
  'wsd(peak=2.0, cooldown=0.0)': lambda n: 2.0,
  'wsd(peak=0.9, warmup=10, cooldown=1.0)': lambda n: 0.09 * n if n < 10 else 0.9 - 0.01 * (n - 10),
  'halve(rate=1.0, after=20, every=7)': lambda n: 1.0 if n < 20 else 0.5 ** ((n - 20) // 7 + 1),
}


@pytest.mark.long
@pytest.mark.parametrize('spec', SCHEDULE_CASES)
def test_a_schedule_follows_its_formula(spec):
  schedule = make_schedule(spec, steps=100)
  for n in range(1, 101):
    np.testing.assert_allclose(schedule(jnp.int32(n)), SCHEDULE_CASES[spec](n), rtol=1e-5, err_msg=f'update {n}')


def test_every_schedule_has_a_case():
  assert {spec.split('(')[0] for spec in SCHEDULE_CASES} == set(SCHEDULES)


@pytest.mark.parametrize('name', SCHEDULES)
def test_the_defaults_give_positive_rates(name):
  schedule = make_schedule(name, steps=50)
  assert all(0 < schedule(jnp.int32(n)) < 10 for n in (1, 2, 49))


@pytest.mark.long
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_decreases_a_quadratic(name):
  def objective(params):
    return jnp.sum(params['w'] ** 2)

  optimizer = make_optimizer(name, make_schedule('constant(rate=0.01)', 10), clip=1.0)
  initial = {'w': jnp.array([3.0, -2.0])}

  def update(carry, _):
    params, state = carry
    updates, state = optimizer.update(jax.grad(objective)(params), state, params)
    return (optax.apply_updates(params, updates), state), ()

  (params, _), _ = jax.jit(lambda: jax.lax.scan(update, (initial, optimizer.init(initial)), length=5))()
  assert objective(params) < objective(initial)


@pytest.mark.long
def test_the_first_update_has_the_first_rate_and_options_reach_optax():
  schedule = make_schedule('constant(rate=1.0, warmup=4)', 10)
  params = {'w': jnp.zeros(2)}
  grads = {'w': jnp.array([3.0, 4.0])}
  for clip, norm in ((0.0, 5.0), (1.0, 1.0), (100.0, 5.0)):
    optimizer = make_optimizer('sgd(momentum=0.5)', schedule, clip)
    first, state = optimizer.update(grads, optimizer.init(params), params)
    second, _ = optimizer.update(grads, state, params)
    np.testing.assert_allclose(np.linalg.norm(first['w']), 0.25 * norm, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(second['w']), 0.5 * 1.5 * norm, rtol=1e-5)


def test_adam_equals_optax():
  schedule = make_schedule('constant(rate=0.1)', 10)
  params = {'w': jnp.ones(3)}
  grads = {'w': jnp.array([1.0, -2.0, 0.5])}
  optimizer = make_optimizer('adam(b2=0.98, eps=1e-6)', schedule)
  optax_adam = optax.adam(0.1, b2=0.98, eps=1e-6)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  expected, _ = optax_adam.update(grads, optax_adam.init(params), params)
  np.testing.assert_array_equal(updates['w'], expected['w'])


@pytest.mark.parametrize('name', ['adamw', 'lamb', 'lion'])
def test_weight_decay_can_exclude_biases_gains_and_embeddings(name):
  shapes = {
    'dense': {'kernel': (3, 2), 'bias': (2,)},
    'attention': {'query': {'kernel': (2, 3, 2), 'bias': (2, 2)}, 'score_params': {'w': (2, 3, 3), 'v': (2, 3)}},
    'heads': {'score': {'v': (2, 3)}},  # of a Turing machine
    'norm': {'scale': (2,)},
    'embedding': {'embedding': (5, 2)},
    'positions': {'table': (4, 2)},
  }
  params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
  gradients = jax.tree.map(jnp.zeros_like, params)

  @jax.jit
  def update():
    options = ('0.1, mask="kernels"', '0.1', '0.1, mask="all"', '0.0')
    optimizers = [make_optimizer(f'{name}(weight_decay={x})', make_schedule('constant', 10)) for x in options]
    return [optimizer.update(gradients, optimizer.init(params), params)[0] for optimizer in optimizers]

  def decayed(updates):
    leaves = jax.tree.leaves_with_path(updates)
    return {jax.tree_util.keystr(path, simple=True, separator='.') for path, update in leaves if np.any(update)}

  of_kernels, by_default, of_all, none = map(decayed, update())
  assert of_kernels == {'dense.kernel', 'attention.query.kernel', 'attention.score_params.w'}
  assert len(by_default) == len(of_all) == 10 and not none


def test_every_option_that_is_none_by_default_has_a_type():
  for function in OPTIMIZERS.values():
    parameters = inspect.signature(function).parameters.values()
    assert {p.name for p in parameters if p.default is None} <= {*OPTIONAL, *SUPPLIED_OPTIONS}


def test_muon_orthogonalises_hidden_kernels_and_equals_nadam_elsewhere():
  decoder_shapes = {'kernel': (6, 4), 'heads': (2, 6, 3), 'bias': (4,), 'embedding': (9, 5)}
  shapes = {'decoder': decoder_shapes, 'output': {'kernel': (6, 4)}}
  random = np.random.default_rng(0)

  def map_shapes(fn):
    return jax.tree.map(fn, shapes, is_leaf=lambda x: isinstance(x, tuple))

  params = map_shapes(jnp.zeros)
  grads = map_shapes(lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32))
  schedule = make_schedule('constant(rate=0.1)', 10)
  optimizer = make_optimizer('muon(ns_steps=8)', schedule)
  nadam = make_optimizer('nadam', schedule)
  updates, expected = jax.jit(lambda: [o.update(grads, o.init(params), params)[0] for o in (optimizer, nadam)])()
  as_matrix = {
    'kernel': lambda x: x,
    'heads': lambda x: jnp.moveaxis(x, 0, 1).reshape(6, 6),  # [N, D, F] -> [D, N F]
  }
  for name, matrix in as_matrix.items():
    left, _, right = np.linalg.svd(matrix(grads['decoder'][name]), full_matrices=False)
    update = matrix(updates['decoder'][name])
    np.testing.assert_allclose(np.linalg.svd(update)[1], 0.1, rtol=0.35)  # the iteration is approximate
    np.testing.assert_allclose(np.diagonal(-left.T @ update @ right.T), 0.1, rtol=0.35)
  for module, name in (('decoder', 'bias'), ('decoder', 'embedding'), ('output', 'kernel')):
    np.testing.assert_allclose(updates[module][name], expected[module][name], rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
  ('model', 'inputs'),
  [
    (build_small().clone(labels=OUTPUTS), (SOURCE, MASK)),
    (GlimpseNetwork(OUTPUTS, size=2, hidden=4, features=5), PICTURES),
    (DeepGlimpseNetwork(OUTPUTS, size=2, hidden=4, features=5), PICTURES),
    (SpatialTransformerNetwork(OUTPUTS, size=6, hidden=4, features=5), PICTURES),
    (build_recaller(RecallConfig('turing(slots=3, width=4, features=5)'), OUTPUTS), (jnp.zeros((2, 3, 2)),)),
  ],
  ids=['classifier', 'glimpses', 'deep_glimpses', 'spatial_transformer', 'recaller'],
)
def test_muon_leaves_the_layer_of_the_logits_to_adam(model, inputs):
  rngs = {'params': jax.random.key(0), 'attention': jax.random.key(1)}
  shapes = jax.eval_shape(model.init, rngs, *inputs)['params']
  uses_adam = jax.tree.map(lambda leaf, axes: axes is None, shapes, _hidden_kernels(shapes))
  is_matrix = [leaf.ndim == 2 for leaf in jax.tree.leaves(shapes)]
  is_output = [leaf.shape[-1] == OUTPUTS for leaf in jax.tree.leaves(shapes)]
  kernels = set(itertools.compress(zip(is_output, jax.tree.leaves(uses_adam), strict=True), is_matrix))
  assert kernels >= {(True, True), (False, False)} and (True, False) not in kernels


@pytest.mark.parametrize(
  ('make', 'spec', 'message'),
  [
    (make_optimizer, 'adamm', "unknown optimizer 'adamm' .*'adam'.*expected one of: .*sgd"),
    (make_optimizer, 'adam(beta2=0.9)', "option of optimizer 'adam': 'beta2'.*expected one of: .*b2"),
    (make_optimizer, 'adam(learning_rate=0.1)', "unknown .* 'learning_rate'"),
    (make_optimizer, 'muon(muon_weight_dimension_numbers=2)', "unknown .* 'muon_weight_dimension_numbers'"),
    (make_optimizer, "muon(weight_decay_mask='kernels')", "unknown .* 'weight_decay_mask'"),
    (make_optimizer, 'adam(b2=[1])', 'b2 must be a number'),
    (make_optimizer, 'adam(b1=True)', 'b1 must be a number, got True'),
    (make_optimizer, 'adamw(b1=2)', "optimizer 'adamw': option b1 must be at least 0 and less than 1, got 2"),
    (make_optimizer, 'sgd(momentum=1.0)', 'momentum must be at least 0 and less than 1, got 1.0'),
    (make_optimizer, "sgd(momentum='x')", r'momentum must be float \| None, got .x.'),
    (make_optimizer, 'adam(0.1)', 'cannot parse'),
    (make_optimizer, "adamw(mask='kernel')", "mask must be Literal..all., .kernels.., got 'kernel'"),
    (make_optimizer, 'lion(mask=False)', 'mask must be Literal.*, got False'),
    (make_optimizer, "adam(mu_dtype='int8')", "mu_dtype must be Literal.*, got 'int8'"),
    (make_schedule, 'rsqr', "did you mean 'rsqrt'"),
    (make_schedule, 'rsqrt(warm=3)', "did you mean 'warmup'"),
    (make_schedule, "rsqrt(warmup='x')", 'warmup must be a number'),
    (make_schedule, 'cosine(peak=0)', 'cannot be built: peak must be greater than 0, got 0'),
    (make_schedule, 'wsd(cooldown=1.5)', 'cooldown must be a share of the run, between 0 and 1, got 1.5'),
    (make_schedule, 'halve(every=0)', 'every must be at least 1, got 0'),
    (make_schedule, 'constant(rate=-1.0)', 'rate must be at least 0, got -1.0'),
  ],
)
def test_wrong_specs_are_reported_in_one_line(make, spec, message):
  with pytest.raises(UserError, match=message) as error:
    make(spec, 10)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('spec', 'steps', 'words'),
  [
    ('cosine(peak=1e-3, warmup=100)', 30, ['warm-up of 100 updates is longer than the run of 30']),
    ('cosine(peak=1e-3, warmup=100)', 100, []),
    ('rsqrt', 3999, ['warm-up of 4000 updates']),
    ('halve', 10, []),
    ('constant', 1, []),
  ],
)
def test_a_warmup_that_does_not_end_is_described(spec, steps, words):
  line = describe_warmup(spec, steps)
  assert bool(line) == bool(words) and all(word in line for word in words)
