"""Recurrent decoders: steps against the scan for every cell, padding, dropout, and random numbers of every step."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.decoders import Decoder, over_steps
from attention_jax.models.encoded import Encoded
from attention_jax.models.encoder_decoder import shift_right
from attention_jax.models.steps import DecoderOutput, StepTrace
from tests.models.helpers import TARGET_WORDS, B, S, T, build_tiny, inputs
from tests.modules.helpers import RNGS, assert_close, assert_same, draw, gradient_error_of_16_bits, variables
from tests.sampled_cases import sample_cases

PLAIN = [('plain', 'rnn="simple"'), ('plain', 'rnn="lstm", layers=2, feed_context=True')]
ATTENDING = [
  ('bahdanau', 'rnn="gru"'),
  ('luong', 'rnn="lstm"'),
  ('luong', 'rnn="gru", input_feeding=False'),
  ('bahdanau', 'rnn="lstm", layers=2, residual=True'),
  ('luong', 'rnn="simple", layers=2'),
]
LATENT = [
  (ATTENDING[0], 'coverage', 'latent_monotonic'),
  (ATTENDING[1], 'general', 'latent'),
  (ATTENDING[2], 'additive', 'latent_monotonic'),
]
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


@functools.partial(jax.jit, static_argnums=0)
def call_and_steps(model, params, source, mask, target):
  """Returns the outputs of the call, and those of one step after the other."""
  carry, memory = model.apply(params, source, mask, target.shape[1], method='start')

  def step(carry, token):
    return model.apply(params, carry, token, memory, method='step')

  _, step_outputs = jax.lax.scan(step, carry, shift_right(target).T)
  outputs = model.apply(params, source, mask, target)
  return outputs._replace(likelihood=(), linear=()), jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), step_outputs)


@pytest.mark.parametrize(('cell', 'score', 'alignment', 'heads'), CASES)
def test_steps_equal_the_call_and_masked_tokens_have_no_effect(cell, score, alignment, heads):
  model = build_tiny(*cell, score=score, alignment=alignment, heads=heads)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs, step_outputs = call_and_steps(model, params, source, mask, target)
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.logits.dtype == jnp.float32
  assert outputs.weights.shape == (B, T, S) and outputs.weights.dtype == jnp.float32
  assert_close(step_outputs, outputs)
  assert np.all(outputs.weights[~np.broadcast_to(mask[:, None], outputs.weights.shape)] == 0)
  assert np.any(outputs.weights != 0) == (cell[0] != 'plain')

  # Padding, other rows of the batch and later tokens have no effect.
  assert_same(call_and_steps(model, params, jnp.where(mask, source, 3), mask, target)[0], outputs)
  order = jnp.asarray([2, 0, 1])
  reordered = call_and_steps(model, params, source[order], mask[order], target[order])[0]
  assert_same(reordered, jax.tree.map(lambda x: x[order], outputs))
  changed = call_and_steps(model, params, source, mask, target.at[:, 3:].set(5))[0]
  assert_same(jax.tree.map(lambda x: x[:, :3], changed), jax.tree.map(lambda x: x[:, :3], outputs))


@pytest.mark.long
@pytest.mark.parametrize(
  'cell',
  [pytest.param(PLAIN[1], marks=pytest.mark.long), pytest.param(ATTENDING[0], marks=pytest.mark.long), ATTENDING[2]],
)
def test_the_amount_of_padding_has_no_effect(cell):
  model = build_tiny(*cell, score='location_sensitive', encoder='birnn(rnn="lstm", features=10, layers=2)')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  run = jax.jit(model.apply)
  outputs = run(params, source, mask, target)
  size = int(mask[1].sum())
  alone = run(params, source[1:2, :size], mask[1:2, :size], target[1:2])
  assert_close(alone.logits, outputs.logits[1:2])
  assert_close(alone.weights, outputs.weights[1:2, :, :size])


@pytest.mark.long
@pytest.mark.parametrize(
  'cell', [pytest.param('plain', marks=pytest.mark.long), 'bahdanau', pytest.param('luong', marks=pytest.mark.long)]
)
def test_an_empty_source_has_finite_gradients(cell):
  """Filler rows of a batch are empty; the gradients of the other rows must not be NaN."""
  model = build_tiny(cell)
  source, mask, target = inputs()
  mask = mask.at[1].set(False)
  params = variables(model, source, mask, target)

  def loss(params):
    return jnp.sum(model.apply(params, source, mask, target).logits[0])

  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  assert np.isfinite(value) and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


class NoisyCell(nn.Module):
  """A cell whose features are its inputs after dropout, and whose weights are random numbers of every step."""

  def setup(self):
    self.drop = nn.Dropout(0.5)

  def remember(self, encoded):
    return ()

  def start(self, encoded, memory):
    return jnp.zeros((B,))

  def project_inputs(self, embeddings):
    return embeddings

  def recur(self, carry, inputs, memory, deterministic):
    drawn = jax.random.uniform(self.make_rng('attention'), (B, 1))
    return carry, StepTrace(self.drop(inputs, deterministic=deterministic), drawn, ())

  def compute_outputs(self, traces, embeddings, memory, deterministic):
    return DecoderOutput(*traces)


@pytest.mark.long
def test_steps_draw_independently_and_the_backward_pass_repeats_the_draws():
  width = 37
  encoded = Encoded(draw(B, S, 2), jnp.ones((B, S), bool), draw(B, 2))

  def apply(x, rngs):
    return Decoder(NoisyCell()).apply({}, encoded, x, False, rngs=rngs)

  ones = jnp.ones((B, T, width))
  features, drawn, *_ = jax.jit(apply)(ones, RNGS)
  masks = {tuple(row) for row in np.asarray(features).reshape(B * T, width).tolist()}
  assert len(masks) == B * T and len(np.unique(drawn)) == B * T

  # The backward pass recomputes the step, with the dropout mask of the forward pass.
  def loss(x):
    return jnp.sum(apply(x, RNGS).features)

  assert_same(jax.jit(jax.grad(loss))(ones), features)


def noisy_alignment(scores, mask, *, rng):
  return jnp.where(mask, jax.random.uniform(rng, scores.shape), 0.0)


@pytest.mark.long
@pytest.mark.parametrize('cell', [ATTENDING[0], ATTENDING[2]])
def test_alignments_draw_independently_at_every_step(cell):
  model = build_tiny(*cell)
  # A config accepts only spec strings; the module accepts functions too.
  attention = model.decoder.attention.clone(alignment=noisy_alignment)
  model = model.clone(decoder=model.decoder.clone(cell=model.decoder.cell.clone(attention=attention)))
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  weights = jax.jit(model.apply)(params, source, mask, target, rngs=RNGS).weights
  drawn = np.asarray(weights)[np.broadcast_to(mask[:, None], weights.shape)]
  assert len(np.unique(drawn)) == drawn.size


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
def test_each_step_has_random_numbers_of_its_own(stream):
  class Noise(nn.Module):
    def draw(self, carry, x):
      return carry, jax.random.uniform(self.make_rng(stream), x.shape)

    @nn.compact
    def __call__(self, x):
      return over_steps(Noise.draw, self)(self, jnp.zeros(()), x)[1]

  numbers = Noise().apply({}, jnp.zeros((2, 3)), rngs={stream: jax.random.key(0)})
  assert len(np.unique(numbers)) == 6
