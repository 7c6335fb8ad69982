"""Recurrent decoders: steps against the scan for every cell, padding, dropout, and random numbers of every step."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.decoders import over_steps
from tests.models.helpers import TARGET_WORDS, B, S, T, build_tiny, run, run_steps, with_params
from tests.modules.helpers import assert_close, assert_same, gradient_error_of_16_bits, variables
from tests.sampled_cases import sample_cases

PLAIN = [('plain', 'rnn="simple"'), ('plain', 'rnn="lstm", layers=2, feed_context=True')]
ATTENDING = [
  ('bahdanau', 'rnn="gru"'),
  ('luong', 'rnn="lstm"'),
  ('luong', 'rnn="gru", input_feeding=False'),
  ('bahdanau', 'rnn="lstm", layers=2, residual=True'),
  ('luong', 'rnn="simple", layers=2'),
]
LATENT = [(ATTENDING[0], 'coverage', 'latent_monotonic'), (ATTENDING[1], 'general', 'latent')]
LATENT += [(ATTENDING[2], 'additive', 'latent_monotonic')]
# Every score, alignment and row of ATTENDING at least once; one case in three has one head, the others two.
_CYCLES = map(itertools.cycle, (ATTENDING, aj.SCORES, aj.ALIGNMENTS, (1, 2, 2)))
SAMPLE = list(itertools.islice(zip(*_CYCLES, strict=False), max(len(aj.SCORES), len(aj.ALIGNMENTS))))
SAMPLE = [
  (cell, score, alignment, 1 if aj.ALIGNMENTS[alignment].latent else heads) for cell, score, alignment, heads in SAMPLE
]
CASES = [
  *sample_cases(SAMPLE, 8),
  (*LATENT[0], 1),
  *(pytest.param(*case, 1, marks=pytest.mark.long) for case in LATENT[1:]),  # test_latent_models.py has more
  pytest.param(PLAIN[0], 'additive', 'softmax', 1, marks=pytest.mark.long),
  (PLAIN[1], 'additive', 'softmax', 1),
  (ATTENDING[2], 'coverage', 'sparsemax', 2),  # attends in the recurrence, without input feeding
  pytest.param(('gnmt', 'layers=3'), 'general', 'softmax', 2, marks=pytest.mark.long),
  (('gnmt', 'layers=2, current=False'), 'dot', 'mocha', 1),
]


@pytest.mark.parametrize(('cell', 'score', 'alignment', 'heads'), CASES)
def test_steps_equal_the_call_and_masked_tokens_have_no_effect(cell, score, alignment, heads):
  model = build_tiny(*cell, score=score, alignment=alignment, heads=heads)
  params, (source, mask, target) = with_params(model)

  def call(*args):
    return run(model, params, *args)._replace(likelihood=())

  outputs = call(source, mask, target)
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.logits.dtype == jnp.float32
  assert outputs.weights.shape == (B, T, S) and outputs.weights.dtype == jnp.float32
  assert_close(run_steps(model, params, source, mask, target), outputs)
  assert np.all(outputs.weights[~np.broadcast_to(mask[:, None], outputs.weights.shape)] == 0)
  assert np.any(outputs.weights != 0) == (cell[0] != 'plain')

  # Padding, other rows of the batch and later tokens have no effect.
  assert_same(call(jnp.where(mask, source, 3), mask, target), outputs)
  order = jnp.asarray([2, 0, 1])
  assert_same(call(source[order], mask[order], target[order]), jax.tree.map(lambda x: x[order], outputs))
  changed = call(source, mask, target.at[:, 3:].set(5))
  assert_same(jax.tree.map(lambda x: x[:, :3], changed), jax.tree.map(lambda x: x[:, :3], outputs))


@pytest.mark.long
@pytest.mark.parametrize('cell', [PLAIN[1], ATTENDING[0], ATTENDING[2]])
def test_the_amount_of_padding_has_no_effect(cell):
  model = build_tiny(*cell, score='location_sensitive', encoder='birnn(rnn="lstm", features=10, layers=2)')
  params, (source, mask, target) = with_params(model)
  outputs = run(model, params, source, mask, target)
  size = int(mask[1].sum())
  alone = run(model, params, source[1:2, :size], mask[1:2, :size], target[1:2])
  assert_close(alone.logits, outputs.logits[1:2])
  assert_close(alone.weights, outputs.weights[1:2, :, :size])


@pytest.mark.long
@pytest.mark.parametrize('cell', ['plain', 'bahdanau', 'luong'])
def test_an_empty_source_has_finite_gradients(cell):
  """Filler rows of a batch are empty; the gradients of the other rows must not be NaN."""
  model = build_tiny(cell)
  params, (source, mask, target) = with_params(model)
  mask = mask.at[1].set(False)

  def loss(params):
    return jnp.sum(model.apply(params, source, mask, target).logits[0])

  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  assert np.isfinite(value) and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.long
def test_gradients_in_16_bits_keep_small_terms_of_the_memory_over_many_steps():
  random = np.random.default_rng(0)
  source = jnp.asarray(random.integers(4, 11, (2, S)))
  target = jnp.asarray(random.integers(4, TARGET_WORDS, (2, 1024)))
  arguments = (source, source > 0, target)

  def make_model(dtype):
    return build_tiny('bahdanau', 'rnn="gru"', encoder='embedded', dtype=jnp.dtype(dtype).name)

  params = variables(make_model(jnp.float32), *arguments, scale=0.3)
  assert gradient_error_of_16_bits(make_model, params, *arguments) < 0.03


@pytest.mark.parametrize('stream', ['dropout', 'attention'])
def test_each_step_has_random_numbers_of_its_own_and_the_backward_pass_repeats_them(stream):
  class Noise(nn.Module):
    def draw(self, carry, x):
      return carry, x * jax.random.uniform(self.make_rng(stream), x.shape)

    @nn.compact
    def __call__(self, x):
      return over_steps(Noise.draw, self)(self, jnp.zeros(()), x)[1]

  def apply(x):
    return Noise().apply({}, x, rngs={stream: jax.random.key(0)})

  numbers = apply(jnp.ones((2, 3)))
  assert len(np.unique(numbers)) == 6
  assert_same(jax.grad(lambda x: jnp.sum(apply(x)))(jnp.ones((2, 3))), numbers)  # recomputed, from the same keys
