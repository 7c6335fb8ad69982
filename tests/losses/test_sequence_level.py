"""Objectives of whole sequences equal sums over all sequences of a tiny model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attention_jax.losses import sequence_level
from attention_jax.losses.base import ObjectiveInputs
from attention_jax.losses.sequence import sequence_loss
from attention_jax.tokens import BOS, EOS, PAD, UNK
from tests.losses.helpers import RNGS, STEPS, TARGET, TINY, WORD, forward, loss_sums, tiny_batch
from tests.losses.test_sentence_bleu import reference_bleu
from tests.models.helpers import build_tiny

OBJECTIVE_RNGS = {'objective': RNGS['objective']}


SEQUENCES = [
  [*words, EOS, *[PAD] * (STEPS - 1 - n)] for n in range(STEPS) for words in itertools.product([UNK, WORD], repeat=n)
]


BLEU = np.array([reference_bleu([t for t in s if t not in (PAD, EOS)], [WORD, UNK]) for s in SEQUENCES])


def log_probs_of_sequences(params, restrict):
  """Log-probabilities of SEQUENCES: of the policy, whose allowed tokens are restricted, or of the model itself."""
  rows = jax.tree.map(lambda x: jnp.stack([x[0]] * len(SEQUENCES)), tiny_batch())
  logits = forward(TINY, params, rows, jnp.asarray(SEQUENCES))
  allowed = np.ones((STEPS, 5), bool)
  if restrict:
    allowed[:, [PAD, BOS]] = False
    allowed[-1, [UNK, WORD]] = False
  log_probs = jax.nn.log_softmax(jnp.where(allowed[None], logits, -jnp.inf))
  totals = []
  for row, sequence in enumerate(SEQUENCES):
    tokens = sequence[: sequence.index(EOS) + 1]
    totals.append(sum(log_probs[row, t, token] for t, token in enumerate(tokens)))
  return jnp.stack(totals)


def loss_of_samples(monkeypatch, spec, running=0.3):
  """Returns (params, indices [K] of SEQUENCES) -> the sums of the loss with these sequences as samples."""
  sequences = jnp.asarray(SEQUENCES, jnp.int32)

  def loss(params, indices):
    filler = jnp.zeros((len(indices), STEPS), jnp.int32)
    samples = jnp.stack([sequences[indices], filler], axis=1)
    monkeypatch.setattr(sequence_level, '_samples', lambda inputs, count: samples)
    return sequence_loss(TINY, 0.1, '', spec)(params, tiny_batch(), OBJECTIVE_RNGS, {'bleu': jnp.float32(running)})

  return loss


@pytest.mark.long
@pytest.mark.parametrize(('baseline', 'samples'), [('running', 1), ('leave_one_out', 2)])
def test_the_expected_policy_gradient_is_that_of_the_expected_reward(monkeypatch, tiny_params, baseline, samples):
  spec = f'reinforce(samples={samples}, baseline="{baseline}", likelihood=0)'
  loss = loss_of_samples(monkeypatch, spec)
  all_draws = jnp.asarray(list(itertools.product(range(len(SEQUENCES)), repeat=samples)))

  @jax.jit
  def probabilities_and_gradients(params):
    log_probs, vjp = jax.vjp(lambda params: log_probs_of_sequences(params, restrict=True), params)
    probabilities = jnp.exp(log_probs)
    (expected,) = vjp(-probabilities * BLEU)  # gradient of -Σ π(y) BLEU(y)

    def loss_of_draw(params, indices):
      return loss(params, indices)['loss']

    gradients = jax.vmap(jax.grad(loss_of_draw), in_axes=(None, 0))(params, all_draws)
    draw_probabilities = jnp.prod(probabilities[all_draws], axis=1)
    actual = jax.tree.map(lambda g: jnp.tensordot(draw_probabilities, g, 1), gradients)
    return probabilities, expected, actual

  probabilities, expected, actual = probabilities_and_gradients(tiny_params)
  np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
  assert 0.05 < probabilities.max() < 0.95 and optax.tree.norm(expected) > 1e-3
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-6), actual, expected)


@pytest.mark.long
def test_frequencies_of_samples_are_the_probabilities_of_the_policy(tiny_params):
  inputs = ObjectiveInputs(TINY, tiny_params, tiny_batch(), {}, jax.random.key(3), {}, 1, None)
  samples = np.asarray(jax.jit(lambda: sequence_level._samples(inputs, 4000))())
  assert samples.shape == (4000, 2, STEPS)
  assert not samples[:, 1].any()  # the filler row
  frequencies = [np.mean(np.all(samples[:, 0] == sequence, axis=1)) for sequence in SEQUENCES]
  expected = jax.jit(lambda: jnp.exp(log_probs_of_sequences(tiny_params, restrict=True)))()
  np.testing.assert_allclose(frequencies, expected, atol=0.025)


@pytest.mark.long
@pytest.mark.parametrize(('gold', 'drawn'), [(False, [1, 3, 3, 6]), (True, [5, 0, 5, 2])])
def test_minimum_risk_is_the_expected_risk_of_the_distinct_samples(monkeypatch, tiny_params, gold, drawn):
  spec = f'minimum_risk(samples=4, sharpness=0.7, gold={gold}, likelihood=0.25)'
  loss = loss_of_samples(monkeypatch, spec)
  distinct = set(drawn)
  if gold:
    distinct.add(SEQUENCES.index(TARGET))
  indices = jnp.asarray(sorted(distinct))

  def expected_risk(params):
    q = jnp.exp(log_probs_of_sequences(params, restrict=False)[indices]) ** 0.7
    return jnp.sum(q / q.sum() * (1 - BLEU[indices]))

  def risk_and_sums(params):
    sums = loss(params, jnp.asarray(drawn))
    return sums['risk'], sums

  @jax.jit
  def values_and_gradients(params):
    return jax.value_and_grad(expected_risk)(params), jax.value_and_grad(risk_and_sums, has_aux=True)(params)

  (expected, expected_gradient), ((risk, sums), gradient) = values_and_gradients(tiny_params)
  np.testing.assert_allclose(risk, expected, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6), gradient, expected_gradient)
  np.testing.assert_allclose(sums['loss'], 0.25 * sums['cross_entropy'] + risk, rtol=1e-5)
  np.testing.assert_allclose(sums['bleu'], STEPS * BLEU[drawn].mean(), rtol=1e-5)


def test_the_loss_is_that_of_the_likelihood_up_to_update_after(tiny_params):
  loss = sequence_loss(TINY, 0.1, '', 'minimum_risk(samples=2, after=5)')
  sums_of_update = jax.jit(lambda n: loss(tiny_params, tiny_batch(), OBJECTIVE_RNGS, {}, n))
  plain = loss_sums('likelihood', tiny_batch(), TINY, tiny_params, OBJECTIVE_RNGS)
  before = sums_of_update(5)
  after = sums_of_update(6)
  assert before['risk'] == before['bleu'] == 0 < after['risk'] == after['loss']
  np.testing.assert_allclose([before['loss'], after['cross_entropy']], [plain['loss']] * 2, rtol=1e-6)


@pytest.mark.long
def test_the_policy_of_which_samples_are_scored_has_no_dropout(tiny_params):
  model = build_tiny('luong', 'rnn="simple"', score='general', sizes=(7, 5), dropout=0.5)
  tokens = jnp.asarray(TARGET, jnp.int32)[None, None].repeat(2, axis=1)

  @jax.jit
  def log_probs(params):
    inputs = ObjectiveInputs(model, params, tiny_batch(), {'dropout': RNGS['dropout']}, None, {}, 1, None)
    trained = inputs.forward(inputs.batch.target, inputs.rngs).logits
    return sequence_level._log_probs(inputs, tokens)[0, 0], log_probs_of_sequences(params, restrict=True), trained

  actual, expected, trained = log_probs(tiny_params)
  np.testing.assert_allclose(actual, expected[SEQUENCES.index(TARGET)], rtol=1e-5)
  without = forward(TINY, tiny_params, tiny_batch(), tiny_batch().target)
  assert not np.allclose(trained, without)  # training has dropout
