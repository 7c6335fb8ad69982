"""Dropout masks, and dropout on attention weights: an alignment in training, and the original alignment at test."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.dropout import keep_mask
from attention_jax.functional.table import lookup
from attention_jax.kernels import auto
from tests.functional.helpers import assert_same, attend, make_problem
from tests.sampled_cases import sample_cases

NOT_LATENT = [name for name, row in aj.ALIGNMENTS.items() if not row.latent]


def with_dropout(name, rate):
  return aj.with_dropout(lookup(name, aj.ALIGNMENTS, 'alignment'), rate)


@pytest.mark.long
def test_mask_entries_are_independent_with_the_right_rate():
  draws = 1024
  positions = 2048
  rate = 0.3
  keys = jax.random.split(jax.random.key(0), draws)
  masks = np.asarray(jax.vmap(lambda rng: keep_mask(rng, rate, (32, 64)))(keys).reshape(draws, positions))
  standardised = (masks - (1 - rate)) / np.sqrt(rate * (1 - rate))  # mean 0 and variance 1
  assert abs(standardised.mean()) < 5 / np.sqrt(draws * positions)
  for axis in range(2):  # chi-squared test of the sums per draw, and per position
    statistic = (standardised.sum(axis) ** 2 / standardised.shape[axis]).sum()
    count = standardised.shape[1 - axis]
    assert abs(statistic - count) < 5 * np.sqrt(2 * count)

  def correlation(x, y):
    return abs((x * y).mean()) * np.sqrt(x.size)

  for lag in (1, 2, 3, 16, 32, 64, 100, 1000):  # between positions, and between draws
    assert correlation(standardised[:, lag:], standardised[:, :-lag]) < 5
    assert correlation(standardised[lag:], standardised[:-lag]) < 5
  # A mask does not depend on its shape or on vmap.
  assert np.array_equal(masks[3], np.asarray(keep_mask(keys[3], rate, (positions,))))


@pytest.mark.long
@pytest.mark.parametrize('name', sample_cases([(name,) for name in NOT_LATENT], 8))
def test_weights_are_dropped_in_training_only(name):
  problem = make_problem('coverage', name, size=11)
  mask = jnp.arange(11) < 9

  def attend_at_test(alignment):
    return jax.jit(lambda problem: attend('coverage', alignment, problem, mask))(problem)

  assert_same(attend_at_test(with_dropout(name, 0.4)), attend_at_test(name))

  @jax.jit
  def attend_in_training(rng):
    return attend('coverage', with_dropout(name, 0.4), problem, mask, rng=rng, deterministic=False)

  attended = attend_in_training(jax.random.key(3))
  assert np.all(attended.weights[..., 9:] == 0) and np.all(np.isfinite(attended.context))
  np.testing.assert_allclose(attended.context, attended.weights @ problem.value, rtol=1e-4, atol=1e-5)
  other_weights = np.stack([attend_in_training(jax.random.key(seed)).weights for seed in range(4, 20)])
  assert np.any(other_weights != attended.weights[None])
  assert other_weights.sum(-1).max() > 1.05  # the weights that remain are divided by 0.6


@pytest.mark.long
def test_dropout_preserves_the_mean():
  scores = jnp.linspace(-1, 2, 8)
  mask = jnp.ones(8, bool)
  row = with_dropout('softmax(temperature=0.7)', 0.25)
  weights = aj.alignments.softmax(scores, mask, temperature=0.7)
  samples = jax.jit(jax.vmap(lambda rng: row.fn(scores, mask, rng=rng)))(jax.random.split(jax.random.key(0), 4000))
  is_dropped = samples == 0
  np.testing.assert_allclose(np.mean(is_dropped), 0.25, atol=0.01)
  scaled = jnp.broadcast_to(weights / 0.75, samples.shape)
  np.testing.assert_allclose(jnp.where(is_dropped, scaled, samples), scaled, rtol=1e-5)
  np.testing.assert_allclose(samples.mean(0), weights, rtol=0.05)


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['chunked', 'factored', 'auto'])
def test_implementations_drop_the_same_weights(implementation, monkeypatch):
  monkeypatch.setattr(auto, 'MIN_SCORES', {'cpu': {'factored': 0}})  # 'auto' chooses 'factored' for any size
  problem = make_problem('additive', 'softmax', batch=(2,))

  def run(implementation):
    options = {'rng': jax.random.key(5), 'deterministic': False, 'implementation': implementation}
    return jax.jit(lambda: attend('additive', with_dropout('softmax', 0.5), problem, **options))()

  assert_same(run(implementation), run('xla'), rtol=1e-4, atol=1e-6)


def test_the_row_declares_its_inputs():
  row = with_dropout('monotonic', 0.1)
  assert row.required_inputs == {'state', 'rng'}
  assert 'noise' in inspect.signature(row.fn).parameters
  assert row.is_recurrent and row.at_test is aj.ALIGNMENTS['monotonic'].at_test
  assert with_dropout('softmax', 0.0) == lookup('softmax', aj.ALIGNMENTS, 'alignment')


def test_invalid_rates_and_implementations_without_dropout_raise():
  with pytest.raises(aj.UserError, match=r'rate must be at least 0 and less than 1, got 1\.0'):
    with_dropout('softmax', 1.0)
  with pytest.raises(aj.UserError, match=r'rate must be 0 for a latent alignment, .* got 0\.1'):
    with_dropout('latent', 0.1)
  module = aj.Attention('general', 'local_m', 6, implementation='window', dropout=0.1)
  with pytest.raises(aj.UserError, match=r"'window' .*dropout.*0\.0.* auto, "):
    module.init(jax.random.key(0), jnp.ones((2, 5, 4)), jnp.ones((2, 5), bool), method='remember')
