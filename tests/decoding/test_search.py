"""Greedy and beam search, against every possible output, against a search in NumPy, and against themselves."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.decoding.ranking import DEFAULT_RANKING, MIN_COVERAGE, Ranking, length_penalty
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD
from tests.decoding.helpers import (
  WORDS,
  B,
  D,
  Hypothesis,
  S,
  ToySearchModel,
  assert_hypotheses,
  beam,
  greedy,
  make_toy_model,
  reference_search,
  score,
  select_sources,
)
from tests.models.helpers import build_tiny, inputs
from tests.modules.helpers import assert_close, assert_same, variables


@pytest.mark.parametrize(
  ('beams', 'max_length', 'ranking'),
  [
    (1, 6, DEFAULT_RANKING),
    (3, 6, DEFAULT_RANKING),
    (3, 6, Ranking(alpha=0.0)),
    (4, 1, Ranking(alpha=1.0)),
    (13, 4, Ranking(alpha=1.0)),
    (3, 6, Ranking(beta=0.2)),
    (13, 4, Ranking(alpha=0.0, beta=5.0)),
    (3, 6, Ranking(gamma=2.0)),
    (13, 4, Ranking(beta=0.5, gamma=0.3)),
  ],
)
def test_beam_is_the_search_in_numpy(beams, max_length, ranking):
  model = make_toy_model()
  found = jax.device_get(beam(model, beams=beams, max_length=max_length, ranking=ranking))
  assert found.tokens.shape == (B, beams, max_length) and found.weights.shape == (B, beams, max_length, S)
  for b in range(B):
    assert_hypotheses(found, b, reference_search(model, b, beams, max_length, ranking), ranking, model.mask[b])


@pytest.mark.parametrize(('beams', 'groups', 'diversity'), [(4, 2, 1.0), (6, 3, 0.4), (3, 3, 0.0)])
def test_diverse_beams_are_the_search_in_numpy(beams, groups, diversity):
  model, given = make_toy_model(), {'groups': groups, 'diversity': diversity}
  found = jax.device_get(beam(model, beams=beams, max_length=5, **given))
  for b in range(B):
    expected = reference_search(model, b, beams, 5, DEFAULT_RANKING, **given)
    assert_hypotheses(found, b, expected, DEFAULT_RANKING, model.mask[b])


def test_diversity_is_worth_something():
  model = make_toy_model(ends=(-2.0, 0.0, 1.0))
  different = lambda **given: len(
    {tuple(path) for path in np.asarray(beam(model, beams=4, max_length=6, **given).tokens[0, :, :2]).tolist()}
  )
  assert different(groups=4, diversity=5.0) == 4
  assert different(groups=4, diversity=0.0) == 1  # four times the same greedy search


@pytest.mark.parametrize('given', [{'groups': 0}, {'groups': 2}, {'groups': 3, 'diversity': -1.0}])
def test_groups_that_mean_nothing(given):
  with pytest.raises(UserError, match=r'possible: groups that divide beams=3, diversity of 0 or more'):
    beam(make_toy_model(), beams=3, max_length=2, **given)


@pytest.mark.parametrize(
  'ranking', [Ranking(alpha=0.0), DEFAULT_RANKING, Ranking(beta=1.0), Ranking(gamma=0.1), Ranking(gamma=9.0)]
)
def test_stopping_early_changes_nothing(ranking):
  model = make_toy_model(ends=(8.0, 1.0, 3.0))
  found = jax.device_get(beam(model, beams=3, max_length=23, ranking=ranking))
  for b in range(3):
    assert_hypotheses(found, b, reference_search(model, b, 3, 23, ranking), ranking, model.mask[b])


def test_the_loop_stops_early_and_waits_for_no_filler_rows():
  for find in (functools.partial(search.beam, beams=2), search.greedy):
    steps = []

    def run(model, find=find, steps=steps):
      def counted(carry, token, memory):
        jax.debug.callback(lambda _: steps.append(1), token)
        return model.step(carry, token, memory)

      return find(counted, model.first(), (model.memory, model.ends), max_length=41, source_mask=model.mask)

    jax.block_until_ready(jax.jit(run)(make_toy_model(ends=(9.0, 8.0, -99.0), lengths=(3, 2, 0))))
    jax.effects_barrier()
    assert 0 < len(steps) < 41


def test_what_pays_off_late_is_waited_for():
  """Ending at once is the more probable; a long way is better by its length, but only at its very end."""
  size, word, other = 12, 3, 4
  probabilities = np.full((size, 6), 1e-12)
  probabilities[0, [EOS, word, other, 5]] = np.exp(-1.0), np.exp(-1.3), 0.2, 0.15
  probabilities[1:-1, word] = probabilities[-1, EOS] = 1.0
  table = jnp.log(jnp.asarray(probabilities, jnp.float32))

  def step(carry, token, memory):
    return carry + 1, (table[carry], jnp.zeros((*carry.shape, S)))

  find = jax.jit(lambda: search.beam(step, jnp.zeros((1,), jnp.int32), (), beams=1, max_length=size))
  found = find()
  assert found.tokens[0, 0].tolist() == [word] * (size - 1) + [EOS]
  np.testing.assert_allclose(found.scores, [[-1.3 / ((5 + size) / 6) ** 0.6]], rtol=0.02)


def test_coverage_stays_with_its_hypothesis():
  """The second beam overtakes the first, and what they have looked at goes with them."""
  word, other = 3, 4
  probabilities, weights = np.full((3, 5, 5), 1e-12), np.zeros((3, 5, 2), np.float32)
  probabilities[0, BOS, [word, other]] = 0.6, 0.4
  probabilities[1, word, [word, other]], probabilities[1, other, word] = 0.5, 1.0
  probabilities[2, :, EOS] = 1.0
  weights[1, word], weights[1, other], weights[2] = (0.5, 0.75), (0.5, 0.0), (0.75, 0.0)
  table = jnp.log(jnp.asarray(probabilities, jnp.float32))

  def step(carry, token, memory):
    return carry + 1, (table[carry, token], jnp.asarray(weights)[carry, token])

  @functools.partial(jax.jit, static_argnames='beta')
  def find(level, beta):
    return search.beam(step, level, (), beams=2, max_length=3, ranking=Ranking(alpha=0.0, beta=beta))

  assert find(jnp.zeros((1,), jnp.int32), 0.0).tokens[0].tolist() == [[other, word, EOS], [word, word, EOS]]
  found = find(jnp.zeros((1,), jnp.int32), 0.5)
  assert found.tokens[0].tolist() == [[word, word, EOS], [other, word, EOS]]
  # The first position has got more than it needs; the second 0.75, or nothing at all.
  np.testing.assert_allclose(found.scores[0], np.log([0.3, 0.4]) + 0.5 * np.log([0.75, MIN_COVERAGE]), rtol=1e-5)
  np.testing.assert_allclose(found.log_probs[0], np.log([0.3, 0.4]), rtol=1e-5)


def test_who_attends_to_nothing_is_ranked_all_the_same():
  @functools.partial(jax.jit, static_argnames='ranking')
  def find(model, ranking):
    def step(carry, token, memory):
      carry, (logits, weights) = model.step(carry, token, memory)
      return carry, (logits, jnp.zeros_like(weights))

    given = {'ranking': ranking, 'source_mask': model.mask}
    return search.beam(step, model.first(), (model.memory, model.ends), beams=3, max_length=4, **given)

  plain, ranked = find(make_toy_model(), DEFAULT_RANKING), find(make_toy_model(), Ranking(beta=2.0))
  assert_same(ranked.tokens, plain.tokens)
  lost = 2.0 * math.log(MIN_COVERAGE) * make_toy_model().mask.sum(-1, keepdims=True)
  np.testing.assert_allclose(ranked.scores, plain.scores + lost, rtol=1e-5)


def test_an_end_that_comes_early_is_dearer():
  """The short output is the more probable one, until its EOS counts twice and that of the long one once."""
  probabilities = np.full((2, 4), 1e-12)
  probabilities[0, [EOS, 3]], probabilities[1, EOS] = (0.6, 0.4), 1.0
  table = jnp.log(jnp.asarray(probabilities, jnp.float32))

  @functools.partial(jax.jit, static_argnames='gamma')
  def find(level, gamma):
    step = lambda carry, token, memory: (carry + 1, (table[carry], jnp.zeros((*carry.shape, 2))))
    return search.beam(step, level, (), beams=2, max_length=2, ranking=Ranking(alpha=0.0, gamma=gamma))

  for gamma, lengths, scores in ((0.0, [1, 2], (0.6, 0.4)), (0.5, [1, 2], (0.6, 0.4)), (1.0, [2, 1], (0.4, 0.36))):
    found = find(jnp.zeros((1,), jnp.int32), gamma)
    assert found.lengths[0].tolist() == lengths
    np.testing.assert_allclose(found.scores[0], np.log(scores), rtol=1e-5)


# A vocabulary of so few words that all outputs can be written down; beams in plenty are simply not found.
@pytest.mark.parametrize(('words', 'max_length', 'possible'), [(4, 20, 20), (5, 4, 15), (6, 3, 13)])
def test_what_is_not_there_is_not_found(words, max_length, possible):
  model = make_toy_model(words)
  ranking = Ranking(beta=0.2, gamma=0.7)
  found = jax.device_get(beam(model, beams=possible + 3, max_length=max_length, ranking=ranking))
  for b in range(B):
    expected = reference_search(model, b, possible + 3, max_length, ranking)
    assert len(expected) == possible
    assert_hypotheses(found, b, expected, ranking, model.mask[b])


def test_hypotheses_are_sorted_distinct_and_end():
  for beams in (2, 7):
    found = jax.device_get(beam(make_toy_model(), beams=beams, max_length=5))
    assert np.all(np.diff(found.scores, axis=1) <= 0)
    for b in range(B):
      assert len({tuple(tokens) for tokens in found.tokens[b].tolist()}) == beams
      for tokens, length in zip(found.tokens[b], found.lengths[b], strict=True):
        assert tokens[length - 1] == EOS and not np.isin(tokens[: length - 1], (PAD, BOS, EOS)).any()


def test_a_source_does_not_feel_its_neighbours():
  model = make_toy_model()
  options = {'beams': 3, 'max_length': 6, 'ranking': Ranking(beta=0.2, gamma=0.7)}
  found, order = beam(model, **options), np.array([3, 0, 4, 2, 1])
  moved = select_sources(model, order)
  assert_same(beam(moved, **options), jax.tree.map(lambda x: x[order], found))
  fast = greedy(model, max_length=6)
  assert_same(greedy(moved, max_length=6), jax.tree.map(lambda x: x[order], fast))
  # A neighbour that goes on for long does not keep the others from being what they are alone.
  for b in (3, 4):
    alone = select_sources(model, slice(b, b + 1))
    assert_close(beam(alone, **options), jax.tree.map(lambda x, b=b: x[b : b + 1], found))
    assert_close(greedy(alone, max_length=6), jax.tree.map(lambda x, b=b: x[b : b + 1], fast))


@pytest.mark.parametrize(('max_length', 'ranking'), [(1, DEFAULT_RANKING), (6, Ranking(beta=0.2, gamma=0.7))])
def test_greedy_is_the_most_probable_token_at_every_step(max_length, ranking):
  model = make_toy_model()
  found = jax.device_get(greedy(model, max_length=max_length, ranking=ranking))
  assert found.tokens.shape == (B, 1, max_length)
  for b in range(B):
    path = Hypothesis(0.0, (), (), 0.0, np.zeros((1, D)))
    while EOS not in path.tokens:
      carry, log_probs, weights = model.reference_step(path.carry, path.tokens[-1] if path.tokens else BOS, b)
      allowed = [EOS] if len(path.tokens) == max_length - 1 else [*range(EOS, WORDS)]
      token = max(allowed, key=lambda token, log_probs=log_probs: log_probs[token])
      grown = (*path.tokens, token), (*path.weights, weights)
      path = Hypothesis(path.log_prob + log_probs[token], *grown, log_probs[token], carry)
    assert_hypotheses(found, b, [path], ranking, model.mask[b])


@pytest.mark.parametrize(
  'one', [functools.partial(beam, beams=2, max_length=3, ranking=Ranking(0.5)), functools.partial(greedy, max_length=3)]
)
def test_equal_shapes_are_compiled_once(one):
  traced = []

  class Counted(ToySearchModel):
    def step(self, *args):
      traced.append(1)
      return super().step(*args)

  jax.tree_util.register_pytree_node(Counted, lambda model: (tuple(model), None), lambda _, leaves: Counted(*leaves))
  one(Counted(*make_toy_model(seed=1)))
  first = len(traced)
  one(Counted(*make_toy_model(seed=2)))
  assert len(traced) == first > 0


def test_length_penalty():
  assert length_penalty(1, 0.6) == 1 and length_penalty(7, 0.0) == 1
  np.testing.assert_allclose(length_penalty(jnp.asarray([4, 13]), 0.6), [1.5**0.6, 3**0.6], rtol=1e-6)


@pytest.mark.parametrize('wrong', [{'beams': 0}, {'max_length': 0}])
def test_numbers_that_mean_nothing_are_named(wrong):
  options = {'beams': 2, 'max_length': 3} | wrong
  with pytest.raises(UserError, match='{}={}'.format(*next(iter(wrong.items())))):
    search.beam(make_toy_model().step, make_toy_model().first(), None, **options)


@pytest.mark.parametrize('name', ['alpha', 'beta', 'gamma'])
@pytest.mark.parametrize('value', [-0.1, 1e5, math.inf, math.nan])
def test_a_ranking_that_means_nothing_is_named(name, value):
  with pytest.raises(UserError, match=f'search: {name}={value}; possible: from 0 to 10'):
    Ranking(**{name: value})


# ----------------------------------------------------------------------------------------------------- with the models

MAX_LENGTH = 4
POSSIBLE = [(*words, EOS) for n in range(MAX_LENGTH) for words in itertools.product((3, 4), repeat=n)]
SIZES = (7, 5)  # PAD, BOS, EOS and two words


@functools.partial(jax.jit, static_argnums=0, static_argnames=('beams', 'ranking'))
def search_with(model, params, source, mask, beams, ranking):
  carry, memory = model.apply(params, source, mask, MAX_LENGTH, method='start')
  step = lambda carry, token, memory: model.apply(params, carry, token, memory, method='step')
  options = {'max_length': MAX_LENGTH, 'ranking': ranking, 'source_mask': mask}
  return search.beam(step, carry, memory, beams=beams, **options), search.greedy(step, carry, memory, **options)


@functools.partial(jax.jit, static_argnums=0)
def forced(model, params, source, mask):
  """Of every possible output, by the call that training uses: the log-probabilities [B, N, T] of its tokens, 0 after
  its end, and its weights [B, N, T, S]."""
  tokens = np.array([[*path, *[PAD] * (MAX_LENGTH - len(path))] for path in POSSIBLE])

  def one(source, mask):
    many = [jnp.broadcast_to(x[None], (len(tokens), *x.shape)) for x in (source, mask)]
    logits, weights, *_ = model.apply(params, *many, jnp.asarray(tokens))
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[..., None], -1)[..., 0]
    return jnp.where(jnp.asarray(tokens) != PAD, log_probs, 0.0), weights

  return jax.lax.map(lambda xs: one(*xs), (source, mask))


@pytest.mark.parametrize(
  ('cell', 'options', 'attention'),
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
)
def test_beams_in_plenty_are_every_possible_output(cell, options, attention):
  model = build_tiny(cell, options, sizes=SIZES, **attention)
  source, mask, target = inputs(sizes=SIZES)
  params = variables(model, source, mask, target)
  options = {'beams': len(POSSIBLE), 'ranking': Ranking(beta=0.2, gamma=0.7)}
  found, fast = jax.device_get(search_with(model, params, source, mask, **options))
  log_probs, weights = jax.device_get(forced(model, params, source, mask))
  for b in range(len(source)):
    every = [
      Hypothesis(row.sum(), path, tuple(matrix[: len(path)]), row[len(path) - 1], np.zeros(0))
      for row, path, matrix in zip(log_probs[b], POSSIBLE, weights[b], strict=True)
    ]
    ranked = options['ranking'], mask[b]
    assert_hypotheses(found, b, sorted(every, key=lambda path, ranked=ranked: -score(path, *ranked)), *ranked)
    chosen = POSSIBLE.index(tuple(fast.tokens[b, 0, : fast.lengths[b, 0]].tolist()))
    assert_hypotheses(fast, b, [every[chosen]], *ranked)

  noise = jnp.where(mask, source, source + 1)
  assert_same(search_with(model, params, noise, mask, **options), (found, fast))


def test_a_source_is_found_the_same_without_padding_and_neighbours():
  model = build_tiny('bahdanau', 'rnn="simple"', score='coverage')
  source, mask, target = inputs()
  params = variables(model, source, mask, target)
  cut = int(mask[1].sum())
  options = {'beams': 2, 'ranking': Ranking(beta=0.2, gamma=0.7)}
  alone = search_with(model, params, source[1:2, :cut], mask[1:2, :cut], **options)
  for one, every in zip(alone, search_with(model, params, source, mask, **options), strict=True):
    row = jax.tree.map(lambda x: x[1:2], every)
    assert_close(one, row._replace(weights=row.weights[..., :cut]))
