"""Streaming equals greedy search on the complete source, in linear time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.streaming import REQUIREMENTS, StreamingDecoder, check_streamable
from attention_jax.errors import UserError
from attention_jax.functional.scores import SCORES, additive
from attention_jax.tokens import EOS, PAD
from tests.models.helpers import ENCODED, FORWARD_ENCODER, SOURCE_WORDS, build_streaming, build_tiny
from tests.modules.helpers import assert_close, variables
from tests.sampled_cases import sample_cases

S, T = 9, 12
DEEP_ENCODER = f'rnn(rnn="lstm", features={ENCODED}, layers=2, residual=True)'
# cell, its options, encoder, score, alignment
CASES = [
  ('bahdanau', 'rnn="gru"', FORWARD_ENCODER, 'additive', 'monotonic'),
  ('bahdanau', 'rnn="lstm", layers=2', DEEP_ENCODER, 'normed_additive', 'mocha(width=2)'),
  ('luong', 'rnn="simple", layers=2, residual=True', FORWARD_ENCODER, 'cosine', 'mocha(width=1)'),
  ('luong', 'rnn="lstm"', DEEP_ENCODER, 'offset_additive', 'monotonic'),
  ('luong', 'rnn="gru", input_feeding=False', FORWARD_ENCODER, 'concat', 'mocha'),
  ('luong', 'rnn="gru", layers=2, input_feeding=False', DEEP_ENCODER, 'general', 'monotonic'),
  ('gnmt', 'rnn="gru", layers=2', FORWARD_ENCODER, 'general', 'monotonic'),
  ('gnmt', 'rnn="gru", layers=3, current=False', FORWARD_ENCODER, 'additive', 'mocha'),
  ('luong', 'rnn="gru"', f'act(rnn="gru", features={ENCODED})', 'additive', 'monotonic'),
]


def random_params(model, seed: int):
  mask = jnp.ones((1, S), bool)
  return variables(model, jnp.full((1, S), PAD), mask, jnp.full((1, T), PAD), seed=seed)


def random_source(seed: int, length: int) -> list[int]:
  """Ids with EOS at the end."""
  return [*np.random.default_rng(seed).integers(4, SOURCE_WORDS, length - 1).tolist(), EOS]


@functools.partial(jax.jit, static_argnums=(0, 4))
def greedy_search(model, params, source, mask, constraints):
  carry, memory = model.apply(params, source, mask, T, method='start')
  carry = constraints.start(carry, 1, T)

  def step(carry, token, memory):
    return model.apply(params, carry, token, memory, method='step')

  return search.greedy(constraints.constrain(step), carry, memory, max_length=T, source_mask=mask)


def greedy_tokens_and_weights(model, params, source: list[int], constraints=NO_CONSTRAINTS):
  """Tokens and weights [T, S] of greedy search on the complete source, padded to S."""
  ids = np.pad(source, (0, S - len(source)), constant_values=PAD)
  hypotheses = greedy_search(model, params, jnp.asarray(ids[None]), jnp.arange(S)[None] < len(source), constraints)
  length = int(hypotheses.lengths[0, 0])
  return hypotheses.tokens[0, 0, :length].tolist(), hypotheses.weights[0, 0, :length, : len(source)]


@pytest.mark.long
@pytest.mark.parametrize(
  'options',
  ['rnn="gru"', 'rnn="lstm", layers=3, residual=True', 'rnn="simple", layers=2', 'rnn="gru", layers=2, dropout=0.4'],
)
def test_incremental_encoding_equals_encoding_at_once(options):
  encoder = build_tiny(encoder=f'rnn(features={ENCODED}, {options})').encoder
  source = jnp.asarray([random_source(seed, S) for seed in range(3)])
  mask = jnp.ones((3, S), bool)
  params = variables(encoder, source, mask, True)
  encoded = jax.jit(encoder.apply, static_argnums=3)(params, source, mask, True)
  extend = jax.jit(lambda states, ids: encoder.apply(params, states, ids, method='extend'))
  states = encoder.init_states(3)
  memories = []
  for part in (source[:, :1], source[:, 1:2], source[:, 2:5], *jnp.split(source[:, 5:], S - 5, axis=1)):
    states, memory = extend(states, part)
    memories.append(memory)
  assert_close(jnp.concatenate(memories, axis=1), encoded.memory)
  assert_close(jnp.concatenate(jax.tree.leaves(states), axis=-1), encoded.final)


def attended_positions(weights) -> list[int]:
  """Returns the last position that each token attends to, or S where it attends to none."""
  return [int(np.flatnonzero(row)[-1]) if row.any() else S for row in weights]


def events(positions: list[int]) -> set[str]:
  """The kinds of moves over the source that occur in `positions`."""
  pairs = [*itertools.pairwise(positions)]
  occurs = {
    'starts later': 0 < positions[0] < S,
    'never starts': positions[0] == S,
    'stays': any(a == b < S for a, b in pairs),
    'moves': any(a < b < S for a, b in pairs),
    'runs off the end': any(a < b == S for a, b in pairs),
    'reaches max_length': len(positions) == T,
  }
  return {event for event, occurred in occurs.items() if occurred}


@pytest.mark.parametrize('case', sample_cases([(case,) for case in CASES], 8), ids=lambda case: '-'.join(case[::4]))
def test_streaming_equals_greedy_search(case):
  model = build_streaming(*case)
  decoder = StreamingDecoder(model, max_length=T)
  seen_events = set()
  for seed in range(30):
    params = random_params(model, seed)
    source = random_source(seed, 1 + seed % S)
    tokens, weights = greedy_tokens_and_weights(model, params, source)
    emitted = list(decoder(params['params'], source))
    assert [emission.token for emission in emitted] == tokens
    rows = np.array([emission.row(len(source)) for emission in emitted])
    np.testing.assert_allclose(rows, weights, rtol=1e-4, atol=1e-5)
    seen_events |= events(attended_positions(rows))
    if seed > S and len(seen_events) == 6:
      return
  assert len(seen_events) == 6, seen_events


@pytest.mark.long
def test_streaming_within_constraints_equals_greedy_search():
  model = build_streaming()
  constraints = Constraints(no_repeat_ngram_size=1, min_length=3)
  decoder = StreamingDecoder(model, max_length=T, constraints=constraints)
  changed = 0
  for seed in range(8):
    params = random_params(model, seed)
    source = random_source(seed, S)
    tokens, _ = greedy_tokens_and_weights(model, params, source, constraints)
    assert [emission.token for emission in decoder(params['params'], source)] == tokens
    assert len(set(tokens)) == len(tokens) > 3
    changed += tokens != greedy_tokens_and_weights(model, params, source)[0]
  assert changed


def test_encoders_that_the_error_expects_are_streamable():
  expected = next(requirement.expected() for requirement in REQUIREMENTS if requirement.field == 'model.encoder')
  assert expected
  for encoder in expected:
    check_streamable(build_streaming(encoder=encoder))


@pytest.mark.long
def test_tokens_of_an_empty_source_have_no_attention_weights():
  model = build_streaming()
  emitted = list(StreamingDecoder(model, max_length=T)(random_params(model, 0)['params'], []))
  assert emitted[-1].token == EOS
  assert not any(np.any(emission.weights) for emission in emitted)


class CountedScore:
  """The additive score, which counts its calls and their keys."""

  def __init__(self):
    self.reset()
    self.row = SCORES['additive']._replace(fn=self.score)

  def reset(self):
    self.keys = 0
    self.calls = 0

  def score(self, query, key, *, v):
    jax.debug.callback(self.count, key.shape[0])
    return additive(query, key, v=v)

  def count(self, keys):
    self.keys += int(keys)
    self.calls += 1


def record_reads(ids, record):
  """Yields ids, and appends each of them to `record` when it is read."""
  for id in ids:
    record.append(id)
    yield id


@pytest.mark.long
@pytest.mark.parametrize(
  ('alignment', 'window'), [('monotonic', 1), pytest.param('mocha(width=4)', 4, marks=pytest.mark.long)]
)
def test_time_is_linear_and_tokens_are_emitted_before_the_source_ends(alignment, window, monkeypatch):
  counted = CountedScore()
  monkeypatch.setitem(SCORES, 'counted', counted.row)
  model = build_streaming(score='counted', alignment=alignment)
  early_starts = 0
  for size in (6, 24):
    decoder = StreamingDecoder(model, max_length=size)
    for seed in range(4):
      params = random_params(model, seed)['params']
      ids_read = []
      source = record_reads(random_source(seed, size), ids_read)
      counted.reset()
      read_counts = []  # number of ids read before each token
      for emitted in decoder(params, source):
        read_counts.append(len(ids_read))
        assert emitted.position == len(ids_read) - 1
      jax.effects_barrier()
      assert len(read_counts) <= counted.calls <= size + len(read_counts)
      assert counted.keys == window * counted.calls
      early_starts += read_counts[0] < size
  assert early_starts >= 2


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'cell': 'plain'},
      "streaming needs a decoder that .*, but model.decoder is 'plain'; expected one of: bahdanau.bridge=False.",
    ),
    ({'options': 'bridge=True'}, "model.decoder is 'luong'; expected one of: .*luong.bridge=False."),
    ({'alignment': 'softmax'}, "model.attention.alignment is 'softmax'; expected one of: mocha, monotonic"),
    ({'score': 'coverage'}, "model.attention.score is 'coverage'; expected one of: additive, "),
    ({'heads': 2}, 'streaming needs one head, but model.attention.heads is 2; expected one of: 1'),
    ({'encoder': 'birnn(features=10)'}, """'birnn'; expected one of: act.direction="forward"., rnn.direct"""),
    ({'encoder': 'rnn(features=10, direction="backward")'}, "model.encoder is 'rnn'; expected one of: act.direct"),
  ],
)
def test_models_that_are_not_streamable_raise(options, message):
  streamable = {'cell': 'luong', 'options': 'bridge=False', 'encoder': FORWARD_ENCODER, 'alignment': 'monotonic'}
  arguments = streamable | options
  model = build_tiny(arguments.pop('cell'), arguments.pop('options'), **arguments)
  with pytest.raises(UserError, match=message):
    check_streamable(model)
