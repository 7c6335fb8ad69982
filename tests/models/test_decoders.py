"""Decoders: stepping equals scanning for every cell, padding is not seen, and every step draws for itself."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.models.cells import DecoderOutput, StepTrace
from attention_jax.models.decoders import Decoder
from attention_jax.models.encoded import Encoded
from attention_jax.models.encoder_decoder import shift_right
from tests.models.helpers import TARGET_WORDS, B, S, T, build_tiny, inputs
from tests.modules.helpers import RNGS, assert_close, assert_same, draw, variables
from tests.sweeps import sample_cases

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
# A sample that has every score and every alignment, every cell, and one head as well as two.
_CYCLES = map(itertools.cycle, (ATTENDING, aj.SCORES, aj.ALIGNMENTS, (1, 2, 2)))
SAMPLE = list(itertools.islice(zip(*_CYCLES, strict=False), max(len(aj.SCORES), len(aj.ALIGNMENTS))))
SAMPLE = sample_cases([(*case[:3], 1 if aj.ALIGNMENTS[case[2]].latent else case[3]) for case in SAMPLE], 2)
SAMPLE += [(*case, 1) for case in LATENT]
SAMPLE += [(cell, 'additive', 'softmax', 1) for cell in PLAIN]
SAMPLE += [(ATTENDING[2], 'coverage', 'sparsemax', 2)]  # scanned although nothing is fed
SAMPLE += [(('gnmt', 'layers=3'), 'general', 'softmax', 2), (('gnmt', 'layers=2, current=False'), 'dot', 'mocha', 1)]


@functools.partial(jax.jit, static_argnums=0)
def both_ways(model, params, source, mask, target):
  """The call over all steps, and one step after the other."""
  carry, memory = model.apply(params, source, mask, target.shape[1], method='start')
  step = lambda carry, token: model.apply(params, carry, token, memory, method='step')
  _, stepped = jax.lax.scan(step, carry, shift_right(target).T)
  whole = model.apply(params, source, mask, target)
  return whole._replace(likelihood=(), linear=()), jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), stepped)


@pytest.mark.parametrize(('cell', 'score', 'alignment', 'heads'), SAMPLE)
def test_stepping_equals_scanning_and_padding_is_not_seen(cell, score, alignment, heads):
  model = build_tiny(*cell, score=score, alignment=alignment, heads=heads)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  outputs, stepped = both_ways(model, params, source, mask, target)
  assert outputs.logits.shape == (B, T, TARGET_WORDS) and outputs.logits.dtype == jnp.float32
  assert outputs.weights.shape == (B, T, S) and outputs.weights.dtype == jnp.float32
  assert_close(stepped, outputs)
  assert np.all(outputs.weights[~np.broadcast_to(mask[:, None], outputs.weights.shape)] == 0)
  assert np.any(outputs.weights != 0) == (cell[0] != 'plain')

  # Neither what stands in the padding, nor the neighbours, nor what comes later.
  assert_same(both_ways(model, params, jnp.where(mask, source, 3), mask, target)[0], outputs)
  order = jnp.asarray([2, 0, 1])
  moved = both_ways(model, params, source[order], mask[order], target[order])[0]
  assert_same(moved, jax.tree.map(lambda x: x[order], outputs))
  later = both_ways(model, params, source, mask, target.at[:, 3:].set(5))[0]
  assert_same(jax.tree.map(lambda x: x[:, :3], later), jax.tree.map(lambda x: x[:, :3], outputs))


@pytest.mark.parametrize('cell', [PLAIN[1], ATTENDING[0], ATTENDING[2]])
def test_how_much_padding_there_is_changes_nothing(cell):
  model = build_tiny(*cell, score='location_sensitive', encoder='birnn(rnn="lstm", features=10, layers=2)')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  run = jax.jit(model.apply)
  outputs, size = run(params, source, mask, target), int(mask[1].sum())
  alone = run(params, source[1:2, :size], mask[1:2, :size], target[1:2])
  assert_close(alone.logits, outputs.logits[1:2])
  assert_close(alone.weights, outputs.weights[1:2, :, :size])


@pytest.mark.parametrize('cell', ['plain', 'bahdanau', 'luong'])
def test_an_empty_source_is_finite(cell):
  """The filler rows of a batch: gradients of what they are not asked for are not NaN either."""
  model = build_tiny(cell)
  source, mask, target = inputs()
  mask = mask.at[1].set(False)
  params = variables(model, source, mask, target)
  loss = lambda params: jnp.sum(model.apply(params, source, mask, target).logits[0])
  value, gradients = jax.jit(jax.value_and_grad(loss))(params)
  assert np.isfinite(value) and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


def test_dropout_is_only_there_while_training():
  source, mask, target = inputs()
  model = build_tiny('luong', 'rnn="simple", layers=2', dropout=0.5)
  params = variables(model, source, mask, target)
  run = jax.jit(model.apply, static_argnums=4)
  trained = lambda seed: run(params, source, mask, target, False, rngs={'dropout': jax.random.key(seed)}).logits
  whole = run(params, source, mask, target, True).logits
  assert np.any(trained(1) != trained(2)) and np.any(trained(1) != whole)
  assert_same(trained(1), trained(1))


class Noisy(nn.Module):
  """A cell that does nothing but drop its inputs out, so that one sees what every step drew."""

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


def test_every_step_draws_for_itself_and_backward_sees_the_same_draw():
  width, encoded = 37, Encoded(draw(B, S, 2), jnp.ones((B, S), bool), draw(B, 2))
  apply = lambda x, rngs: Decoder(Noisy()).apply({}, encoded, x, False, rngs=rngs)
  ones = jnp.ones((B, T, width))
  features, drawn, *_ = jax.jit(apply)(ones, RNGS)
  masks = {tuple(row) for row in np.asarray(features).reshape(B * T, width).tolist()}
  assert len(masks) == B * T and len(np.unique(drawn)) == B * T
  # The step is computed again in the backward pass, with the mask of the forward pass.
  loss = lambda x: jnp.sum(apply(x, RNGS).features)
  assert_same(jax.jit(jax.grad(loss))(ones), features)


def noisy(scores, mask, *, rng):
  return jnp.where(mask, jax.random.uniform(rng, scores.shape), 0.0)


@pytest.mark.parametrize('cell', [ATTENDING[0], ATTENDING[2]])
def test_what_draws_draws_at_every_step(cell):
  model = build_tiny(*cell, alignment=noisy)
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  weights = jax.jit(model.apply)(params, source, mask, target, rngs=RNGS).weights
  drawn = np.asarray(weights)[np.broadcast_to(mask[:, None], weights.shape)]
  assert len(np.unique(drawn)) == drawn.size
