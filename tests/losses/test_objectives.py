"""R-drop and scheduled sampling against loops and second passes; runs side by side; decoders; invalid specs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.losses import objectives
from attention_jax.losses.objectives import OBJECTIVES, SAMPLING_SCHEDULES, build_from_spec, divergence, make_objective
from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.tokens import BOS, EOS, PAD
from attention_jax.training.partition import make_mesh
from attention_jax.training.state import init_state
from attention_jax.training.step import make_train_step, step_rngs
from tests.losses.helpers import RNGS, TINY, forward, loss_sums, tiny_batch
from tests.models.helpers import build_tiny, build_transformer
from tests.training.helpers import Toy, init_params, make_batch

# ------------------------------------------------------------------------------------------------------------- r_drop


@pytest.mark.long
def test_r_drop_equals_a_loop_over_two_passes():
  batch = make_batch(0)
  model_rngs = {name: rng for name, rng in RNGS.items() if name != 'objective'}
  pass_rngs = [jax.tree.map(lambda rng, i=i: jax.random.fold_in(rng, i), model_rngs) for i in range(2)]
  logits = [np.asarray(forward(Toy(0.3), init_params(), batch, batch.target, rngs), np.float64) for rngs in pass_rngs]
  assert not np.allclose(*logits)
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
  size = p.shape[-1]
  total_divergence = 0.0
  total_nats = 0.0
  tokens = 0
  for b, t in zip(*np.nonzero(batch.target_mask), strict=True):
    tokens += 1
    labels = np.full(size, 0.1 / size)
    labels[batch.target[b, t]] += 0.9
    for x in (p, q):
      total_nats -= sum(labels[v] * np.log(x[b, t, v]) for v in range(size))
    for x, y in ((p, q), (q, p)):
      total_divergence += sum(x[b, t, v] * np.log(x[b, t, v] / y[b, t, v]) for v in range(size)) / 2
  sums = loss_sums('r_drop(alpha=3)')
  assert sums['tokens'] == tokens
  np.testing.assert_allclose(sums['divergence'], total_divergence, rtol=1e-4)
  np.testing.assert_allclose(sums['cross_entropy'], total_nats / 2, rtol=1e-5)
  np.testing.assert_allclose(sums['loss'], total_nats + 3 * total_divergence, rtol=1e-5)


@pytest.mark.long
def test_r_drop_adds_auxiliary_losses_for_both_passes():
  plain = loss_sums('r_drop(alpha=3)')
  with_coverage = loss_sums('r_drop(alpha=3)', auxiliary='coverage(weight=0.5)')
  expected = plain['loss'] + 2 * 0.5 * with_coverage['coverage']
  np.testing.assert_allclose(with_coverage['loss'], expected, rtol=1e-5)


@pytest.mark.long
def test_divergence_ignores_forbidden_and_masked_tokens():
  logits = jax.random.normal(jax.random.key(0), (2, 2, 3, 5))
  mask = jnp.asarray([[True, True, False], [False] * 3])
  value_and_grad = jax.jit(jax.value_and_grad(lambda x: divergence(*x, mask)))
  forbidden = jnp.where(mask[..., None], logits.at[..., 1].set(-jnp.inf), jnp.nan)
  value, gradient = value_and_grad(forbidden)
  allowed_ids = [0, 2, 3, 4]
  expected, expected_gradient = value_and_grad(logits[..., jnp.asarray(allowed_ids)])
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient[..., allowed_ids], expected_gradient, atol=1e-6)
  assert not gradient[..., 1].any() and not gradient[:, ~mask].any()


def test_r_drop_of_a_model_without_dropout_raises():
  message = r'objective r_drop needs a model with dropout, otherwise both passes are equal; set model\.dropout'
  with pytest.raises(UserError, match=message):
    loss_sums('r_drop', model=Toy(0.0))


# ------------------------------------------------------------------------------------------------- scheduled sampling

SCHEDULES = {
  'linear(start=0.9, slope=0.01, minimum=0.25)': lambda n: max(0.25, 0.9 - 0.01 * n),
  'exponential(base=0.98)': lambda n: 0.98**n,
  'inverse_sigmoid(k=12)': lambda n: 12 / (12 + np.exp(n / 12)),
}


@pytest.mark.parametrize('spec', SCHEDULES)
def test_sampling_schedules_equal_the_formulas_of_the_paper(spec):
  assert {case.split('(')[0] for case in SCHEDULES} == set(SAMPLING_SCHEDULES)
  schedule = build_from_spec(spec, SAMPLING_SCHEDULES, 'schedule')
  for n in (1, 2, 50, 400, 100_000):
    expected = SCHEDULES[spec](min(n, 8000))  # from there on, every schedule is constant to 1e-12
    np.testing.assert_allclose(schedule(jnp.int32(n)), expected, rtol=1e-4, atol=1e-12)


@pytest.mark.long
def test_scheduled_sampling_of_reference_tokens_alone_equals_the_likelihood():
  losses = [
    loss_sums(spec, model=Toy(0.0))['loss'] for spec in ('likelihood', 'scheduled_sampling(schedule="linear(slope=0)")')
  ]
  np.testing.assert_allclose(*losses)


@pytest.mark.long
def test_scheduled_sampling_of_predicted_tokens_alone_equals_a_second_pass_over_them():
  batch, params, model = make_batch(0), init_params(), Toy(0.0)
  spec = 'scheduled_sampling(schedule="linear(slope=0.1, minimum=0)", temperature=0)'
  first_logits = np.array(forward(model, params, batch, batch.target))
  first_logits[..., [PAD, BOS, EOS]] = -np.inf  # these do not continue a hypothesis
  predicted = np.where(batch.target_mask, first_logits.argmax(-1), batch.target)

  def scheduled_loss(params):
    sums = loss_sums(spec, model=model, params=params, update=10)
    return sums['loss'], sums

  def second_pass_loss(params):
    sums = cross_entropy(forward(model, params, batch, predicted), batch.target, batch.target_mask, 0.1)
    return sums['loss'], sums

  gradient, sums = jax.jit(jax.grad(scheduled_loss, has_aux=True))(params)
  expected_gradient, expected = jax.jit(jax.grad(second_pass_loss, has_aux=True))(params)
  for name in expected:
    np.testing.assert_allclose(sums[name], expected[name], rtol=1e-5)
  assert sums['replaced_tokens'] == np.sum(batch.target_mask & (batch.target != EOS)) < sums['tokens']
  assert abs(sums['loss'] - loss_sums('likelihood', model=model)['loss']) > 1e-3
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), gradient, expected_gradient)


@pytest.mark.long
def test_the_share_of_predicted_tokens_follows_the_schedule():
  batch = make_batch(0, rows=4096)
  spec = 'scheduled_sampling(schedule="linear(slope=0.03, minimum=0)")'
  for n in (1, 10, 20):
    sums = loss_sums(spec, batch, update=n)
    readable = np.sum(batch.target_mask & (batch.target != EOS))
    np.testing.assert_allclose(sums['replaced_tokens'] / readable, 0.03 * n, atol=0.015)


@pytest.mark.long
def test_predicted_tokens_are_sampled_at_the_temperature():
  logits = jnp.broadcast_to(jnp.asarray([3.0, 2.0, 1.0, 0.0, 1.5]), (20_000, 1, 5))
  tokens = objectives._sample_tokens(jax.random.key(0), logits, 2.0)
  frequencies = np.bincount(tokens[:, 0], minlength=5) / 20_000
  powers = np.exp([0, 0.75])
  np.testing.assert_allclose(frequencies, [0, 0, 0, *(powers / powers.sum())], atol=0.01)
  coldest = objectives._sample_tokens(jax.random.key(0), 10 * logits[:5], 1e-37)
  np.testing.assert_array_equal(coldest, 4)


# --------------------------------------------------------------------------------------------------- runs side by side


@pytest.mark.long
def test_runs_trained_side_by_side_sample_as_single_runs(tiny_params):
  spec = 'reinforce(samples=3)'
  batch = tiny_batch()
  seeds = (5, 8)
  loss = sequence_loss(TINY, 0.1, '', spec)
  optimizer = optax.sgd(0.1)

  def repeat(tree):
    return jax.tree.map(lambda x: np.stack([x, x]), tree)

  states = repeat(init_state(tiny_params, optimizer, running=loss.running))
  step = make_train_step(loss, optimizer, lambda n: 0.1, make_mesh(jax.devices()[:2], seeds=2), seed=seeds)
  _, metrics = step(states, repeat(batch))
  for i, seed in enumerate(seeds):
    rngs = step_rngs(jax.random.fold_in(jax.random.key(seed), 0))
    single = loss_sums(spec, batch, TINY, tiny_params, rngs, running={'bleu': 0.0})
    for name in ('loss', 'bleu', 'risk'):
      np.testing.assert_allclose(metrics[name][i], single[name] / single['tokens'], rtol=1e-4)
  assert metrics['risk'][0] != metrics['risk'][1]


# -------------------------------------------------------------------------------------------------- decoders, and specs

MODELS = {
  'hard': lambda: build_tiny('bahdanau', alignment='hard', dropout=0.1),
  'latent': lambda: build_tiny('luong', alignment='latent_monotonic', dropout=0.1),
  'transformer': lambda: build_transformer(dropout=0.1),
}


@pytest.mark.parametrize(
  'name', ['latent', *(pytest.param(name, marks=pytest.mark.long) for name in ('hard', 'transformer'))]
)
def test_recurrent_and_transformer_decoders_support_two_passes_and_samples(name):
  model = MODELS[name]()
  ids = jnp.ones((2, 3), jnp.int32)
  batch = Batch(ids, ids > 0, ids, ids > 0, ids[:, 0])
  params = jax.eval_shape(lambda: model.init(jax.random.key(0), ids, ids > 0, ids)['params'])
  for spec in ('r_drop', 'reinforce(baseline="greedy")'):
    loss = sequence_loss(model, 0.1, 'coverage', spec)
    running = dict.fromkeys(loss.running, 0.0)
    sums = jax.eval_shape(loss, params, batch, RNGS, running)
    assert {'loss', 'cross_entropy', 'coverage', 'tokens'} <= set(sums)


@pytest.mark.long
@pytest.mark.parametrize('spec', sorted(OBJECTIVES))
def test_without_rngs_every_objective_is_the_likelihood(spec):
  sums, expected = (loss_sums(name, rngs=None) for name in (spec, 'likelihood'))
  assert sums.keys() == expected.keys() and all(sums[name] == expected[name] for name in sums)


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('rdrop', r"unknown objective 'rdrop' \(did you mean 'r_drop'\?\); expected one of: likelihood, minimum_risk, r_d"),
    ('r_drop(alpha=-1)', "objective 'r_drop': option alpha must be at least 0, got -1"),
    ('r_drop(alhpa=1)', "unknown option of objective 'r_drop': 'alhpa' .*'alpha'"),
    ('r_drop(alpha="x")', "option alpha must be a number, got 'x'"),
    ('r_drop + likelihood', 'cannot parse'),
    ('minimum_risk(samples=1)', "'minimum_risk': option samples must be at least 2 and at most 10000, got 1"),
    ('minimum_risk(sharpness=0)', "objective 'minimum_risk': option sharpness must be greater than 0, got 0"),
    ('reinforce(samples=1)', "reinforce: option samples must be at least 2 with baseline 'leave_one_out', got 1"),
    ('reinforce(samples=0, baseline="running")', 'option samples must be at least 1 and at most 10000, got 0'),
    ('reinforce(baseline="mean")', "unknown baseline of reinforce 'mean'; expected .*: greedy, leave_one_out, running"),
    ('scheduled_sampling(schedule="cosine")', "unknown schedule of scheduled_sampling 'cosine' .*: exponential, inv"),
    ('scheduled_sampling(schedule="linear(minimum=2)")', 'option minimum must be at least 0 and at most 1, got 2'),
    ('scheduled_sampling(schedule="exponential(base=1)")', 'base must be greater than 0 and less than 1, got 1'),
    ('scheduled_sampling(schedule="inverse_sigmoid(k=0.5)")', 'option k must be at least 1, got 0.5'),
    ('scheduled_sampling(schedule="linear(")', "cannot parse schedule of scheduled_sampling 'linear\\('"),
    ('scheduled_sampling(temperature=-1)', 'option temperature must be at least 0, got -1'),
  ],
)
def test_invalid_specs_are_reported_in_one_line(spec, message):
  with pytest.raises(UserError, match=message) as error:
    make_objective(spec)
  assert '\n' not in str(error.value)
