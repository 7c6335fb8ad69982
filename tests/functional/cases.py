"""What every row of SCORES and ALIGNMENTS must compute: a literal NumPy loop in float64, written from the paper.

A new variant adds one Case here, and every law of the suite then runs over it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

# A different prime for every axis; QUERY is also the key's width where a score needs both alike.
T, S, QUERY, KEY, VALUE, FEATURES, RANK, CHANNELS, WIDTH, POSITIONS = 3, 7, 5, 11, 13, 17, 2, 19, 3, 23


class Case(NamedTuple):
  """One row: `name` is a spec string, `arguments` the arguments by name, `reference` the same formula as a literal loop.

  Of an alignment that keeps a state, `reference` returns (weights, state).
  """

  name: str
  arguments: Mapping[str, Any]
  reference: Callable[..., np.ndarray]

  @property
  def row(self) -> str:
    return self.name.split('(')[0]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).normal(size=shape)


def loop(formula):
  """The scores of a formula of one query, one key and the position s."""
  return lambda query, key, **rest: np.array([formula(query, key[s], s, **rest) for s in range(len(key))])


# ------------------------------------------------------------------------------------------------------------- scores


def _unnormalised(query, key, s):
  return sum(q * k for q, k in zip(query, key, strict=True))


def _bilinear(query, key, s, w):
  return sum(query[i] * w[i, j] * key[j] for i in range(len(query)) for j in range(len(key)))


def _tanh_layer(query, key, s, v):
  return sum(v[f] * np.tanh(query[f] + key[f]) for f in range(len(v)))


def _weight_normalised(query, key, s, v, gain, bias):
  length = np.sqrt(sum(x * x for x in v))
  return sum(gain * v[f] / length * np.tanh(query[f] + key[f] + bias[f]) for f in range(len(v)))


def _concatenated(query, key, s, w, v):
  both = np.concatenate([query, key])
  return sum(v[f] * np.tanh(sum(both[i] * w[i, f] for i in range(len(both)))) for f in range(len(v)))


def _cosine(query, key, s, beta):
  return beta * sum(query * key) / (np.sqrt(sum(query * query)) * np.sqrt(sum(key * key)))


def _by_position(query, key, s, w):
  return sum(w[s, i] * query[i] for i in range(len(query)))


def _location_sensitive(query, key, previous, filters, u, v):
  size, (channels, width) = len(key), filters.shape
  scores = np.zeros(size)
  for s in range(size):
    # numpy's own convolution flips the filter; 'full' starts width // 2 before the centre.
    f = [np.convolve(previous, filters[c], mode='full')[width // 2 + s] for c in range(channels)]
    for i in range(len(v)):
      scores[s] += v[i] * np.tanh(query[i] + key[s, i] + sum(u[c, i] * f[c] for c in range(channels)))
  return scores


def _coverage(query, key, s, coverage, u, v):
  return sum(v[f] * np.tanh(query[f] + key[f] + u[f] * coverage[s]) for f in range(len(v)))


def _fertility(query, key, s, coverage, u, v, w, most=2.0):
  wanted = most / (1 + np.exp(-sum(w[f] * key[f] for f in range(len(w)))))
  return sum(v[f] * np.tanh(query[f] + key[f] + u[f] * coverage[s] / wanted) for f in range(len(v)))


_SAME = {'query': draw(QUERY), 'key': draw(S, QUERY)}
_OTHER = {'query': draw(QUERY), 'key': draw(S, KEY)}
_PROJECTED = {'query': draw(FEATURES), 'key': draw(S, FEATURES)}
_V = {'v': draw(FEATURES, seed=1)}
_PREVIOUS = np.abs(draw(S)) / np.abs(draw(S)).sum()

SCORE_CASES = [
  Case('dot', _SAME, loop(_unnormalised)),
  Case('scaled_dot', _SAME, loop(lambda q, k, s: _unnormalised(q, k, s) / np.sqrt(len(q)))),
  Case('general', {**_OTHER, 'w': draw(QUERY, KEY)}, loop(_bilinear)),
  Case(
    f'low_rank(rank={RANK})',
    {**_OTHER, 'u': draw(QUERY, RANK), 'v': draw(KEY, RANK)},
    loop(lambda q, k, s, u, v: _bilinear(q, k, s, u @ v.T)),
  ),
  Case('additive', {**_PROJECTED, **_V}, loop(_tanh_layer)),
  Case(
    'normed_additive', {**_PROJECTED, **_V, 'gain': np.array(0.7), 'bias': draw(FEATURES)}, loop(_weight_normalised)
  ),
  Case(
    'offset_additive',
    {**_PROJECTED, **_V, 'gain': np.array(0.7), 'bias': draw(FEATURES), 'offset': np.array(-0.4)},
    loop(lambda q, k, s, v, gain, bias, offset: _weight_normalised(q, k, s, v, gain, bias) + offset),
  ),
  Case('concat', {**_OTHER, 'w': draw(QUERY + KEY, FEATURES), **_V}, loop(_concatenated)),
  Case('cosine', {**_SAME, 'beta': np.array(2.3)}, loop(_cosine)),
  Case(f'location(max_positions={POSITIONS})', {**_OTHER, 'w': draw(POSITIONS, QUERY)}, loop(_by_position)),
  Case(
    f'location_sensitive(channels={CHANNELS}, width={WIDTH})',
    {
      **_PROJECTED,
      'previous': _PREVIOUS,
      'filters': draw(CHANNELS, WIDTH),
      'u': draw(CHANNELS, FEATURES) / CHANNELS,
      **_V,
    },
    _location_sensitive,
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
      'most': 3.0,
    },
    loop(_fertility),
  ),
]

SCORES_BY_NAME = {case.row: case for case in SCORE_CASES}
