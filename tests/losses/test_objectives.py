"""Objectives against loops; policy gradients against all sequences there are; every decoder; specs that are wrong."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.losses import objectives
from attention_jax.losses.objectives import CURRICULA, OBJECTIVES, build_from_spec, divergence, make_objective
from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.tokens import BOS, EOS, PAD, UNK
from attention_jax.training.partition import make_mesh
from attention_jax.training.state import init_state
from attention_jax.training.step import make_train_step, step_rngs
from tests.losses.test_sentence_bleu import literal as bleu
from tests.models.helpers import build_tiny, build_transformer
from tests.training.helpers import Toy, init_params, make_batch

RNGS = step_rngs(jax.random.key(4))
NO_RNGS = {'objective': RNGS['objective']}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sums(spec, model, auxiliary, *given):
  return sequence_loss(model, 0.1, auxiliary, spec)(*given)


def sums(spec, batch=None, model=None, params=None, rngs=RNGS, update=1, auxiliary='', running=None):
  given = params or init_params(), batch or make_batch(0), rngs, running or {}, update
  return _sums(spec, model or Toy(0.3), auxiliary, *given)


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, batch, target, rngs=None):
  return model.apply(
    {'params': params}, batch.source, batch.source_mask, target, deterministic=rngs is None, rngs=rngs
  ).logits


# ------------------------------------------------------------------------------------------------------------- r_drop


def test_r_drop_is_two_passes_and_how_far_they_are_apart():
  batch, total, nats, tokens = make_batch(0), 0.0, 0.0, 0
  model = {name: rng for name, rng in RNGS.items() if name != 'objective'}
  rngs = [jax.tree.map(lambda rng, i=i: jax.random.fold_in(rng, i), model) for i in range(2)]
  passes = [np.asarray(read(Toy(0.3), init_params(), batch, batch.target, one), np.float64) for one in rngs]
  assert not np.allclose(*passes)
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in passes)
  for b, t in zip(*np.nonzero(batch.target_mask), strict=True):
    tokens += 1
    for x in (p, q):
      wanted = np.full(x.shape[-1], 0.1 / x.shape[-1])
      wanted[batch.target[b, t]] += 0.9
      nats -= sum(wanted[v] * np.log(x[b, t, v]) for v in range(len(wanted)))
    for x, y in ((p, q), (q, p)):
      total += sum(x[b, t, v] * np.log(x[b, t, v] / y[b, t, v]) for v in range(x.shape[-1])) / 2
  found = sums('r_drop(alpha=3)')
  assert found['tokens'] == tokens
  np.testing.assert_allclose(found['divergence'], total, rtol=1e-4)
  np.testing.assert_allclose(found['cross_entropy'], nats / 2, rtol=1e-5)
  np.testing.assert_allclose(found['loss'], nats + 3 * total, rtol=1e-5)
  beside = sums('r_drop(alpha=3)', auxiliary='coverage(weight=0.5)')
  np.testing.assert_allclose(beside['loss'], found['loss'] + 2 * 0.5 * beside['coverage'], rtol=1e-5)


def test_tokens_that_cannot_come_and_what_is_behind_the_mask_have_no_divergence():
  logits, mask = jax.random.normal(jax.random.key(0), (2, 2, 3, 5)), jnp.asarray([[True, True, False], [False] * 3])
  value = jax.jit(jax.value_and_grad(lambda x: divergence(*x, mask)))
  forbidden = jnp.where(mask[..., None], logits.at[..., 1].set(-jnp.inf), jnp.nan)
  found, gradient = value(forbidden)
  rest = [0, 2, 3, 4]
  wanted, slopes = value(logits[..., jnp.asarray(rest)])
  np.testing.assert_allclose(found, wanted, rtol=1e-5)
  np.testing.assert_allclose(gradient[..., rest], slopes, atol=1e-6)
  assert not gradient[..., 1].any() and not gradient[:, ~mask].any()


def test_r_drop_of_a_model_that_drops_nothing_is_refused():
  with pytest.raises(UserError, match=r'r_drop: the model drops nothing, so that both passes are one; set model\.drop'):
    sums('r_drop', model=Toy(0.0))


# ------------------------------------------------------------------------------------------------- scheduled sampling

SCHEDULES = {
  'linear(start=0.9, slope=0.01, least=0.25)': lambda n: max(0.25, 0.9 - 0.01 * n),
  'exponential(base=0.98)': lambda n: 0.98**n,
  'inverse_sigmoid(k=12)': lambda n: 12 / (12 + np.exp(n / 12)),
}


@pytest.mark.parametrize('spec', SCHEDULES)
def test_curricula_are_those_of_the_paper(spec):
  curriculum = build_from_spec(spec, CURRICULA, 'schedule')
  for n in (1, 2, 50, 400, 100_000):
    np.testing.assert_allclose(curriculum(jnp.int32(n)), SCHEDULES[spec](min(n, 8000)), rtol=1e-4, atol=1e-12)


def test_every_row_has_a_case():
  assert {spec.split('(')[0] for spec in SCHEDULES} == set(CURRICULA)


def test_all_tokens_of_the_data_are_the_likelihood_and_none_of_them_a_second_pass():
  batch, params, model = make_batch(0), init_params(), Toy(0.0)
  plain = sums('likelihood', model=model)
  np.testing.assert_allclose(sums('scheduled_sampling(schedule="linear(slope=0)")', model=model)['loss'], plain['loss'])
  spec = 'scheduled_sampling(schedule="linear(slope=0.1, least=0)", temperature=0)'
  found = sums(spec, model=model, update=10)
  said = np.array(read(model, params, batch, batch.target))
  said[..., [PAD, BOS, EOS]] = -np.inf  # a search does not go on after these
  own = np.where(batch.target_mask, said.argmax(-1), batch.target)
  wanted = cross_entropy(read(model, params, batch, own), batch.target, batch.target_mask, 0.1)
  for name in wanted:
    np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)
  assert found['own'] == found['tokens'] and abs(found['loss'] - plain['loss']) > 1e-3
  slopes = lambda fn: jax.jit(jax.grad(fn))(params)
  mine = slopes(lambda p: sums(spec, model=model, params=p, update=10)['loss'])
  only = slopes(lambda p: cross_entropy(read(model, p, batch, own), batch.target, batch.target_mask, 0.1)['loss'])
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), mine, only)


def test_as_many_are_read_as_the_schedule_says_and_drawn_as_often_as_they_are_likely():
  batch, spec = make_batch(0, rows=4096), 'scheduled_sampling(schedule="linear(slope=0.03, least=0)")'
  for n in (1, 10, 20):
    found = sums(spec, batch, update=n)
    np.testing.assert_allclose(found['own'] / found['tokens'], 0.03 * n, atol=0.015)
  logits = jnp.broadcast_to(jnp.asarray([3.0, 2.0, 1.0, 0.0, 1.5]), (20_000, 1, 5))
  drawn = np.bincount(objectives._drawn(jax.random.key(0), logits, 2.0)[:, 0], minlength=5) / 20_000
  np.testing.assert_allclose(drawn, [0, 0, 0, *(np.exp([0, 0.75]) / np.exp([0, 0.75]).sum())], atol=0.01)


# ------------------------------------------------------------------ what samples are worth: every sequence of two words

TINY = build_tiny('luong', 'rnn="simple"', score='general', sizes=(7, 5))
WORD, STEPS = 4, 3
SEQUENCES = [
  [*words, EOS, *[PAD] * (STEPS - 1 - n)] for n in range(STEPS) for words in itertools.product([UNK, WORD], repeat=n)
]
TARGET = [WORD, UNK, EOS]


def tiny_batch():
  """One pair, and a filler row."""
  source = jnp.asarray([[4, 6, 5, EOS], [0] * 4], jnp.int32)
  target = jnp.asarray([TARGET, [0] * STEPS], jnp.int32)
  return Batch(source, source != 0, target, target != 0, jnp.asarray([0, -1], jnp.int32))


@pytest.fixture(scope='module')
def tiny_params():
  batch = tiny_batch()
  params = jax.jit(TINY.init)(jax.random.key(1), batch.source, batch.source_mask, batch.target)['params']
  return jax.tree.map(lambda x: 2.0 * x, params)


def log_probabilities(params, policy):
  """Of each of SEQUENCES; of the policy, which is told what it may say, or of the model."""
  rows = jax.tree.map(lambda x: jnp.stack([x[0]] * len(SEQUENCES)), tiny_batch())
  found, logits = [], read(TINY, params, rows, jnp.asarray(SEQUENCES))
  allowed = np.zeros((2, STEPS, 5), bool)
  allowed[0], allowed[1, :, [EOS, UNK, WORD]], allowed[1, -1, [UNK, WORD]] = True, True, False
  logs = jax.nn.log_softmax(jnp.where(allowed[int(policy)][None], logits, -jnp.inf))
  for row, sequence in enumerate(SEQUENCES):
    found.append(sum(logs[row, t, token] for t, token in enumerate(sequence[: sequence.index(EOS) + 1])))
  return jnp.stack(found)


WORTH = np.array([bleu([t for t in s if t not in (PAD, EOS)], [WORD, UNK]) for s in SEQUENCES])


def given_samples(monkeypatch, spec, params, running=0.3):
  """indices [K] of SEQUENCES -> the loss, if these were drawn."""
  table = jnp.asarray(SEQUENCES, jnp.int32)

  def loss(params, indices):
    drawn = jnp.stack([table[indices], jnp.zeros((len(indices), STEPS), jnp.int32)], axis=1)
    monkeypatch.setattr(objectives, '_samples', lambda task, samples: drawn)
    return sequence_loss(TINY, 0.1, '', spec)(params, tiny_batch(), NO_RNGS, {'bleu': jnp.float32(running)})

  return loss


@pytest.mark.parametrize(('baseline', 'samples'), [('running', 1), ('others', 2)])
def test_the_policy_gradient_is_that_of_the_expected_reward(monkeypatch, tiny_params, baseline, samples):
  spec = f'reinforce(samples={samples}, baseline="{baseline}", likelihood=0)'
  loss = given_samples(monkeypatch, spec, tiny_params)
  draws = jnp.asarray(list(itertools.product(range(len(SEQUENCES)), repeat=samples)))

  def both(params):
    logs, slope = jax.vjp(lambda p: log_probabilities(p, True), params)
    chance = jnp.exp(logs)
    (wanted,) = slope(-chance * WORTH)  # of -Σ π(y) BLEU(y)
    each = jax.vmap(jax.grad(lambda p, indices: loss(p, indices)['loss']), in_axes=(None, 0))(params, draws)
    weight = jnp.prod(chance[draws], axis=1)
    return chance, wanted, jax.tree.map(lambda g: jnp.tensordot(weight, g, 1), each)

  chance, wanted, found = jax.jit(both)(tiny_params)
  np.testing.assert_allclose(chance.sum(), 1, rtol=1e-5)
  assert 0.05 < chance.max() < 0.95 and optax.tree.norm(wanted) > 1e-3
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-6), found, wanted)


def test_what_is_drawn_comes_as_often_as_the_policy_says(tiny_params):
  task = objectives.ObjectiveInputs(TINY, tiny_params, tiny_batch(), {}, jax.random.key(3), {}, 1, None)
  drawn = np.asarray(jax.jit(lambda: objectives._samples(task, 4000))())
  assert drawn.shape == (4000, 2, STEPS) and not drawn[:, 1].any()  # nothing of a filler row
  often = [np.mean(np.all(drawn[:, 0] == sequence, axis=1)) for sequence in SEQUENCES]
  chance = jax.jit(lambda: jnp.exp(log_probabilities(tiny_params, True)))()
  np.testing.assert_allclose(often, chance, atol=0.025)


@pytest.mark.parametrize(('gold', 'drawn'), [(False, [1, 3, 3, 6]), (True, [5, 0, 5, 2])])
def test_the_risk_is_that_of_the_different_samples(monkeypatch, tiny_params, gold, drawn):
  spec = f'minimum_risk(samples=4, sharpness=0.7, gold={gold}, likelihood=0.25)'
  loss = given_samples(monkeypatch, spec, tiny_params)
  those = jnp.asarray(sorted({*drawn, *([SEQUENCES.index(TARGET)] if gold else [])}))

  def risk(params):
    q = jnp.exp(log_probabilities(params, False)[those]) ** 0.7
    return jnp.sum(q / q.sum() * (1 - WORTH[those]))

  @jax.jit
  def both(params):
    mine = lambda p: (lambda s: (s['risk'], s))(loss(p, jnp.asarray(drawn)))
    return jax.value_and_grad(risk)(params), jax.value_and_grad(mine, has_aux=True)(params)

  (wanted, slopes), ((found, parts), gradient) = both(tiny_params)
  np.testing.assert_allclose(found, wanted, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6), gradient, slopes)
  np.testing.assert_allclose(parts['loss'], 0.25 * parts['cross_entropy'] + found, rtol=1e-5)
  np.testing.assert_allclose(parts['bleu'], STEPS * WORTH[drawn].mean(), rtol=1e-5)


def test_until_then_it_is_the_likelihood(tiny_params):
  loss = sequence_loss(TINY, 0.1, '', 'minimum_risk(samples=2, after=5)')
  found = jax.jit(lambda n: loss(tiny_params, tiny_batch(), NO_RNGS, {}, n))
  plain = sums('likelihood', tiny_batch(), TINY, tiny_params, NO_RNGS)
  before, then = found(5), found(6)
  assert before['risk'] == before['bleu'] == 0 < then['risk'] == then['loss']
  np.testing.assert_allclose([before['loss'], then['cross_entropy']], [plain['loss']] * 2, rtol=1e-6)


def test_runs_side_by_side_draw_as_each_does_alone(tiny_params):
  spec, batch, seeds = 'reinforce(samples=3)', tiny_batch(), (5, 8)
  loss, optimizer = sequence_loss(TINY, 0.1, '', spec), optax.sgd(0.1)
  copies = lambda tree: jax.tree.map(lambda x: np.stack([x, x]), tree)
  state = copies(init_state(tiny_params, optimizer, running=loss.running))
  step = make_train_step(loss, optimizer, lambda n: 0.1, make_mesh(jax.devices()[:2], seeds=2), seed=seeds)
  _, metrics = step(state, copies(batch))
  for i, seed in enumerate(seeds):
    rngs = step_rngs(jax.random.fold_in(jax.random.key(seed), 0))
    alone = sums(spec, batch, TINY, tiny_params, rngs, running={'bleu': 0.0})
    for name in ('loss', 'bleu', 'risk'):
      np.testing.assert_allclose(metrics[name][i], alone[name] / alone['tokens'], rtol=1e-4)
  assert metrics['risk'][0] != metrics['risk'][1]


# --------------------------------------------------------------------------------------------- every decoder, and specs

MODELS = {
  'hard': lambda: build_tiny('bahdanau', alignment='hard', dropout=0.1),
  'latent': lambda: build_tiny('luong', alignment='latent_monotonic', dropout=0.1),
  'transformer': lambda: build_transformer(dropout=0.1),
}


@pytest.mark.parametrize('name', MODELS)
def test_every_decoder_goes_in_parallel_and_is_sampled(name):
  model, ids = MODELS[name](), jnp.ones((2, 3), jnp.int32)
  batch = Batch(ids, ids > 0, ids, ids > 0, ids[:, 0])
  params = jax.eval_shape(lambda: model.init(jax.random.key(0), ids, ids > 0, ids)['params'])
  for spec in ('r_drop', 'reinforce(baseline="greedy")'):
    loss = sequence_loss(model, 0.1, 'coverage', spec)
    running = dict.fromkeys(loss.running, 0.0)
    assert {'loss', 'cross_entropy', 'coverage', 'tokens'} <= set(jax.eval_shape(loss, params, batch, RNGS, running))


@pytest.mark.parametrize('spec', sorted(OBJECTIVES))
def test_without_randomness_it_is_the_likelihood(spec):
  found, plain = sums(spec, rngs=None), sums('likelihood', rngs=None)
  assert {name: float(x) for name, x in found.items()} == {name: float(x) for name, x in plain.items()}


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('rdrop', r"unknown objective 'rdrop' \(did you mean 'r_drop'\?\); possible: likelihood, minimum_risk, r_drop"),
    ('r_drop(alpha=-1)', "objective 'r_drop': alpha is -1; possible: 0 or more, and finite"),
    ('r_drop(alhpa=1)', "unknown option of objective 'r_drop': 'alhpa' .*'alpha'"),
    ('r_drop(alpha="x")', "option alpha is a number like 5.0, got 'x'"),
    ('r_drop + likelihood', 'cannot read'),
    ('minimum_risk(samples=1)', 'minimum_risk: samples is 1; possible: 2 or more'),
    ('minimum_risk(sharpness=0)', 'minimum_risk: sharpness is 0; possible: greater than 0'),
    ('reinforce(samples=1)', "reinforce: samples is 1; possible: 2 or more with baseline 'others'"),
    ('reinforce(samples=0, baseline="running")', 'samples is 0; possible: 1 or more'),
    ('reinforce(baseline="mean")', "unknown baseline of reinforce 'mean'; possible: greedy, others, running"),
    ('scheduled_sampling(schedule="cosine")', "unknown schedule of scheduled_sampling 'cosine' .*: exponential, inv"),
    ('scheduled_sampling(schedule="linear(least=2)")', 'schedule linear: least is 2; possible: from 0 to 1'),
    ('scheduled_sampling(schedule="exponential(base=1)")', 'base is 1; possible: between 0 and 1'),
    ('scheduled_sampling(schedule="inverse_sigmoid(k=0.5)")', 'k is 0.5; possible: 1 or more'),
    ('scheduled_sampling(schedule="linear(")', "cannot read 'linear\\('"),
    ('scheduled_sampling(temperature=-1)', 'temperature is -1; possible: 0 or more'),
  ],
)
def test_wrong_specs_are_told_in_one_line(spec, message):
  with pytest.raises(UserError, match=message) as error:
    make_objective(spec)
  assert '\n' not in str(error.value)
