"""Constraints on hypotheses: every search against the enumeration of all hypotheses that satisfy them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.decoding import search
from attention_jax.decoding.constraints import Constraints
from attention_jax.decoding.prefix import force_prefix
from attention_jax.decoding.ranking import Ranking
from attention_jax.decoding.sampling import Sampling, sample
from attention_jax.errors import UserError
from attention_jax.tokens import BOS, EOS, PAD
from tests.decoding.helpers import (
  B,
  ReferenceHypothesis,
  assert_hypotheses,
  make_toy_model,
  reference_score,
  score_output,
  select_sources,
)
from tests.sampled_cases import sample_cases

WORDS = 6  # PAD, BOS, EOS and three words
T = 5
RANKING = Ranking(beta=0.2, gamma=0.7)


def occurs_twice(tokens, size: int) -> bool:
  """Whether a sequence of `size` tokens, EOS excluded, occurs twice in a hypothesis."""
  words = tokens[:-1]
  ngrams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
  return size > 0 and len(set(ngrams)) < len(ngrams)


def outputs(constraints: Constraints) -> list[tuple[int, ...]]:
  """All hypotheses that satisfy the constraints."""
  words = range(EOS + 1, WORDS)
  every = [(*ids, EOS) for n in range(T) for ids in itertools.product(words, repeat=n)]
  size, length = constraints.no_repeat_ngram_size, constraints.min_length
  return [output for output in every if len(output) > length and not occurs_twice(output, size)]


@functools.partial(jax.jit, static_argnames=('constraints', 'find'))
def run(model, constraints, find, prefix=None):
  carry = constraints.start(model.first_carry(), B, T)
  step = constraints.constrain(model.step)
  memory = (model.memory, model.eos_bias)
  if prefix is not None:
    step, carry, memory = force_prefix(step, carry, memory, prefix)
  return find(step, carry, memory, max_length=T, ranking=RANKING, source_mask=model.mask)


def ranked_outputs(model, b: int, constraints: Constraints) -> list[ReferenceHypothesis]:
  paths = [score_output(model, b, output) for output in outputs(constraints)]
  return sorted(paths, key=lambda path: -reference_score(path, RANKING, model.mask[b]))


CONSTRAINTS = [(Constraints(n, length),) for n, length in [(1, 0), (1, 2), (2, 0), (2, 3), (3, 1), (0, 3), (9, 4)]]


@pytest.mark.long
@pytest.mark.parametrize('constraints', sample_cases(CONSTRAINTS, 2), ids=str)
def test_enough_beams_return_every_output_within_the_constraints(constraints):
  model = make_toy_model(WORDS)
  beams = len(outputs(constraints)) + 2
  hypotheses = jax.device_get(run(model, constraints, functools.partial(search.beam, beams=beams)))
  for b in range(B):
    assert_hypotheses(hypotheses, b, ranked_outputs(model, b, constraints), RANKING, model.mask[b])


@pytest.mark.long
@pytest.mark.parametrize('constraints', sample_cases(CONSTRAINTS, 2), ids=str)
def test_greedy_search_takes_the_most_probable_token_within_the_constraints(constraints):
  model = make_toy_model(WORDS)
  hypotheses = jax.device_get(run(model, constraints, search.greedy))
  beginnings = {output[:n] for output in outputs(constraints) for n in range(T + 1)}
  for b in range(B):
    tokens = ()
    while EOS not in tokens:
      continued = [(*tokens, id) for id in range(EOS, WORDS) if (*tokens, id) in beginnings]
      tokens = max(continued, key=lambda ids: score_output(model, b, ids).log_prob)
    assert_hypotheses(hypotheses, b, [score_output(model, b, tokens)], RANKING, model.mask[b])


def sampler(samples: int, **options):
  rngs = jax.random.split(jax.random.key(0), B)
  return functools.partial(sample, rngs=rngs, sampling=Sampling(samples, **options))


@pytest.mark.long
@pytest.mark.parametrize('constraints', [Constraints(1, 2), Constraints(2, 3)], ids=str)
def test_samples_are_all_outputs_within_the_constraints(constraints):
  model = make_toy_model(WORDS)
  hypotheses = jax.device_get(run(model, constraints, sampler(2000, temperature=20.0)))
  expected = outputs(constraints)
  for b in range(B):
    assert (hypotheses.lengths[b] > 0).all()
    found = {tuple(tokens[tokens != PAD].tolist()): k for k, tokens in enumerate(hypotheses.tokens[b])}
    assert sorted(found) == sorted(expected)
    for output, k in [*found.items()][:5]:
      one = jax.tree.map(lambda x, k=k: x[:, k : k + 1], hypotheses)
      assert_hypotheses(one, b, [score_output(model, b, output)], RANKING, model.mask[b])


@pytest.mark.long
def test_a_filter_of_samples_keeps_only_tokens_within_the_constraints():
  model = make_toy_model(WORDS)
  constraints = Constraints(no_repeat_ngram_size=1, min_length=2)
  likeliest = run(model, constraints, sampler(1, top_k=1))
  np.testing.assert_array_equal(likeliest.tokens, run(model, constraints, search.greedy).tokens)


@pytest.mark.long
@pytest.mark.parametrize('find', [search.greedy, functools.partial(search.beam, beams=3), sampler(3)])
def test_a_hypothesis_that_cannot_be_continued_is_dropped(find):
  """Three words, none of them twice, are at most three tokens."""
  hypotheses = run(make_toy_model(WORDS), Constraints(no_repeat_ngram_size=1, min_length=4), find)
  assert not np.any(hypotheses.lengths) and not np.any(hypotheses.weights) and np.all(hypotheses.tokens == PAD)
  assert np.all(hypotheses.scores == np.float32(-1e30))


@pytest.mark.long
def test_a_prefix_counts_but_is_not_constrained_itself():
  model = make_toy_model(WORDS)
  prefix = jnp.asarray([[3, 3], [4, PAD], [PAD, PAD], [5, 5], [3, 4]])
  constraints = Constraints(no_repeat_ngram_size=1, min_length=3)
  hypotheses = jax.device_get(run(model, constraints, functools.partial(search.beam, beams=8), prefix))
  for b in range(B):
    required = tuple(id for id in prefix[b].tolist() if id != PAD)
    words = [id for id in range(EOS + 1, WORDS) if id not in required]
    endings = [ids for n in range(T) for ids in itertools.permutations(words, n) if 3 <= n + len(required) < T]
    found = {tuple(tokens[tokens != PAD].tolist()): k for k, tokens in enumerate(hypotheses.tokens[b])}
    found.pop((), None)  # beams without a hypothesis
    assert set(found) == {(*required, *ids, EOS) for ids in endings}
    for output, k in found.items():
      expected = score_output(model, b, output).log_prob - score_output(model, b, required).log_prob
      np.testing.assert_allclose(hypotheses.log_probs[b, k], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  'find', [pytest.param(search.greedy, marks=pytest.mark.long), functools.partial(search.beam, beams=2)]
)
def test_shrinking_the_batch_does_not_change_hypotheses(find):
  """Sources that end at once leave the batch, and the others continue with the tokens that are theirs."""
  sources = 70
  bias = np.where(np.arange(sources) % 3 == 0, -9.0, 9.0)
  model = make_toy_model(WORDS, eos_bias=bias, lengths=(3,) * sources)

  @jax.jit
  def find_all(model):
    constraints = Constraints(no_repeat_ngram_size=2, min_length=1)
    carry = constraints.start(model.first_carry(), len(model.eos_bias), 9)
    memory = (model.memory, model.eos_bias)
    return find(constraints.constrain(model.step), carry, memory, max_length=9, source_mask=model.mask)

  together = find_all(model)
  assert len(set(np.asarray(together.lengths[:, 0]).tolist())) > 1
  for start in (0, 35):  # fewer than twice MIN_SOURCES, which never shrink
    part = select_sources(model, slice(start, start + 35))
    np.testing.assert_array_equal(find_all(part).tokens, together.tokens[start : start + 35])


def test_16_bit_logits_keep_their_log_probabilities():
  logits = jax.random.normal(jax.random.key(0), (9, 9)).at[:, EOS].set(3.0).astype(jnp.bfloat16)

  def step(carry, token, memory):
    return carry, (logits[token], jnp.ones((*token.shape, 2), jnp.bfloat16))

  constraints = Constraints(min_length=2)
  carry = constraints.start(jnp.zeros((1, 1)), 1, 4)
  hypotheses = jax.jit(lambda: search.greedy(constraints.constrain(step), carry, (), max_length=4))()
  tokens = hypotheses.tokens[0, 0, : int(hypotheses.lengths[0, 0])]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  expected = log_probs[jnp.asarray([BOS, *tokens[:-1].tolist()]), tokens].sum()
  assert len(tokens) >= 3
  np.testing.assert_allclose(hypotheses.log_probs[0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'no_repeat_ngram_size': -1}, 'constraints.no_repeat_ngram_size must be at least 0, got -1'),
    ({'min_length': -2}, 'constraints.min_length must be at least 0, got -2'),
    ({'min_length': 5}, 'search: min_length must be less than max_length=5, which includes EOS, got 5'),
  ],
)
def test_options_out_of_range_raise(options, message):
  with pytest.raises(UserError, match=message):
    Constraints(**options).check(5)
