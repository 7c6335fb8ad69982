"""Auxiliary losses against loops; what is behind a mask counts for nothing; specs, and what a wrong one is told."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.errors import UserError
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.losses.auxiliary import LOSSES, RUNNING_METRICS, auxiliary_losses, check_weights
from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.models.encoder_decoder import ModelOutput
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from tests.training.helpers import Toy, init_params, make_batch

B, T, S, V, N = 4, 5, 7, 11, 2
SOURCE, TARGET = (7, 3, 5, 0), (5, 1, 3, 0)  # lengths; the last is a filler row
RUNNING = {'log_likelihood': jnp.float32(-1.5)}


def make(seed=0):
  """Outputs and a batch with ragged masks; behind them, and in `links` beside the gold, nothing is as it should be."""
  random = np.random.default_rng(seed)
  mask = lambda lengths, size: np.arange(size) < np.array(lengths)[:, None]
  source_mask, target_mask = mask(SOURCE, S), mask(TARGET, T)
  weights = random.dirichlet(np.ones(S), (B, T)).astype(np.float32)
  state = -np.cumsum(random.exponential(size=(B, T, N)), axis=1).astype(np.float32)
  logits = 2 * random.standard_normal((B, T, V)).astype(np.float32)
  links = random.random((B, T, S)) < 0.4
  links[0, 2] = False  # a token without links
  ids = lambda size: random.integers(0, V, (B, size), dtype=np.int32)
  batch = Batch(ids(S), source_mask, ids(T), target_mask, np.arange(B, dtype=np.int32), links & source_mask[:, None])
  return ModelOutput(jnp.asarray(logits), jnp.asarray(weights), jnp.asarray(state), ()), batch


def rows(outputs, batch):
  """The pairs without their padding: weights [T, S], links [T, S], log p(y) [T], log-probabilities of draws [T]."""
  for b, (s, t) in enumerate(zip(SOURCE, TARGET, strict=True)):
    logits = np.asarray(outputs.logits[b, :t], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = [log_p[i, batch.target[b, i]] for i in range(t)]
    draws = np.diff(np.asarray(outputs.state[b, :t], np.float64), axis=0, prepend=0).sum(axis=-1)
    yield np.asarray(outputs.weights[b, :t, :s], np.float64), batch.links[b, :t, :s], chosen, draws


def coverage(weights, links, chosen, draws):
  total = 0.0
  for t in range(len(weights)):
    for s in range(weights.shape[1]):
      total += min(weights[t, s], sum(weights[k, s] for k in range(t)))
  return total


def guided(weights, links, chosen, draws):
  total = 0.0
  for t in range(len(weights)):
    gold = [s for s in range(weights.shape[1]) if links[t, s]]
    total -= sum(np.log(weights[t, s] + 1e-6) for s in gold) / len(gold) if gold else 0
  return total


def diagonal(weights, links, chosen, draws, width=0.2):
  total, (target, source) = 0.0, weights.shape
  for t in range(target):
    for s in range(source):
      total += weights[t, s] * (1 - np.exp(-((s / source - t / target) ** 2) / (2 * width**2)))
  return total


def doubly_stochastic(weights, links, chosen, draws):
  return sum((1 - sum(weights[t, s] for t in range(len(weights)))) ** 2 for s in range(weights.shape[1]))


def reinforce(weights, links, chosen, draws, entropy=0.01, discount=1.0):
  total, length = 0.0, len(weights)
  for t in range(length):
    for k in range(t, length):
      total -= draws[t] * discount ** (k - t) * (chosen[k] - entropy * draws[k] - -1.5)
  return total


CASES = {
  'coverage': coverage,
  'diagonal': diagonal,
  'diagonal(width=0.5)': lambda *row: diagonal(*row, width=0.5),
  'doubly_stochastic': doubly_stochastic,
  'guided': guided,
  'reinforce': reinforce,
  'reinforce(entropy=0.3)': lambda *row: reinforce(*row, entropy=0.3),
  'reinforce(discount=0.5)': lambda *row: reinforce(*row, discount=0.5),
  'reinforce(discount=0.0)': lambda *row: reinforce(*row, discount=0.0),
}


def value(spec, outputs, batch):
  (row,) = auxiliary_losses(spec).values()
  return row.fn(outputs, batch, RUNNING)


def test_every_row_has_a_case():
  assert {spec.split('(')[0] for spec in CASES} == set(LOSSES)
  assert {name for row in LOSSES.values() for name in row.running} == set(RUNNING_METRICS)


@pytest.mark.parametrize('spec', CASES)
def test_literal(spec):
  outputs, batch = make()
  found = jax.jit(lambda outputs: value(spec, outputs, batch))(outputs)
  assert found.dtype == jnp.float32 and found.shape == ()
  np.testing.assert_allclose(found, sum(CASES[spec](*row) for row in rows(outputs, batch)), rtol=1e-5)


@pytest.mark.parametrize('name', LOSSES)
def test_behind_the_masks_is_irrelevant(name):
  outputs, batch = make()
  real = batch.target_mask[..., None]
  seen = {'logits': real, 'state': real, 'weights': real & batch.source_mask[:, None]}
  dirty = outputs._replace(**{field: jnp.where(seen[field], getattr(outputs, field), np.nan) for field in seen})
  everywhere = batch._replace(links=batch.links | ~real)
  assert value(name, dirty, everywhere) == value(name, outputs, batch)
  slopes = jax.grad(lambda given: value(name, outputs._replace(**given), everywhere))
  gradient = slopes({field: getattr(dirty, field) for field in seen})
  for field, mask in seen.items():
    assert not np.any(np.where(mask, 0, gradient[field])), field
    np.testing.assert_array_equal(gradient[field], slopes({k: getattr(outputs, k) for k in seen})[field])


@pytest.mark.parametrize('name', LOSSES)
def test_filler_rows_alone_cost_nothing(name):
  outputs, batch = make()
  empty = batch._replace(source_mask=batch.source_mask & False, target_mask=batch.target_mask & False)
  cost, gradient = jax.value_and_grad(lambda w: value(name, outputs._replace(weights=w), empty))(outputs.weights)
  assert cost == 0 and not gradient.any()


def test_rewards_have_no_gradient():
  outputs, batch = make()
  gradient = jax.grad(lambda logits: value('reinforce', outputs._replace(logits=logits), batch))(outputs.logits)
  assert not gradient.any()


def stub(outputs, needed=''):
  return types.SimpleNamespace(
    apply=lambda *_, **__: outputs,
    traits=Traits(required_loss=needed),
    copies=False,
    output_size=lambda _: outputs.logits.shape[-1],
  )


def test_the_total_is_what_is_weighted_and_the_parts_are_not():
  outputs, batch = make()
  loss = sequence_loss(stub(outputs), 0.1, 'guided(weight=0.5) + coverage')
  sums = loss({}, batch)
  plain = cross_entropy(outputs.logits, batch.target, batch.target_mask, 0.1)
  parts = {name: value(name, outputs, batch) for name in ('guided', 'coverage')}
  total = plain['loss'] + 0.5 * parts['guided'] + parts['coverage']
  assert set(sums) == {'loss', 'cross_entropy', 'accuracy', 'tokens', 'guided', 'coverage'}
  for name, wanted in {**plain, **parts, 'cross_entropy': plain['loss'], 'loss': total}.items():
    np.testing.assert_allclose(sums[name], wanted, rtol=1e-6)
  assert loss.needs_links and loss.running == ()
  without = sequence_loss(stub(outputs), 0.1)
  assert set(without({}, batch)) == {'loss', 'accuracy', 'tokens'} and not without.needs_links


def test_so_many_updates_come_before_it():
  outputs, batch = make()
  loss = sequence_loss(stub(outputs), 0.1, 'coverage(weight=2, after=3)')
  before, then = (loss({}, batch, None, RUNNING, update) for update in (3, 4))
  assert before['loss'] == before['cross_entropy'] and before['coverage'] == then['coverage'] > 0
  np.testing.assert_allclose(then['loss'], then['cross_entropy'] + 2 * then['coverage'], rtol=1e-6)


def test_what_a_model_needs_is_added_unless_it_is_there():
  outputs, batch = make()
  loss = sequence_loss(stub(outputs, 'reinforce'), 0.1, 'coverage')
  assert loss.running == ('log_likelihood',) and not loss.needs_links
  sums = loss({}, batch, None, RUNNING)
  np.testing.assert_allclose(sums['reinforce'], value('reinforce', outputs, batch), rtol=1e-6)
  unsmoothed = cross_entropy(outputs.logits, batch.target, batch.target_mask)['loss']
  np.testing.assert_allclose(sums['log_likelihood'], -unsmoothed, rtol=1e-5)
  assert list(auxiliary_losses('coverage + reinforce(weight=2)', 'reinforce')) == ['reinforce', 'coverage']
  assert auxiliary_losses('reinforce(weight=2)', 'reinforce')['reinforce'].weight == 2
  assert auxiliary_losses(' ') == {}


def test_parameters_of_the_alignment_learn_by_what_is_beside():
  value = lambda params, *options: sequence_loss(Toy(), *options)(params, make_batch(0))['loss']
  gradient = lambda *options: jax.grad(value)(init_params(), *options)['temperature']
  assert gradient() == 0 and gradient(0.0, 'diagonal') != 0


@pytest.mark.parametrize(
  ('specs', 'message'),
  [
    ('guide', r"unknown auxiliary loss 'guide' \(did you mean 'guided'\?\); possible: coverage, diagonal"),
    ('coverage + guided(wieght=1)', r"option of auxiliary loss 'guided': 'wieght' .*'weight'.*possible: after, weight"),
    ('diagonal(width="x")', "'diagonal': option width is a number like 0.2, got 'x'"),
    ('diagonal(width=-1)', 'width is -1; possible: 0 or more'),
    ('coverage(weight=1e999)', 'weight is inf; possible: 0 or more, and finite'),
    ('guided + guided(weight=2)', r"cannot read .*'name\(option=literal, ...\) \+ name \+ ...', each name once"),
    ('guided - coverage', 'cannot read'),
    ('guided +', 'cannot read'),
    ('guided(0.5)', 'cannot read'),
    ('2 * guided', 'cannot read'),
  ],
)
def test_wrong_specs_are_told_in_one_line(specs, message):
  with pytest.raises(UserError, match=message) as error:
    auxiliary_losses(specs)
  assert '\n' not in str(error.value)


def test_what_only_the_outputs_can_tell():
  outputs, batch = make()
  with pytest.raises(UserError, match='width must be greater than 0, got 0'):
    value('diagonal(width=0)', outputs, batch)
  with pytest.raises(UserError, match=r'reinforce: discount is 1.5; possible: from 0 to 1$'):
    value('reinforce(discount=1.5)', outputs, batch)
  for state in ((), jnp.zeros((B, T, 1, S)), {'position': jnp.zeros((B, T, N))}):
    with pytest.raises(UserError, match=r'reinforce needs an alignment that draws and learns by it; possible: hard$'):
      value('reinforce', outputs._replace(state=state), batch)


ROUNDED = {'hard', 'hardmax'}


@pytest.mark.parametrize('alignment', [*(name for name in ALIGNMENTS if name not in ROUNDED), 'hard(expected=0.5)'])
def test_weights_with_a_gradient(alignment):
  check_weights(auxiliary_losses('guided + coverage'), Attention('additive', alignment))


@pytest.mark.parametrize(
  ('losses', 'attention', 'message'),
  [
    ('reinforce + guided', Attention('additive', 'hard'), "loss guided .*those of alignment 'hard' have no gradient"),
    ('coverage + diagonal', Attention('additive', 'hardmax'), 'loss coverage, diagonal .* no gradient; possible: one'),
    ('doubly_stochastic', None, 'doubly_stochastic is of weights, and this decoder attends to nothing'),
  ],
)
def test_losses_of_weights_without_a_gradient(losses, attention, message):
  with pytest.raises(UserError, match=message):
    check_weights(auxiliary_losses(losses), attention)


def test_a_loss_that_asks_for_no_gradient_of_weights():
  check_weights(auxiliary_losses('reinforce'), Attention('additive', 'hard'))
  check_weights({}, None)
