"""Greedy and beam search against all outputs, against a search in NumPy, and against each other."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.errors import UserError
from attention_jax.tokens import EOS, PAD
from tests.decoding.helpers import (
  WORDS,
  B,
  ReferenceHypothesis,
  S,
  assert_hypotheses,
  beam,
  greedy,
  make_toy_model,
  reference_score,
  reference_search,
  score_output,
  select_sources,
)
from tests.models.helpers import build_tiny, inputs
from tests.modules.helpers import assert_close, assert_same, variables
from tests.sampled_cases import sample_cases

WORD, OTHER_WORD = 3, 4  # ids of words in the tables of probabilities below


def assert_equal_search(model, beams, max_length, ranking=DEFAULT_RANKING, outputs=None, **options):
  """Compares beam search with the search in NumPy, which does not stop early and finds so many outputs."""
  hypotheses = jax.device_get(beam(model, beams=beams, max_length=max_length, ranking=ranking, **options))
  for b in range(len(model.mask)):
    expected = reference_search(model, b, beams, max_length, ranking, **options)
    assert len(expected) == outputs or outputs is None
    assert_hypotheses(hypotheses, b, expected, ranking, model.mask[b])
  return hypotheses


@pytest.mark.parametrize(
  ('beams', 'max_length', 'ranking'),
  sample_cases(
    [
      (1, 6, DEFAULT_RANKING),
      (3, 6, DEFAULT_RANKING),
      (4, 1, Ranking(alpha=1.0)),
      (3, 6, Ranking(alpha=0.0)),
      (13, 4, Ranking(alpha=1.0)),
      (13, 4, Ranking(alpha=1.0, length_penalty='power')),
      (3, 6, Ranking(alpha=0.6, length_penalty='power')),
      (13, 4, Ranking(beta=0.5, gamma=0.3)),
      (13, 4, Ranking(alpha=0.0, beta=5.0)),
      (3, 6, Ranking(gamma=2.0)),
      (3, 6, Ranking(beta=0.2)),
    ],
    2,
  ),
)
def test_beam_equals_the_search_in_numpy(beams, max_length, ranking):
  hypotheses = assert_equal_search(make_toy_model(), beams, max_length, ranking)
  assert hypotheses.tokens.shape == (B, beams, max_length)
  assert hypotheses.weights.shape == (B, beams, max_length, S)


@pytest.mark.long
@pytest.mark.parametrize(('beams', 'groups', 'diversity'), [(4, 2, 1.0), (6, 3, 0.4), (3, 3, 0.0)])
def test_diverse_beam_equals_the_search_in_numpy(beams, groups, diversity):
  assert_equal_search(make_toy_model(), beams, 5, groups=groups, diversity=diversity)


@pytest.mark.parametrize(('diversity', 'expected'), [(5.0, 4), (0.0, 1)])
def test_diversity_separates_the_groups(diversity, expected):
  """Without diversity, four groups of one beam are four times the same greedy search."""
  model = make_toy_model(eos_bias=(-2.0, 0.0, 1.0))
  hypotheses = beam(model, beams=4, max_length=6, groups=4, diversity=diversity)
  beginnings = {tuple(tokens) for tokens in np.asarray(hypotheses.tokens[0, :, :2]).tolist()}
  assert len(beginnings) == expected


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'beams': 0}, 'search: beams must be at least 1, got 0'),
    ({'max_length': 0}, 'search: max_length must be at least 1, got 0'),
    ({'groups': 2}, 'search: groups must be at least 1 and divide beams=3, got groups=2'),
    ({'groups': 3, 'diversity': -1.0}, 'search: diversity must be at least 0 and finite, got -1.0'),
    ({'groups': 3, 'diversity': math.inf}, 'search: diversity must be at least 0 and finite, got inf'),
  ],
)
def test_options_out_of_range_raise(options, message):
  model = make_toy_model()
  with pytest.raises(UserError, match=message):
    search.beam(model.step, model.first_carry(), None, **{'beams': 3, 'max_length': 2} | options)


def test_greedy_search_without_room_for_the_end_raises():
  model = make_toy_model()
  with pytest.raises(UserError, match='search: max_length must be at least 1, got 0'):
    search.greedy(model.step, model.first_carry(), None, max_length=0)


@pytest.mark.long
@pytest.mark.parametrize(
  'ranking',
  [Ranking(alpha=0.0), Ranking(beta=1.0), Ranking(gamma=9.0), DEFAULT_RANKING, Ranking(gamma=0.1)],
  ids=['alpha_0', 'beta_1', 'gamma_9', 'default', 'gamma_0.1'],
)
def test_early_stopping_does_not_change_the_result(ranking):
  assert_equal_search(make_toy_model(eos_bias=(8.0, 1.0, 3.0)), 3, 23, ranking)


@pytest.mark.long
@pytest.mark.parametrize('run_search', [functools.partial(search.beam, beams=2), search.greedy], ids=['beam', 'greedy'])
def test_the_loop_stops_early_and_ignores_filler_rows(run_search):
  steps = []

  def run(model):
    def counted_step(carry, token, memory):
      jax.debug.callback(lambda _: steps.append(1), token)
      return model.step(carry, token, memory)

    memory = (model.memory, model.eos_bias)
    return run_search(counted_step, model.first_carry(), memory, max_length=41, source_mask=model.mask)

  jax.block_until_ready(jax.jit(run)(make_toy_model(eos_bias=(9.0, 8.0, -99.0), lengths=(3, 2, 0))))
  jax.effects_barrier()
  assert 0 < len(steps) < 41


@pytest.mark.long
def test_the_loop_continues_while_a_longer_hypothesis_can_still_win():
  """Ending at once is more probable; a long hypothesis has a better score by its length, but only at its very end."""
  size = 12
  probabilities = np.full((size, 6), 1e-12)
  probabilities[0, [EOS, WORD, OTHER_WORD, 5]] = np.exp(-1.0), np.exp(-1.3), 0.2, 0.15
  probabilities[1:-1, WORD] = 1.0
  probabilities[-1, EOS] = 1.0
  table = jnp.log(jnp.asarray(probabilities, jnp.float32))

  def step(carry, token, memory):
    return carry + 1, (table[carry], jnp.zeros((*carry.shape, S)))

  @jax.jit
  def run():
    return search.beam(step, jnp.zeros((1,), jnp.int32), (), beams=1, max_length=size)

  hypotheses = run()
  assert hypotheses.tokens[0, 0].tolist() == [WORD] * (size - 1) + [EOS]
  np.testing.assert_allclose(hypotheses.scores, [[-1.3 / ((5 + size) / 6) ** 0.6]], rtol=0.02)


@pytest.mark.long
@pytest.mark.parametrize('beams', [1, 3])
def test_sums_over_the_steps_of_a_16_bit_model_are_float32(beams):
  logits = jax.random.normal(jax.random.key(0), (WORDS, WORDS)).at[:, EOS].set(-9.0).astype(jnp.bfloat16)

  def search_in(dtype):
    def step(carry, token, memory):
      return carry, (logits.astype(dtype)[token], jnp.full((*token.shape, S), 1 / S, jnp.bfloat16))

    ranking = Ranking(beta=0.5)
    run = search.greedy if beams == 1 else functools.partial(search.beam, beams=beams)
    return run(step, (), jnp.zeros((2, 1)), max_length=20, ranking=ranking)

  assert_close(search_in(jnp.bfloat16), search_in(jnp.float32))


@pytest.mark.parametrize('run', [search.greedy, functools.partial(search.beam, beams=2)], ids=['greedy', 'beam'])
def test_a_search_without_any_array_of_a_source_raises(run):
  with pytest.raises(UserError, match='carry or memory must have an array'):
    run(lambda carry, token, memory: (carry, (jnp.zeros((1, WORDS)), jnp.ones((1, S)))), (), (), max_length=2)


@pytest.mark.long
@pytest.mark.parametrize(('words', 'max_length', 'outputs'), [(4, 20, 20), (5, 4, 15), (6, 3, 13)])
def test_beams_beyond_the_number_of_outputs_stay_empty(words, max_length, outputs):
  assert_equal_search(make_toy_model(words), outputs + 3, max_length, Ranking(beta=0.2, gamma=0.7), outputs)


@pytest.mark.long
def test_results_do_not_depend_on_the_other_sources_of_the_batch():
  model = make_toy_model()
  options = {'beams': 3, 'max_length': 6, 'ranking': Ranking(beta=0.2, gamma=0.7)}
  order = np.array([3, 0, 4, 2, 1])
  permuted = select_sources(model, order)
  beam_results = beam(model, **options)
  assert_same(beam(permuted, **options), jax.tree.map(lambda x: x[order], beam_results))
  greedy_results = greedy(model, max_length=6)
  assert_same(greedy(permuted, max_length=6), jax.tree.map(lambda x: x[order], greedy_results))
  # A search of a single source stops when this source is finished, that of a batch when all sources are finished.
  for b in (3, 4):
    single = select_sources(model, slice(b, b + 1))
    assert_close(beam(single, **options), jax.tree.map(lambda x, b=b: x[b : b + 1], beam_results))
    assert_close(greedy(single, max_length=6), jax.tree.map(lambda x, b=b: x[b : b + 1], greedy_results))


@pytest.mark.long
@pytest.mark.parametrize(('max_length', 'ranking'), [(1, DEFAULT_RANKING), (6, Ranking(beta=0.2, gamma=0.7))])
def test_greedy_takes_the_most_probable_token_at_every_step(max_length, ranking):
  model = make_toy_model()
  hypotheses = jax.device_get(greedy(model, max_length=max_length, ranking=ranking))
  assert hypotheses.tokens.shape == (B, 1, max_length)
  for b in range(B):
    path = score_output(model, b, ())
    while EOS not in path.tokens:
      ids = [EOS] if len(path.tokens) == max_length - 1 else range(EOS, WORDS)
      path = max((score_output(model, b, (*path.tokens, id)) for id in ids), key=lambda path: path.log_prob)
    assert_hypotheses(hypotheses, b, [path], ranking, model.mask[b])


# ----------------------------------------------------------------------------------------------------- with the models

MAX_LENGTH = 4
OUTPUTS = [(*words, EOS) for n in range(MAX_LENGTH) for words in itertools.product((3, 4), repeat=n)]
SIZES = (7, 5)  # source and target ids; those of the target are PAD, BOS, EOS and two words


@functools.partial(jax.jit, static_argnums=0, static_argnames=('beams', 'ranking'))
def beam_and_greedy(model, params, source, mask, beams, ranking):
  carry, memory = model.apply(params, source, mask, MAX_LENGTH, method='start')

  def step(carry, token, memory):
    return model.apply(params, carry, token, memory, method='step')

  options = {'max_length': MAX_LENGTH, 'ranking': ranking, 'source_mask': mask}
  return search.beam(step, carry, memory, beams=beams, **options), search.greedy(step, carry, memory, **options)


@functools.partial(jax.jit, static_argnums=0)
def score_all_outputs(model, params, source, mask):
  """Scores OUTPUTS by teacher forcing.

  Returns:
    log-probabilities [B, N, T] of the tokens, 0 after EOS, and weights [B, N, T, S].
  """
  tokens = jnp.array([[*output, *[PAD] * (MAX_LENGTH - len(output))] for output in OUTPUTS])

  def score_source(source_and_mask):
    repeated = [jnp.broadcast_to(x[None], (len(tokens), *x.shape)) for x in source_and_mask]
    logits, weights, *_ = model.apply(params, *repeated, tokens)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
    return jnp.where(tokens != PAD, log_probs, 0.0), weights

  return jax.lax.map(score_source, (source, mask))


@pytest.mark.long
@pytest.mark.parametrize(
  ('cell', 'options', 'attention'),
  sample_cases(
    [
      ('plain', 'rnn="lstm", feed_context=True', {}),
      ('bahdanau', 'rnn="gru", layers=2', {'score': 'location_sensitive', 'heads': 2}),
      ('bahdanau', 'rnn="simple"', {'score': 'coverage', 'alignment': 'entmax15'}),
      ('luong', 'rnn="gru"', {'score': 'general', 'alignment': 'local_p(width=2)'}),
      ('luong', 'rnn="gru"', {'alignment': 'monotonic'}),
      ('luong', 'rnn="gru", input_feeding=False', {'alignment': 'forward'}),
      ('bahdanau', 'rnn="simple"', {'alignment': 'latent_monotonic'}),
      ('luong', 'rnn="gru"', {'score': 'general', 'alignment': 'latent'}),
    ],
    4,
  ),
)
def test_enough_beams_return_every_output(cell, options, attention):
  model = build_tiny(cell, options, sizes=SIZES, **attention)
  source, mask, target = inputs(sizes=SIZES)
  params = variables(model, source, mask, target)
  ranking = Ranking(beta=0.2, gamma=0.7)
  search_options = {'beams': len(OUTPUTS), 'ranking': ranking}
  beam_results, greedy_results = jax.device_get(beam_and_greedy(model, params, source, mask, **search_options))
  log_probs, weights = jax.device_get(score_all_outputs(model, params, source, mask))
  for b in range(len(source)):
    expected = [
      ReferenceHypothesis(row.sum(), output, tuple(matrix[: len(output)]), row[len(output) - 1], np.zeros(0))
      for row, output, matrix in zip(log_probs[b], OUTPUTS, weights[b], strict=True)
    ]
    ranked = sorted(expected, key=lambda path: -reference_score(path, ranking, mask[b]))
    assert_hypotheses(beam_results, b, ranked, ranking, mask[b])
    greedy_tokens = tuple(greedy_results.tokens[b, 0, : greedy_results.lengths[b, 0]].tolist())
    assert_hypotheses(greedy_results, b, [expected[OUTPUTS.index(greedy_tokens)]], ranking, mask[b])

  changed_padding = jnp.where(mask, source, source + 1)
  changed_results = beam_and_greedy(model, params, changed_padding, mask, **search_options)
  assert_same(changed_results, (beam_results, greedy_results))


@pytest.mark.long
def test_results_do_not_depend_on_padding():
  model = build_tiny('bahdanau', 'rnn="simple"', score='coverage')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  length = int(mask[1].sum())
  options = {'beams': 2, 'ranking': Ranking(beta=0.2, gamma=0.7)}
  single_results = beam_and_greedy(model, params, source[1:2, :length], mask[1:2, :length], **options)
  batch_results = beam_and_greedy(model, params, source, mask, **options)
  for single, batch in zip(single_results, batch_results, strict=True):
    row = jax.tree.map(lambda x: x[1:2], batch)
    assert_close(single, row._replace(weights=row.weights[..., :length]))
