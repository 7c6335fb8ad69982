"""Sums of losses, and a tiny model that emits two words and EOS."""

import functools

import jax
import jax.numpy as jnp

from attention_jax.data.batching import Batch
from attention_jax.losses.sequence import sequence_loss
from attention_jax.tokens import EOS, UNK
from attention_jax.training.step import step_rngs
from tests.models.helpers import build_tiny
from tests.training.helpers import Toy, init_params, make_batch

RNGS = step_rngs(jax.random.key(4))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _jitted_sums(spec, model, auxiliary, *args):
  return sequence_loss(model, 0.1, auxiliary, spec)(*args)


def loss_sums(spec, batch=None, model=None, params=None, rngs=RNGS, update=1, auxiliary='', running=None):
  args = (params or init_params(), batch or make_batch(0), rngs, running or {}, update)
  return _jitted_sums(spec, model or Toy(0.3), auxiliary, *args)


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, batch, target, rngs=None):
  """Logits [B, T, V] of teacher forcing."""
  outputs = model.apply(
    {'params': params}, batch.source, batch.source_mask, target, deterministic=rngs is None, rngs=rngs
  )
  return outputs.logits


TINY = build_tiny('luong', 'rnn="simple"', score='general', sizes=(7, 5))
WORD = 4  # UNK and WORD are the two words
STEPS = 3
TARGET = [WORD, UNK, EOS]


def tiny_batch():
  """One pair, and a filler row."""
  source = jnp.asarray([[4, 6, 5, EOS], [0] * 4], jnp.int32)
  target = jnp.asarray([TARGET, [0] * STEPS], jnp.int32)
  return Batch(source, source != 0, target, target != 0, jnp.asarray([0, -1], jnp.int32))


B, T, V = 3, 5, 7  # rows, tokens and vocabulary of the fixture `case`
