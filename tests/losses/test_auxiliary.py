"""Auxiliary losses against loops; masked positions have no effect; spec strings and their errors."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.sampling import Samples
from attention_jax.losses.auxiliary import (
  CLASSIFIER_LOSSES,
  LOSSES,
  RUNNING_METRICS,
  auxiliary_losses,
  check_weights,
  redundancy,
)
from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.models.encoder_decoder import ModelOutput
from attention_jax.models.traits import Traits
from attention_jax.modules.adaptive import Ponder
from attention_jax.modules.attention import Attention
from tests.sampled_cases import sample_cases
from tests.training.helpers import Toy, init_params, make_batch

B, T, S, V, N = 4, 5, 7, 11, 2
SOURCE_LENGTHS = (7, 3, 5, 0)  # the last row is a filler row
TARGET_LENGTHS = (5, 1, 3, 0)
BASELINE = -1.5
RUNNING = {'log_likelihood': jnp.float32(BASELINE)}


def make_outputs_and_batch(seed=0):
  """Random outputs and a batch with ragged masks; logits, weights and the state are random at masked positions, too."""
  random = np.random.default_rng(seed)
  source_mask = np.arange(S) < np.array(SOURCE_LENGTHS)[:, None]
  target_mask = np.arange(T) < np.array(TARGET_LENGTHS)[:, None]
  weights = random.dirichlet(np.ones(S), (B, T)).astype(np.float32)
  state = -np.cumsum(random.exponential(size=(B, T, N)), axis=1).astype(np.float32)
  logits = 2 * random.standard_normal((B, T, V)).astype(np.float32)
  links = random.random((B, T, S)) < 0.4
  links[0, 2] = False  # a token without links
  source = random.integers(0, V, (B, S), dtype=np.int32)
  target = random.integers(0, V, (B, T), dtype=np.int32)
  index = np.arange(B, dtype=np.int32)
  batch = Batch(source, source_mask, target, target_mask, index, links & source_mask[:, None])
  updates = random.integers(1, 4, (B, S)) * source_mask
  ponder = Ponder(jnp.float32(updates), jnp.float32(updates + random.random((B, S)) * source_mask))
  return ModelOutput(jnp.asarray(logits), jnp.asarray(weights), jnp.asarray(state), (), ponder=(ponder,)), batch


def unpadded_rows(outputs, batch):
  """Yields weights [T, S], links [T, S], log p(y) [T] and log-probabilities of draws [T] of each row."""
  for b, (s, t) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
    logits = np.asarray(outputs.logits[b, :t], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    target_log_p = [log_p[i, batch.target[b, i]] for i in range(t)]
    draws = np.diff(np.asarray(outputs.state[b, :t], np.float64), axis=0, prepend=0).sum(axis=-1)
    yield np.asarray(outputs.weights[b, :t, :s], np.float64), batch.links[b, :t, :s], target_log_p, draws


def coverage(weights, links, target_log_p, draws):
  total = 0.0
  for t in range(len(weights)):
    for s in range(weights.shape[1]):
      total += min(weights[t, s], sum(weights[k, s] for k in range(t)))
  return total


def guided(weights, links, target_log_p, draws):
  total = 0.0
  for t in range(len(weights)):
    gold = [s for s in range(weights.shape[1]) if links[t, s]]
    total -= sum(np.log(weights[t, s] + 1e-6) for s in gold) / len(gold) if gold else 0
  return total


def diagonal(weights, links, target_log_p, draws, width=0.2):
  total = 0.0
  target, source = weights.shape
  for t in range(target):
    for s in range(source):
      total += weights[t, s] * (1 - np.exp(-((s / source - t / target) ** 2) / (2 * width**2)))
  return total


def doubly_stochastic(weights, links, target_log_p, draws):
  return sum((1 - sum(weights[t, s] for t in range(len(weights)))) ** 2 for s in range(weights.shape[1]))


def reinforce(weights, links, target_log_p, draws, entropy=0.01, discount=1.0):
  total = 0.0
  length = len(weights)
  for t in range(length):
    for k in range(t, length):
      total -= draws[t] * discount ** (k - t) * (target_log_p[k] - entropy * draws[k] - BASELINE)
  return total


CASES = {
  'coverage': coverage,
  'diagonal': diagonal,
  'diagonal(width=0.5)': functools.partial(diagonal, width=0.5),
  'doubly_stochastic': doubly_stochastic,
  'guided': guided,
  'reinforce': reinforce,
  'reinforce(entropy=0.3)': functools.partial(reinforce, entropy=0.3),
  'reinforce(discount=0.5)': functools.partial(reinforce, discount=0.5),
  'reinforce(discount=0.0)': functools.partial(reinforce, discount=0.0),
}


def compute(spec, outputs, batch):
  (row,) = auxiliary_losses(spec).values()
  return row.fn(outputs, batch, RUNNING)


def test_every_row_has_a_case():
  assert {spec.split('(')[0] for spec in CASES} | {'ponder'} == set(LOSSES)
  assert {name for row in LOSSES.values() for name in row.running} == set(RUNNING_METRICS)


@pytest.mark.long
@pytest.mark.parametrize('spec', CASES)
def test_losses_equal_loops(spec):
  outputs, batch = make_outputs_and_batch()
  actual = jax.jit(lambda outputs: compute(spec, outputs, batch))(outputs)
  assert actual.dtype == jnp.float32 and actual.shape == ()
  expected = sum(CASES[spec](*row) for row in unpadded_rows(outputs, batch))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


# Not 'ponder', which uses none of the masked fields.
@pytest.mark.long
@pytest.mark.parametrize('name', [name for name in LOSSES if name != 'ponder'])
def test_masked_positions_affect_neither_value_nor_gradient(name):
  outputs, batch = make_outputs_and_batch()
  target_mask = batch.target_mask[..., None]
  masks = {'logits': target_mask, 'state': target_mask, 'weights': target_mask & batch.source_mask[:, None]}
  clean_fields = {field: getattr(outputs, field) for field in masks}
  dirty_fields = {field: jnp.where(mask, clean_fields[field], np.nan) for field, mask in masks.items()}
  dirty = outputs._replace(**dirty_fields)
  linked_padding = batch._replace(links=batch.links | ~target_mask)
  assert compute(name, dirty, linked_padding) == compute(name, outputs, batch)
  gradient = jax.jit(jax.grad(lambda fields: compute(name, outputs._replace(**fields), linked_padding)))
  clean_gradient = gradient(clean_fields)
  dirty_gradient = gradient(dirty_fields)
  for field, mask in masks.items():
    assert not np.any(np.where(mask, 0, dirty_gradient[field])), field
    np.testing.assert_array_equal(dirty_gradient[field], clean_gradient[field])


@pytest.mark.parametrize('name', LOSSES)
def test_a_batch_of_filler_rows_has_no_loss_and_rewards_have_no_gradient(name):
  outputs, batch = make_outputs_and_batch()
  empty = batch._replace(source_mask=np.zeros_like(batch.source_mask), target_mask=np.zeros_like(batch.target_mask))

  def loss(weights, logits, batch):
    return compute(name, outputs._replace(weights=weights, logits=logits), batch)

  value, gradient = jax.jit(jax.value_and_grad(loss))(outputs.weights, outputs.logits, empty)
  assert value == 0 and not gradient.any()
  assert not jax.jit(jax.grad(loss, 1))(outputs.weights, outputs.logits, batch).any()


def stub_model(outputs, required_loss=''):
  return types.SimpleNamespace(
    apply=lambda *_, **__: outputs,
    traits=Traits(required_loss=required_loss),
    copies=False,
    output_size=lambda _: outputs.logits.shape[-1],
  )


@pytest.mark.long
def test_the_total_is_weighted_and_the_reported_parts_are_not():
  outputs, batch = make_outputs_and_batch()
  loss = sequence_loss(stub_model(outputs), 0.1, 'guided(weight=0.5) + coverage')
  sums = loss({}, batch)
  plain = cross_entropy(outputs.logits, batch.target, batch.target_mask, 0.1)
  parts = {name: compute(name, outputs, batch) for name in ('guided', 'coverage')}
  total = plain['loss'] + 0.5 * parts['guided'] + parts['coverage']
  assert set(sums) == {'loss', 'cross_entropy', 'accuracy', 'tokens', 'guided', 'coverage'}
  for name, expected in {**plain, **parts, 'cross_entropy': plain['loss'], 'loss': total}.items():
    np.testing.assert_allclose(sums[name], expected, rtol=1e-6)
  assert loss.needs_links and loss.running == ()
  without_auxiliary = sequence_loss(stub_model(outputs), 0.1)
  assert set(without_auxiliary({}, batch)) == {'loss', 'accuracy', 'tokens'}
  assert not without_auxiliary.needs_links


def test_after_delays_the_contribution_but_not_the_report():
  outputs, batch = make_outputs_and_batch()
  loss = sequence_loss(stub_model(outputs), 0.1, 'coverage(weight=2, after=3)')
  before = loss({}, batch, None, RUNNING, 3)
  after = loss({}, batch, None, RUNNING, 4)
  assert before['loss'] == before['cross_entropy']
  assert before['coverage'] == after['coverage'] > 0
  np.testing.assert_allclose(after['loss'], after['cross_entropy'] + 2 * after['coverage'], rtol=1e-6)


def test_the_required_loss_is_added_unless_the_spec_contains_it():
  outputs, batch = make_outputs_and_batch()
  loss = sequence_loss(stub_model(outputs, 'reinforce'), 0.1, 'coverage')
  assert loss.running == ('log_likelihood',) and not loss.needs_links
  sums = loss({}, batch, None, RUNNING)
  np.testing.assert_allclose(sums['reinforce'], compute('reinforce', outputs, batch), rtol=1e-6)
  unsmoothed = cross_entropy(outputs.logits, batch.target, batch.target_mask)['loss']
  np.testing.assert_allclose(sums['log_likelihood'], -unsmoothed, rtol=1e-5)
  assert list(auxiliary_losses('coverage + reinforce(weight=2)', 'reinforce')) == ['reinforce', 'coverage']
  assert auxiliary_losses('reinforce(weight=2)', 'reinforce')['reinforce'].weight == 2
  assert auxiliary_losses(' ') == {}


@pytest.mark.long
def test_redundancy_equals_the_equation_of_the_paper():
  weights = np.random.default_rng(0).dirichlet(np.ones(5), (3, 2, 4)).astype(np.float32)  # [B, N, H, W]
  batch = types.SimpleNamespace(index=np.array([0, -1, 1]))  # the second document is a filler
  expected = 0.0
  for document in (0, 2):
    hops = np.stack([weights[document, :, hop].reshape(-1) for hop in range(4)])
    expected += ((hops @ hops.T - np.eye(4)) ** 2).sum()
  actual = redundancy(types.SimpleNamespace(word_weights=jnp.asarray(weights)), batch, {})
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_ponder_is_the_cost_of_all_updates_and_logs_their_mean():
  outputs, batch = make_outputs_and_batch()
  sums = sequence_loss(stub_model(outputs), 0.0, 'ponder(weight=0.5)')({}, batch)
  (layer,) = outputs.ponder
  np.testing.assert_allclose(sums['ponder'], layer.cost.sum(), rtol=1e-6)
  np.testing.assert_allclose(sums['loss'], sums['cross_entropy'] + 0.5 * sums['ponder'], rtol=1e-6)
  rows = zip(layer.updates, SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)
  expected = sum(float(updates[:s].mean()) * t for updates, s, t in rows if s)
  np.testing.assert_allclose(sums['ponder_updates'], expected, rtol=1e-6)
  documents = types.SimpleNamespace(index=np.array([0, 1, -1, 2]))  # the third document is a filler
  (row,) = auxiliary_losses('ponder', table=CLASSIFIER_LOSSES).values()
  np.testing.assert_allclose(row.fn(outputs, documents, {}), layer.cost[np.array([0, 1, 3])].sum(), rtol=1e-6)
  means = [float(layer.updates[i, : SOURCE_LENGTHS[i]].mean()) for i in (0, 1)]
  np.testing.assert_allclose(row.metrics['ponder_updates'](outputs, documents), sum(means), rtol=1e-6)
  with pytest.raises(UserError, match='ponder needs an encoder with adaptive computation time, such as act'):
    compute('ponder', outputs._replace(ponder=()), batch)


@pytest.mark.long
def test_auxiliary_losses_train_the_parameters_of_the_alignment():
  def temperature_gradient(*options):
    loss = sequence_loss(Toy(), *options)
    return jax.jit(jax.grad(lambda params: loss(params, make_batch(0))['loss']))(init_params())['temperature']

  assert temperature_gradient() == 0
  assert temperature_gradient(0.0, 'diagonal') != 0


@pytest.mark.parametrize(
  ('specs', 'message'),
  [
    ('guide', r"unknown auxiliary loss 'guide' \(did you mean 'guided'\?\); expected one of: coverage, diagonal"),
    ('coverage + guided(wieght=1)', r"unknown option of auxiliary loss 'guided': 'wieght' .*: after, weight"),
    ('diagonal(width="x")', "auxiliary loss 'diagonal': option width must be a number, got 'x'"),
    ('diagonal(width=0)', 'option width must be greater than 0, got 0'),
    ('reinforce(discount=1.5)', "loss 'reinforce': option discount must be at least 0 and at most 1, got 1.5"),
    ('coverage(weight=1e999)', 'option weight must be finite, got inf'),
    ('guided + guided(weight=2)', r"cannot parse .*'name\(option=literal, ...\) \+ name \+ ...', each name once"),
    ('guided - coverage', 'cannot parse'),
    ('guided(0.5)', 'cannot parse'),
  ],
)
def test_invalid_specs_are_reported_in_one_line(specs, message):
  with pytest.raises(UserError, match=message) as error:
    auxiliary_losses(specs)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('state', [(), jnp.zeros((B, T, 1, S)), {'position': jnp.zeros((B, T, N))}])
def test_reinforce_needs_the_state_of_a_sampled_alignment(state):
  outputs, batch = make_outputs_and_batch()
  message = r'auxiliary loss reinforce needs a sampled alignment .*; expected one of: hard, hard_once$'
  with pytest.raises(UserError, match=message):
    compute('reinforce', outputs._replace(state=state), batch)


@pytest.mark.long
def test_reinforce_adds_the_entropies_of_hard_once():
  """−Σ_t log π(a_t) Σ_{k ≥ t} (r_k − b) − λ Σ_t H_t: Xu et al. 2015, section 4.1, with the rewards of later words."""
  outputs, batch = make_outputs_and_batch()
  entropies = jnp.cumsum(jnp.arange(1.0, B * T * N + 1).reshape(B, T, N), axis=1)
  samples = Samples(outputs.state, entropies, jnp.zeros((B, T, N), bool))
  actual = compute('reinforce(entropy=0.3)', outputs._replace(state=samples), batch)
  total = compute('reinforce(entropy=0.0)', outputs, batch)
  for b in range(B):
    for t in range(int(batch.target_mask[b].sum())):
      total -= 0.3 * sum(entropies[b, t] - (entropies[b, t - 1] if t else 0))
  np.testing.assert_allclose(actual, total, rtol=1e-5)


WITHOUT_GRADIENT = {'hard', 'hardmax'}


@pytest.mark.parametrize(
  'alignment',
  sample_cases([(name,) for name in ALIGNMENTS if name not in WITHOUT_GRADIENT] + [('hard(expectation_rate=0.5)',)], 4),
)
def test_weights_with_a_gradient_pass_the_check(alignment):
  check_weights(auxiliary_losses('guided + coverage'), Attention('additive', alignment))
  check_weights(auxiliary_losses('reinforce'), Attention('additive', 'hard'))  # uses no weights
  check_weights({}, None)


@pytest.mark.parametrize(
  ('losses', 'alignment', 'message'),
  [
    ('reinforce + guided', 'hard', "loss guided .*those of alignment 'hard' have no gradient; expected an alignment"),
    ('coverage + diagonal', 'hardmax', 'loss coverage, diagonal .* no gradient'),
    ('doubly_stochastic', None, 'loss doubly_stochastic needs attention weights, but the decoder does not attend'),
  ],
)
def test_losses_of_weights_without_a_gradient_raise(losses, alignment, message):
  with pytest.raises(UserError, match=message):
    check_weights(auxiliary_losses(losses), alignment and Attention('additive', alignment))
