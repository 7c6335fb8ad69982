"""Dropout on weights: an alignment like any other, and at test the one that it was made of."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.functional.dropout import keep_mask
from attention_jax.functional.table import lookup
from tests.functional.helpers import assert_same, attend, make_problem

ROWS = [name for name, row in aj.ALIGNMENTS.items() if not row.latent]
row_of = lambda name, rate: aj.with_dropout(lookup(name, aj.ALIGNMENTS, 'alignment'), rate)


def test_what_is_kept_is_as_if_coins_were_tossed():
  keys, draws, numbers, rate = jax.random.split(jax.random.key(0), 1024), 1024, 2048, 0.3
  tossed = np.asarray(jax.vmap(lambda rng: keep_mask(rng, rate, (32, 64)))(keys).reshape(draws, numbers))
  away = (tossed - (1 - rate)) / np.sqrt(rate * (1 - rate))  # mean 0 and variance 1
  assert abs(away.mean()) < 5 / np.sqrt(draws * numbers)
  for axis in range(2):  # sums of a draw, and of a position over draws, spread as sums of coins do: chi-squared
    sums = (away.sum(axis) ** 2 / away.shape[axis]).sum()
    count = away.shape[1 - axis]
    assert abs(sums - count) < 5 * np.sqrt(2 * count)
  pairs = lambda one, other: abs((one * other).mean()) * np.sqrt(one.size)
  for apart in (1, 2, 3, 16, 32, 64, 100, 1000):  # of positions, and of draws
    assert pairs(away[:, apart:], away[:, :-apart]) < 5
    assert pairs(away[apart:], away[:-apart]) < 5
  assert np.array_equal(tossed[3], np.asarray(keep_mask(keys[3], rate, (numbers,))))  # whatever it was drawn beside


@pytest.mark.parametrize('name', ROWS)
def test_weights_are_dropped_in_training_and_whole_at_test(name):
  given, rng = make_problem('coverage', name, size=11), jax.random.key(3)
  mask = jnp.arange(11) < 9
  at_test = lambda alignment: jax.jit(lambda given: attend('coverage', alignment, given, mask))(given)
  assert_same(at_test(row_of(name, 0.4)), at_test(name))
  train = jax.jit(lambda rng: attend('coverage', row_of(name, 0.4), given, mask, rng=rng, deterministic=False))
  found = train(rng)
  assert np.all(found.weights[..., 9:] == 0) and np.all(np.isfinite(found.context))
  np.testing.assert_allclose(found.context, found.weights @ given.value, rtol=1e-4, atol=1e-5)
  assert any(np.any(train(jax.random.key(seed)).weights != found.weights) for seed in range(4, 20))


def test_what_is_left_has_the_same_mean():
  scores, mask = jnp.linspace(-1, 2, 8), jnp.ones(8, bool)
  row, whole = row_of('softmax(temperature=0.7)', 0.25), aj.alignments.softmax(scores, mask, temperature=0.7)
  drawn = jax.vmap(lambda rng: row.fn(scores, mask, rng=rng))(jax.random.split(jax.random.key(0), 4000))
  np.testing.assert_allclose(np.mean(drawn == 0), 0.25, atol=0.01)
  kept = jnp.broadcast_to(whole / 0.75, drawn.shape)
  np.testing.assert_allclose(jnp.where(drawn == 0, kept, drawn), kept, rtol=1e-5)
  np.testing.assert_allclose(drawn.mean(0), whole, rtol=0.05)


@pytest.mark.parametrize('implementation', ['chunked', 'factored', 'auto'])
def test_blocks_drop_the_same_weights(implementation):
  given, rng = make_problem('additive', 'softmax', batch=(2,)), jax.random.key(5)
  options = {'rng': rng, 'deterministic': False}
  run = lambda name: attend('additive', row_of('softmax', 0.5), given, implementation=name, **options)
  assert_same(run(implementation), run('xla'), rtol=1e-4, atol=1e-6)


def test_its_signature_is_its_schema():
  row = row_of('monotonic', 0.1)
  assert row.required_inputs == {'state', 'rng'} and 'noise' in inspect.signature(row.fn).parameters
  assert row.is_recurrent and row.at_test is aj.ALIGNMENTS['monotonic'].at_test
  assert row_of('softmax', 0.0) == lookup('softmax', aj.ALIGNMENTS, 'alignment')


@pytest.mark.parametrize(
  ('name', 'rate', 'message'),
  [('softmax', 1.0, 'rate=1.0; possible: from 0 to below 1'), ('latent', 0.1, 'probabilities that are summed over')],
)
def test_mistakes_are_named(name, rate, message):
  with pytest.raises(aj.UserError, match=message):
    row_of(name, rate)


def test_a_module_says_which_implementations_drop_weights():
  module = aj.Attention('general', 'local_m', 6, implementation='window', dropout=0.1)
  with pytest.raises(aj.UserError, match=r"'window' has no dropout on weights; possible: dropout=0\.0, or auto, "):
    module.init(jax.random.key(0), jnp.ones((2, 5, 4)), jnp.ones((2, 5), bool), method='remember')
