"""Shortcuts of a search that change no result: top-k by blocks, and finished sources that leave the batch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import loop, search, top_k
from attention_jax.tokens import EOS
from tests.modules.helpers import assert_same
from tests.sampled_cases import sample_cases


# `in_one_block`: whether all forbidden ids are in the first block
@pytest.mark.parametrize(
  ('size', 'count', 'in_one_block'), sample_cases([*itertools.product([3, 64, 65, 200], [1, 5, 70], [True, False])], 2)
)
def test_masked_top_k_equals_a_sort(size, count, in_one_block):
  random = np.random.default_rng(size)
  logits = random.integers(-9, 9, (2, 3, size)).astype(np.float32)  # with many equal values
  allowed = np.arange(size) >= 2 if in_one_block else random.random(size) < 0.8
  values, ids = top_k.masked_top_k(jnp.asarray(logits), allowed, count)
  masked = np.where(allowed, logits, -np.inf)
  expected_ids = np.argsort(-masked, axis=-1, kind='stable')[..., :count]
  expected = np.take_along_axis(masked, expected_ids, -1)
  np.testing.assert_array_equal(values, expected)
  assert np.all(ids < size)
  is_allowed = expected > -np.inf
  np.testing.assert_array_equal(np.where(is_allowed, ids, -1), np.where(is_allowed, expected_ids, -1))


@pytest.mark.parametrize('size', [3, 64, 65, 200])
def test_log_sum_exp_equals_that_of_jax(size):
  finite = 100 * jax.random.normal(jax.random.key(size), (5, size))
  with_forbidden = jnp.where(jnp.arange(size) % 3 == 0, -jnp.inf, finite)
  all_forbidden = jnp.full_like(finite, -jnp.inf)
  with_nan = finite.at[0, 0].set(jnp.nan)
  logits = jnp.stack([finite, with_forbidden, all_forbidden, with_nan])
  np.testing.assert_allclose(top_k.log_sum_exp(logits), jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)


@pytest.mark.parametrize('beams', [1, pytest.param(3, marks=pytest.mark.long)])
def test_finished_sources_leave_the_batch(beams, monkeypatch):
  end_levels = jnp.asarray([2, 9, 1, 4, 1, 2, 3, 1])  # the step at which EOS becomes almost certain
  batch_sizes = []

  def step(carry, token, memory):
    end_level, level = carry
    jax.debug.callback(lambda rows: batch_sizes.append(rows.shape[0]), memory)
    eos_logits = jnp.where(level[:, None] >= end_level[:, None], 50.0, -50.0)
    word_logits = jnp.sin(jnp.arange(9.0)[None] + token[:, None] + level[:, None])
    logits = jnp.where(jnp.arange(9)[None] == EOS, eos_logits, word_logits)
    weights = jax.nn.softmax(memory * level[:, None])
    return (end_level, level + 1), (logits, weights)

  def run(min_sources):
    monkeypatch.setattr(loop, 'MIN_SOURCES', min_sources)
    batch_sizes.clear()
    carry = (end_levels, jnp.zeros_like(end_levels))
    memory = jnp.linspace(0, 1, 32).reshape(8, 4)
    find = functools.partial(search.beam, beams=beams) if beams > 1 else search.greedy
    hypotheses = jax.jit(lambda: find(step, carry, memory, max_length=12))()
    jax.effects_barrier()
    return hypotheses, list(batch_sizes)

  fixed, fixed_sizes = run(min_sources=100)
  shrinking, shrinking_sizes = run(min_sources=1)
  assert_same(shrinking, fixed)
  assert len(set(fixed_sizes)) == 1 and set(shrinking_sizes) == {8, 4, 2, 1}
  assert sum(shrinking_sizes) < sum(fixed_sizes) / 2
