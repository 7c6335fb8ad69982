"""Finished sources leave the batch of a search, which does not change the results."""

import functools

import jax
import jax.numpy as jnp
import pytest

from attention_jax.decoding import loop, search
from attention_jax.tokens import EOS
from tests.modules.helpers import assert_same


@pytest.mark.long
@pytest.mark.parametrize('beams', [1, pytest.param(3, marks=pytest.mark.long)])
def test_finished_sources_leave_the_batch(beams, monkeypatch):
  eos_steps = jnp.asarray([2, 9, 1, 4, 1, 2, 3, 1])  # the step at which EOS becomes almost certain
  batch_sizes = []

  def step(carry, token, memory):
    eos_step, t = carry
    jax.debug.callback(lambda rows: batch_sizes.append(rows.shape[0]), memory)
    eos_logits = jnp.where(t[:, None] >= eos_step[:, None], 50.0, -50.0)
    word_logits = jnp.sin(jnp.arange(9.0)[None] + token[:, None] + t[:, None])
    logits = jnp.where(jnp.arange(9)[None] == EOS, eos_logits, word_logits)
    weights = jax.nn.softmax(memory * t[:, None])
    return (eos_step, t + 1), (logits, weights)

  def run(min_sources):
    monkeypatch.setattr(loop, 'MIN_SOURCES', min_sources)
    batch_sizes.clear()
    carry = (eos_steps, jnp.zeros_like(eos_steps))
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
