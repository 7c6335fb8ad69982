"""A model in NumPy and jax alike, and searches of it over Python lists, for the tests of search."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.decoding import search
from attention_jax.decoding.ranking import MIN_COVERAGE, Ranking
from attention_jax.decoding.search import IMPOSSIBLE_SCORE, Hypotheses
from attention_jax.tokens import BOS, EOS, PAD
from tests.modules.helpers import draw

B, S, D, WORDS = 5, 3, 7, 11


class ToySearchModel(NamedTuple):
  """A recurrent model of the next word in a few lines, so that NumPy can search with it as well."""

  hidden: np.ndarray  # [D, D]
  words: np.ndarray  # [V, D]: embeddings, and the output layer
  ends: np.ndarray  # [B]: how much each source likes to end
  memory: np.ndarray  # [B, S, D]
  mask: np.ndarray  # [B, S]: only the search heeds it, so that what it masks has got attention

  def first(self):
    return jnp.zeros_like(self.memory[:, 0])

  def step(self, carry, token, memory):
    return self._step(jnp, jax.nn.one_hot(EOS, len(self.words)), carry, self.words[token], memory)

  def reference_step(self, carry, token, b):
    """The same for one source b and one hypothesis, in float64."""
    memory = self.memory[None, b].astype(np.float64), self.ends[None, b]
    eos = np.eye(len(self.words))[EOS]
    carry, (logits, weights) = self._step(np, eos, carry, self.words[[token]], memory)
    shifted = logits[0] - logits[0].max()
    return carry, shifted - np.log(np.exp(shifted).sum()), weights[0]

  def _step(self, xp, eos, carry, embedded, memory):
    encoded, ends = memory
    scores = xp.exp(xp.einsum('bd,bsd->bs', carry, encoded))
    weights = scores / scores.sum(-1, keepdims=True)
    carry = xp.tanh(carry @ self.hidden + embedded + xp.einsum('bs,bsd->bd', weights, encoded))
    return carry, (carry @ self.words.T + ends[:, None] * eos[None, :], weights)


def make_toy_model(
  words: int = WORDS, ends=(-2.0, 0.0, 1.0, 3.0, -4.0), seed: int = 0, lengths=(3, 2, 3, 1, 2)
) -> ToySearchModel:
  arrays = draw(D, D, seed=seed), draw(words, D, seed=seed + 1), ends, draw(len(ends), S, D, seed=seed + 2)
  mask = np.arange(S) < np.asarray(lengths[: len(ends)])[:, None]
  return ToySearchModel(*(np.asarray(x, np.float32) for x in arrays), mask)


def select_sources(model: ToySearchModel, rows) -> ToySearchModel:
  """The same model of these sources."""
  return model._replace(ends=model.ends[rows], memory=model.memory[rows], mask=model.mask[rows])


@functools.partial(jax.jit, static_argnames=('beams', 'max_length', 'ranking', 'groups', 'diversity'))
def beam(model: ToySearchModel, **options) -> Hypotheses:
  return search.beam(model.step, model.first(), (model.memory, model.ends), source_mask=model.mask, **options)


@functools.partial(jax.jit, static_argnames=('max_length', 'ranking'))
def greedy(model: ToySearchModel, **options) -> Hypotheses:
  return search.greedy(model.step, model.first(), (model.memory, model.ends), source_mask=model.mask, **options)


class Hypothesis(NamedTuple):
  """A hypothesis of the search in NumPy."""

  log_prob: float
  tokens: tuple[int, ...]
  weights: tuple[np.ndarray, ...]
  last: float  # the log-probability of its last token
  carry: np.ndarray


def reference_search(
  model: ToySearchModel, b: int, beams: int, max_length: int, ranking: Ranking, groups: int = 1, diversity: float = 0.0
) -> list[Hypothesis]:
  """Beam search over Python lists, never stopped early; the best finished hypotheses of source b."""
  size = beams // groups
  alive, finished = [[Hypothesis(0.0, (), (), 0.0, np.zeros((1, D)))]] * groups, [[] for _ in range(groups)]
  for step in range(max_length):
    taken = []
    for group in range(groups):
      new, ends = [], []
      for path in alive[group]:
        last = path.tokens[-1] if path.tokens else BOS
        carry, log_probs, weights = model.reference_step(path.carry, last, b)
        grow = lambda token, path=path, carry=carry, log_probs=log_probs, weights=weights: Hypothesis(
          path.log_prob + log_probs[token], (*path.tokens, token), (*path.weights, weights), log_probs[token], carry
        )
        ends.append(grow(EOS))
        new.extend(grow(token) for token in range(len(model.words)) if token not in (PAD, BOS, EOS))
      new = sorted(new, key=lambda path: diversity * taken.count(path.tokens[-1]) - path.log_prob)[:size]
      best = sorted(new + ends, key=lambda path: -path.log_prob)[:size]
      finished[group] += ends if step == max_length - 1 else [path for path in best if path.tokens[-1] == EOS]
      alive = [*alive[:group], new, *alive[group + 1 :]]
      taken += [path.tokens[-1] for path in new]
  by_score = lambda paths: sorted(paths, key=lambda path: -score(path, ranking, model.mask[b]))
  return by_score([path for paths in finished for path in by_score(paths)[:size]])


def score(path: Hypothesis, ranking: Ranking, source_mask: np.ndarray) -> float:
  total = path.log_prob
  if ranking.gamma:
    total += (ranking.gamma * source_mask.sum() / len(path.tokens) - 1) * path.last
  total /= ((5 + len(path.tokens)) / 6) ** ranking.alpha
  for i in np.flatnonzero(source_mask):
    seen = sum(float(weights[i]) for weights in path.weights)
    total += ranking.beta * math.log(min(max(seen, MIN_COVERAGE), 1.0))
  return total


def assert_hypotheses(found: Hypotheses, b: int, expected: list[Hypothesis], ranking: Ranking, source_mask: np.ndarray):
  """Source b has exactly these, in this order."""
  for k, path in enumerate(expected):
    length = len(path.tokens)
    assert found.lengths[b, k] == length
    assert tuple(found.tokens[b, k, :length].tolist()) == path.tokens and np.all(found.tokens[b, k, length:] == PAD)
    np.testing.assert_allclose(found.log_probs[b, k], path.log_prob, rtol=1e-4)
    np.testing.assert_allclose(found.scores[b, k], score(path, ranking, source_mask), rtol=1e-4)
    np.testing.assert_allclose(found.weights[b, k, :length], path.weights, rtol=1e-3, atol=1e-5)
    assert np.all(found.weights[b, k, length:] == 0)
  k = len(expected)
  assert np.all(found.scores[b, k:] == np.float32(IMPOSSIBLE_SCORE)) and np.all(found.lengths[b, k:] == 0)
  assert np.all(found.tokens[b, k:] == PAD) and np.all(found.weights[b, k:] == 0)
