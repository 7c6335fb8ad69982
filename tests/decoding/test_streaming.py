"""Streaming: what comes out while the source arrives is what greedy search makes of the whole, in linear time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.decoding.streaming import StreamingDecoder, check_streamable
from attention_jax.errors import UserError
from attention_jax.functional.scores import SCORES, additive
from attention_jax.tokens import EOS, PAD
from tests.models.helpers import ENCODED, FORWARD_ENCODER, SOURCE_WORDS, build_streaming, build_tiny
from tests.modules.helpers import assert_close, variables
from tests.sweeps import sample_cases

S, T = 9, 12
DEEP = f'rnn(rnn="lstm", features={ENCODED}, layers=2, residual=True)'
# cell, its options, encoder, score, alignment
CASES = [
  ('bahdanau', 'rnn="gru"', FORWARD_ENCODER, 'additive', 'monotonic'),
  ('bahdanau', 'rnn="lstm", layers=2', DEEP, 'normed_additive', 'mocha(width=2)'),
  ('luong', 'rnn="simple", layers=2, residual=True', FORWARD_ENCODER, 'cosine', 'mocha(width=1)'),
  ('luong', 'rnn="lstm"', DEEP, 'offset_additive', 'monotonic'),
  ('luong', 'rnn="gru", input_feeding=False', FORWARD_ENCODER, 'concat', 'mocha'),
  ('luong', 'rnn="gru", layers=2, input_feeding=False', DEEP, 'general', 'monotonic'),
  ('gnmt', 'rnn="gru", layers=2', FORWARD_ENCODER, 'general', 'monotonic'),
  ('gnmt', 'rnn="gru", layers=3, current=False', FORWARD_ENCODER, 'additive', 'mocha'),
]


def drawn(model, seed: int):
  mask = jnp.ones((1, S), bool)
  return variables(model, jnp.full((1, S), PAD), mask, jnp.full((1, T), PAD), seed=seed)


def source_of(seed: int, length: int) -> list[int]:
  """Ids with EOS at the end."""
  return [*np.random.default_rng(seed).integers(4, SOURCE_WORDS, length - 1).tolist(), EOS]


@functools.partial(jax.jit, static_argnums=0)
def whole(model, params, source, mask):
  carry, memory = model.apply(params, source, mask, T, method='start')
  step = lambda carry, token, memory: model.apply(params, carry, token, memory, method='step')
  return search.greedy(step, carry, memory, max_length=T, source_mask=mask)


def searched(model, params, source: list[int]):
  """Tokens and weights [T, S] of greedy search over the whole source, padded to S."""
  ids = np.pad(source, (0, S - len(source)), constant_values=PAD)
  found = whole(model, params, jnp.asarray(ids[None]), jnp.arange(S)[None] < len(source))
  length = int(found.lengths[0, 0])
  return found.tokens[0, 0, :length].tolist(), found.weights[0, 0, :length, : len(source)]


@pytest.mark.parametrize(
  'options',
  ['rnn="gru"', 'rnn="lstm", layers=3, residual=True', 'rnn="simple", layers=2', 'rnn="gru", layers=2, dropout=0.4'],
)
def test_encoding_token_by_token_is_encoding_the_whole(options):
  encoder = build_tiny(encoder=f'rnn(features={ENCODED}, {options})').encoder
  source, mask = jnp.asarray([source_of(seed, S) for seed in range(3)]), jnp.ones((3, S), bool)
  params = variables(encoder, source, mask, True)
  encoded = jax.jit(encoder.apply, static_argnums=3)(params, source, mask, True)
  extend = jax.jit(lambda states, ids: encoder.apply(params, states, ids, method='extend'))
  states, parts = encoder.init_states(3), []
  for part in (source[:, :1], source[:, 1:2], source[:, 2:5], *jnp.split(source[:, 5:], S - 5, axis=1)):
    states, memory = extend(states, part)
    parts.append(memory)
  assert_close(jnp.concatenate(parts, axis=1), encoded.memory)
  assert_close(jnp.concatenate(jax.tree.leaves(states), axis=-1), encoded.final)


def places_of(rows) -> list[int]:
  """Where each token attended to, or S where it attended to nothing."""
  return [int(np.flatnonzero(row)[-1]) if row.any() else S for row in rows]


def happened(places: list[int]) -> set[str]:
  pairs = [*itertools.pairwise(places)]
  found = {
    'starts later': 0 < places[0] < S,
    'never starts': places[0] == S,
    'stays': any(a == b < S for a, b in pairs),
    'goes on': any(a < b < S for a, b in pairs),
    'runs off': any(a < b == S for a, b in pairs),
    'is cut': len(places) == T,
  }
  return {what for what, holds in found.items() if holds}


@pytest.mark.parametrize('case', sample_cases([(case,) for case in CASES], 4), ids=lambda case: '-'.join(case[::4]))
def test_streaming_is_greedy_search_of_the_whole(case):
  model = build_streaming(*case)
  stream, seen = StreamingDecoder(model, max_length=T), set()
  for seed in range(30):
    params, source = drawn(model, seed), source_of(seed, 1 + seed % S)
    tokens, weights = searched(model, params, source)
    emitted = list(stream(params['params'], source))
    assert [one.token for one in emitted] == tokens
    rows = np.array([one.row(len(source)) for one in emitted])
    np.testing.assert_allclose(rows, weights, rtol=1e-4, atol=1e-5)
    seen |= happened(places_of(rows))
    if seed > S and len(seen) == 6:  # the weights above are of every kind
      return
  assert len(seen) == 6, seen


def test_no_source_at_all_is_one_run_off():
  model = build_streaming()
  emitted = list(StreamingDecoder(model, max_length=T)(drawn(model, 0)['params'], []))
  assert emitted[-1].token == EOS and not any(np.any(one.weights) for one in emitted)


class Counted:
  """The additive score, counting the keys it is given."""

  def __init__(self):
    self.keys = self.calls = 0
    self.row = SCORES['additive']._replace(fn=self.score)

  def score(self, query, key, *, v):
    jax.debug.callback(self.count, key.shape[0])
    return additive(query, key, v=v)

  def count(self, keys):
    self.keys, self.calls = self.keys + int(keys), self.calls + 1


@pytest.mark.parametrize(('alignment', 'window'), [('monotonic', 1), ('mocha(width=4)', 4)])
def test_time_is_linear_and_tokens_come_before_the_source_has_ended(alignment, window):
  counted = Counted()
  model = build_streaming(score=counted.row, alignment=alignment)
  early = 0
  for size in (6, 24):
    stream = StreamingDecoder(model, max_length=size)
    for seed in range(4):
      params, source, taken = drawn(model, seed)['params'], source_of(seed, size), []
      counted.keys = counted.calls = 0
      read = []  # how much of the source had been taken when each token came out
      for one in stream(params, (taken.append(id) or id for id in source)):
        read.append(len(taken))
        assert one.position == len(taken) - 1
      jax.effects_barrier()
      assert counted.calls <= size + len(read) and counted.keys == window * counted.calls
      early += read[0] < size
  assert early >= 2


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'cell': 'plain'},
      "streaming needs a decoder that .*: model.decoder is 'plain'; possible: bahdanau.bridge=False.",
    ),
    ({'options': 'bridge=True'}, "model.decoder is 'luong'; possible: .*luong.bridge=False."),
    ({'alignment': 'softmax'}, "model.attention.alignment is 'softmax'; possible: mocha, monotonic"),
    ({'score': 'coverage'}, "model.attention.score is 'coverage'; possible: additive, "),
    ({'heads': 2}, 'streaming needs one head: model.attention.heads is 2; possible: 1'),
    ({'encoder': 'birnn(features=10)'}, """model.encoder is 'birnn'; possible: rnn.direction="forward"."""),
    ({'encoder': 'rnn(features=10, direction="backward")'}, "model.encoder is 'rnn'; possible: rnn.direction="),
  ],
)
def test_what_cannot_follow_its_source_says_so(options, message):
  given = {'cell': 'luong', 'options': 'bridge=False', 'encoder': FORWARD_ENCODER, 'alignment': 'monotonic'} | options
  with pytest.raises(UserError, match=message):
    check_streamable(build_tiny(given.pop('cell'), given.pop('options'), **given))
