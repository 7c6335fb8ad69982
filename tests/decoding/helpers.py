"""A toy model in NumPy and JAX, and a reference beam search over Python lists."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding import search
from attention_jax.decoding.generate import IMPOSSIBLE_SCORE, Hypotheses
from attention_jax.decoding.ranking import MIN_COVERAGE, Ranking
from attention_jax.tokens import BOS, EOS, PAD
from tests.modules.helpers import draw

B, S, D, WORDS = 5, 3, 7, 11


class ToySearchModel(NamedTuple):
  """A small recurrent model of the next word, computed by JAX or, for the reference search, by NumPy.

  Attributes:
    hidden: [D, D] recurrent kernel.
    words: [V, D] embeddings, and the output layer.
    eos_bias: [B] a number for each source, added to the logit of EOS.
    memory: [B, S, D] encoded sources.
    mask: [B, S], which only the search uses: the model attends to masked positions, too.
  """

  hidden: np.ndarray
  words: np.ndarray
  eos_bias: np.ndarray
  memory: np.ndarray
  mask: np.ndarray

  def first_carry(self):
    return jnp.zeros_like(self.memory[:, 0])

  def step(self, carry, token, memory):
    return self._step(jnp, jax.nn.one_hot(EOS, len(self.words)), carry, self.words[token], memory)

  def reference_step(self, carry, token, b):
    """One step for source b and one hypothesis, in float64 -> carry, log-probabilities [V], weights [S]."""
    memory = (self.memory[None, b].astype(np.float64), self.eos_bias[None, b])
    eos = np.eye(len(self.words))[EOS]
    carry, (logits, weights) = self._step(np, eos, carry, self.words[[token]], memory)
    shifted = logits[0] - logits[0].max()
    return carry, shifted - np.log(np.exp(shifted).sum()), weights[0]

  def _step(self, xp, eos, carry, embedded, memory):
    encoded, eos_bias = memory
    scores = xp.exp(xp.einsum('bd,bsd->bs', carry, encoded))
    weights = scores / scores.sum(-1, keepdims=True)
    carry = xp.tanh(carry @ self.hidden + embedded + xp.einsum('bs,bsd->bd', weights, encoded))
    return carry, (carry @ self.words.T + eos_bias[:, None] * eos[None, :], weights)


def make_toy_model(
  words: int = WORDS, eos_bias=(-2.0, 0.0, 1.0, 3.0, -4.0), seed: int = 0, lengths=(3, 2, 3, 1, 2)
) -> ToySearchModel:
  """Returns a model with one source per entry of `eos_bias`."""
  sources = len(eos_bias)
  mask = np.arange(S) < np.asarray(lengths[:sources])[:, None]
  return ToySearchModel(
    np.asarray(draw(D, D, seed=seed), np.float32),
    np.asarray(draw(words, D, seed=seed + 1), np.float32),
    np.asarray(eos_bias, np.float32),
    np.asarray(draw(sources, S, D, seed=seed + 2), np.float32),
    mask,
  )


def select_sources(model: ToySearchModel, rows) -> ToySearchModel:
  """Returns the same model with these sources."""
  return model._replace(eos_bias=model.eos_bias[rows], memory=model.memory[rows], mask=model.mask[rows])


@functools.partial(jax.jit, static_argnames=('beams', 'max_length', 'ranking', 'groups', 'diversity'))
def beam(model: ToySearchModel, **options) -> Hypotheses:
  memory = (model.memory, model.eos_bias)
  return search.beam(model.step, model.first_carry(), memory, source_mask=model.mask, **options)


@functools.partial(jax.jit, static_argnames=('max_length', 'ranking'))
def greedy(model: ToySearchModel, **options) -> Hypotheses:
  memory = (model.memory, model.eos_bias)
  return search.greedy(model.step, model.first_carry(), memory, source_mask=model.mask, **options)


class ReferenceHypothesis(NamedTuple):
  """A hypothesis of the search in NumPy; `last_log_prob` is that of its last token."""

  log_prob: float
  tokens: tuple[int, ...]
  weights: tuple[np.ndarray, ...]
  last_log_prob: float
  carry: np.ndarray


def reference_search(
  model: ToySearchModel, b: int, beams: int, max_length: int, ranking: Ranking, groups: int = 1, diversity: float = 0.0
) -> list[ReferenceHypothesis]:
  """Beam search over Python lists without early stopping; returns the best finished hypotheses of source b."""
  size = beams // groups
  live = [[ReferenceHypothesis(0.0, (), (), 0.0, np.zeros((1, D)))] for _ in range(groups)]
  finished = [[] for _ in range(groups)]
  for step in range(max_length):
    chosen = []  # tokens that earlier groups have chosen in this step
    for group in range(groups):
      continued = []
      ended = []
      for path in live[group]:
        for token, extended in enumerate(_extensions(model, path, b)):
          if token == EOS:
            ended.append(extended)
          elif token not in (PAD, BOS):
            continued.append(extended)
      continued = sorted(continued, key=lambda path: diversity * chosen.count(path.tokens[-1]) - path.log_prob)[:size]
      best = sorted(continued + ended, key=lambda path: -path.log_prob)[:size]
      is_last = step == max_length - 1
      finished[group] += ended if is_last else [path for path in best if path.tokens[-1] == EOS]
      live[group] = continued
      chosen += [path.tokens[-1] for path in continued]
  best_of_groups = [path for paths in finished for path in _by_score(paths, ranking, model.mask[b])[:size]]
  return _by_score(best_of_groups, ranking, model.mask[b])


def score_output(model: ToySearchModel, b: int, output) -> ReferenceHypothesis:
  path = ReferenceHypothesis(0.0, (), (), 0.0, np.zeros((1, D)))
  for token in output:
    carry, log_probs, weights = model.reference_step(path.carry, path.tokens[-1] if path.tokens else BOS, b)
    total = path.log_prob + log_probs[token]
    path = ReferenceHypothesis(total, (*path.tokens, token), (*path.weights, weights), log_probs[token], carry)
  return path


def _extensions(model: ToySearchModel, path: ReferenceHypothesis, b: int) -> list[ReferenceHypothesis]:
  """The path continued by each token of the vocabulary."""
  carry, log_probs, weights = model.reference_step(path.carry, path.tokens[-1] if path.tokens else BOS, b)
  all_weights = (*path.weights, weights)
  return [
    ReferenceHypothesis(path.log_prob + log_prob, (*path.tokens, token), all_weights, log_prob, carry)
    for token, log_prob in enumerate(log_probs)
  ]


def _by_score(paths, ranking: Ranking, source_mask: np.ndarray) -> list[ReferenceHypothesis]:
  return sorted(paths, key=lambda path: -reference_score(path, ranking, source_mask))


def reference_score(path: ReferenceHypothesis, ranking: Ranking, source_mask: np.ndarray) -> float:
  total = path.log_prob
  if ranking.gamma:
    total += (ranking.gamma * source_mask.sum() / len(path.tokens) - 1) * path.last_log_prob
  penalties = {'wu2016': (5 + len(path.tokens)) / 6, 'power': len(path.tokens)}
  total /= penalties[ranking.length_penalty] ** ranking.alpha
  for i in np.flatnonzero(source_mask):
    coverage = sum(float(weights[i]) for weights in path.weights)
    total += ranking.beta * math.log(min(max(coverage, MIN_COVERAGE), 1.0))
  return total


def assert_hypotheses(
  actual: Hypotheses, b: int, expected: list[ReferenceHypothesis], ranking: Ranking, source_mask: np.ndarray
):
  """Asserts that source b has exactly the expected hypotheses, in this order."""
  for k, path in enumerate(expected):
    length = len(path.tokens)
    assert actual.lengths[b, k] == length
    assert tuple(actual.tokens[b, k, :length].tolist()) == path.tokens
    assert np.all(actual.tokens[b, k, length:] == PAD)
    np.testing.assert_allclose(actual.log_probs[b, k], path.log_prob, rtol=1e-4)
    np.testing.assert_allclose(actual.scores[b, k], reference_score(path, ranking, source_mask), rtol=1e-4)
    np.testing.assert_allclose(actual.weights[b, k, :length], path.weights, rtol=1e-3, atol=1e-5)
    assert np.all(actual.weights[b, k, length:] == 0)
  count = len(expected)
  assert np.all(actual.scores[b, count:] == np.float32(IMPOSSIBLE_SCORE))
  assert np.all(actual.lengths[b, count:] == 0)
  assert np.all(actual.tokens[b, count:] == PAD)
  assert np.all(actual.weights[b, count:] == 0)
