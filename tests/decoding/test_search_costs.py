"""What search leaves out because it changes nothing: sorts of whole vocabularies, and sources that are done."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.tokens import EOS
from tests.modules.helpers import assert_same


@pytest.mark.parametrize('size', [3, 64, 65, 200])
@pytest.mark.parametrize('count', [1, 5, 70])
@pytest.mark.parametrize('few', [True, False])  # whether all that is not allowed is in one block
def test_the_largest_are_those_of_a_sort(size, count, few):
  random = np.random.default_rng(size)
  logits = random.integers(-9, 9, (2, 3, size)).astype(np.float32)  # many of them equal
  allowed = np.arange(size) >= 2 if few else random.random(size) < 0.8
  values, ids = search.masked_top_k(jnp.asarray(logits), allowed, count)
  order = np.argsort(-np.where(allowed, logits, -np.inf), axis=-1, kind='stable')[..., :count]
  kept = np.take_along_axis(np.where(allowed, logits, -np.inf), order, -1)
  np.testing.assert_array_equal(values, kept)
  assert np.all(ids < size)
  np.testing.assert_array_equal(np.where(kept > -np.inf, ids, -1), np.where(kept > -np.inf, order, -1))


@pytest.mark.parametrize('size', [3, 64, 65, 200])
def test_the_mass_of_logits_is_their_logsumexp(size):
  drawn = 100 * jax.random.normal(jax.random.key(size), (5, size))
  some = jnp.where(jnp.arange(size) % 3 == 0, -jnp.inf, drawn)
  given = jnp.stack([drawn, some, jnp.full_like(drawn, -jnp.inf), drawn.at[0, 0].set(jnp.nan)])
  np.testing.assert_allclose(search._log_mass(given), jax.nn.logsumexp(given, axis=-1), rtol=1e-6)


@pytest.mark.parametrize('beams', [1, 3])
def test_sources_that_are_done_stop_costing(beams, monkeypatch):
  ends = jnp.asarray([2, 9, 1, 4, 1, 2, 3, 1])  # the step at which EOS becomes all but sure
  stepped = []

  def step(carry, token, memory):
    end, level = carry
    jax.debug.callback(lambda rows: stepped.append(rows.shape[0]), memory)
    at_end = jnp.where(level[:, None] >= end[:, None], 50.0, -50.0)
    others = jnp.sin(jnp.arange(9.0)[None] + token[:, None] + level[:, None])
    logits = jnp.where(jnp.arange(9)[None] == EOS, at_end, others)
    weights = jax.nn.softmax(memory * level[:, None])
    return (end, level + 1), (logits, weights)

  def find(fewest):
    monkeypatch.setattr(search, 'MIN_SOURCES', fewest)
    stepped.clear()
    given = (ends, jnp.zeros_like(ends)), jnp.linspace(0, 1, 32).reshape(8, 4)
    options = {'beams': beams} if beams > 1 else {}
    found = (search.beam if beams > 1 else search.greedy)(step, *given, max_length=12, **options)
    jax.effects_barrier()
    return found, list(stepped)

  (together, all_rows), (apart, fewer_rows) = find(100), find(1)
  assert_same(apart, together)
  assert len(set(all_rows)) == 1 and set(fewer_rows) == {8, 4, 2, 1}
  assert sum(fewer_rows) < sum(all_rows) / 2
