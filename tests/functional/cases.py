"""Reference implementations of every row of SCORES: literal NumPy loops in float64, written from the papers.

A new score needs a Case here, a new alignment a Case in alignment_cases.py. All tests of the contract run over them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

# Primes; only T and WIDTH are equal. Keys have width QUERY if a score requires queries and keys of the same width.
T, S, QUERY, KEY, VALUE, FEATURES, RANK, CHANNELS, WIDTH, POSITIONS = 3, 7, 5, 11, 13, 17, 2, 19, 3, 23


class Case(NamedTuple):
  """The reference of one row.

  Attributes:
    name: a spec string.
    arguments: arguments of the row's function by name.
    reference: the same formula as a literal loop; for an alignment that keeps a state it returns (weights, state).
  """

  name: str
  arguments: Mapping[str, Any]
  reference: Callable[..., np.ndarray]

  @property
  def row(self) -> str:
    """Name of the row, without options."""
    return self.name.split('(')[0]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
  """Returns normally distributed numbers."""
  return np.random.default_rng([seed, *shape]).normal(size=shape)


def loop(formula):
  """Turns a formula of one query, one key and the position s into the scores of all positions."""
  return lambda query, key, **params: np.array([formula(query, key[s], s, **params) for s in range(len(key))])


def _dot(query, key, s):
  return sum(q * k for q, k in zip(query, key, strict=True))


def _general(query, key, s, w):
  return sum(query[i] * w[i, j] * key[j] for i in range(len(query)) for j in range(len(key)))


def _additive(query, key, s, v):
  return sum(v[f] * np.tanh(query[f] + key[f]) for f in range(len(v)))


def _normed_additive(query, key, s, v, gain, bias):
  norm = np.sqrt(sum(x * x for x in v))
  return sum(gain * v[f] / norm * np.tanh(query[f] + key[f] + bias[f]) for f in range(len(v)))


def _concat(query, key, s, w, v):
  joined = np.concatenate([query, key])
  return sum(v[f] * np.tanh(sum(joined[i] * w[i, f] for i in range(len(joined)))) for f in range(len(v)))


def _cosine(query, key, s, beta):
  return beta * sum(query * key) / (np.sqrt(sum(query * query)) * np.sqrt(sum(key * key)))


def _normed_dot(query, key, s, query_gain, key_gain):
  query_rms = np.sqrt(sum(query * query) / len(query))
  key_rms = np.sqrt(sum(key * key) / len(key))
  return sum(query_gain * query / query_rms * key_gain * key / key_rms) / np.sqrt(len(query))


def _elu_dot(query, key, s):
  def phi(x):
    return x + 1 if x > 0 else np.exp(x)

  return sum(phi(q) * phi(k) for q, k in zip(query, key, strict=True))


def _location(query, key, s, w):
  return sum(w[s, i] * query[i] for i in range(len(query)))


def location_sensitive(query, key, previous, filters, u, v):
  channels, width = filters.shape
  scores = np.zeros(len(key))
  for s in range(len(key)):
    # np.convolve flips the filter; 'full' starts width // 2 before the centre.
    f = [np.convolve(previous, filters[c], mode='full')[width // 2 + s] for c in range(channels)]
    for i in range(len(v)):
      scores[s] += v[i] * np.tanh(query[i] + key[s, i] + sum(u[c, i] * f[c] for c in range(channels)))
  return scores


def _coverage(query, key, s, coverage, u, v):
  return sum(v[f] * np.tanh(query[f] + key[f] + u[f] * coverage[s]) for f in range(len(v)))


def _fertility(query, key, s, coverage, u, v, w, max_fertility=2.0):
  phi = max_fertility / (1 + np.exp(-sum(w[f] * key[f] for f in range(len(w)))))
  return sum(v[f] * np.tanh(query[f] + key[f] + u[f] * coverage[s] / phi) for f in range(len(v)))


_EQUAL_WIDTHS = {'query': draw(QUERY), 'key': draw(S, QUERY)}
_UNEQUAL_WIDTHS = {'query': draw(QUERY), 'key': draw(S, KEY)}
_PROJECTED = {'query': draw(FEATURES), 'key': draw(S, FEATURES)}
_V = {'v': draw(FEATURES, seed=1)}
_PREVIOUS = np.abs(draw(S)) / np.abs(draw(S)).sum()

SCORE_CASES = [
  Case('dot', _EQUAL_WIDTHS, loop(_dot)),
  Case('scaled_dot', _EQUAL_WIDTHS, loop(lambda q, k, s: _dot(q, k, s) / np.sqrt(len(q)))),
  Case('general', {**_UNEQUAL_WIDTHS, 'w': draw(QUERY, KEY)}, loop(_general)),
  Case(
    f'low_rank(rank={RANK})',
    {**_UNEQUAL_WIDTHS, 'u': draw(QUERY, RANK), 'v': draw(KEY, RANK)},
    loop(lambda q, k, s, u, v: _general(q, k, s, u @ v.T)),
  ),
  Case('additive', {**_PROJECTED, **_V}, loop(_additive)),
  Case('normed_additive', {**_PROJECTED, **_V, 'gain': np.array(0.7), 'bias': draw(FEATURES)}, loop(_normed_additive)),
  Case(
    'offset_additive',
    {**_PROJECTED, **_V, 'gain': np.array(0.7), 'bias': draw(FEATURES), 'offset': np.array(-0.4)},
    loop(lambda q, k, s, v, gain, bias, offset: _normed_additive(q, k, s, v, gain, bias) + offset),
  ),
  Case('concat', {**_UNEQUAL_WIDTHS, 'w': draw(QUERY + KEY, FEATURES), **_V}, loop(_concat)),
  Case('cosine', {**_EQUAL_WIDTHS, 'beta': np.array(2.3)}, loop(_cosine)),
  Case('normed_dot', {**_EQUAL_WIDTHS, 'query_gain': draw(QUERY, seed=1), 'key_gain': draw(QUERY)}, loop(_normed_dot)),
  Case('elu_dot', _EQUAL_WIDTHS, loop(_elu_dot)),
  Case(f'location(max_positions={POSITIONS})', {**_UNEQUAL_WIDTHS, 'w': draw(POSITIONS, QUERY)}, loop(_location)),
  Case(
    f'location_sensitive(channels={CHANNELS}, width={WIDTH})',
    {
      **_PROJECTED,
      'previous': _PREVIOUS,
      'filters': draw(CHANNELS, WIDTH),
      'u': draw(CHANNELS, FEATURES) / CHANNELS,
      **_V,
    },
    location_sensitive,
  ),
  Case('coverage', {**_PROJECTED, 'coverage': 2 * np.abs(draw(S)), 'u': draw(FEATURES, seed=2), **_V}, loop(_coverage)),
  Case(
    'fertility',
    {
      **_PROJECTED,
      'coverage': 2 * np.abs(draw(S)),
      'u': draw(FEATURES, seed=2),
      **_V,
      'w': draw(FEATURES, seed=4) / 4,
      'max_fertility': 3.0,
    },
    loop(_fertility),
  ),
]

SCORES_BY_NAME = {case.row: case for case in SCORE_CASES}
