"""What every row of SCORES and ALIGNMENTS must compute: a literal NumPy loop in float64, written from the paper.

A new variant adds one Case here, and every law of the suite then runs over it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

# A different prime for every axis; QUERY is also the key's width where a score needs both alike.
T, S, QUERY, KEY, VALUE, FEATURES, RANK, CHANNELS, WIDTH, POSITIONS = 3, 7, 5, 11, 13, 17, 2, 19, 3, 23


class Case(NamedTuple):
  """One row: `name` is a spec string, `given` the arguments by name, `paper` the same formula as a literal loop."""

  name: str
  given: Mapping[str, Any]
  paper: Callable[..., np.ndarray]

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
  Case(
    'coverage', {**_PROJECTED, 'coverage': 2 * np.abs(draw(S)), 'u': draw(FEATURES, seed=2), **_V}, loop(_coverage)
  ),
]

# --------------------------------------------------------------------------------------------------------- alignments


def over_real(formula):
  """Applies a formula to the unmasked scores alone; everything else is 0."""

  def paper(scores, mask, **rest):
    weights = np.zeros(len(scores))
    weights[mask] = formula(scores[mask], **rest)
    return weights

  return paper


def _softmax(scores, temperature=1.0):
  return np.array([np.exp(e / temperature) for e in scores]) / sum(np.exp(e / temperature) for e in scores)


def _nearest_on_simplex(scores):
  """sparsemax by trying every support: the feasible projection that is nearest to the scores."""
  best, nearest = np.inf, None
  for chosen in range(1, 2 ** len(scores)):
    support = np.array([chosen >> s & 1 for s in range(len(scores))], bool)
    point = np.where(support, scores - (scores[support].sum() - 1) / support.sum(), 0.0)
    if point.min() >= 0 and (distance := ((point - scores) ** 2).sum()) < best:
      best, nearest = distance, point
  return nearest


def entropic(scores, alpha):
  """α-entmax from its optimality condition: the threshold at which [(α - 1) z - τ]₊^(1/(α - 1)) sums to 1."""
  z = (alpha - 1) * scores
  low, high = z.max() - 1, z.max()
  weights = lambda tau: np.maximum(z - tau, 0) ** (1 / (alpha - 1))
  for _ in range(100):
    tau = (low + high) / 2
    low, high = (tau, high) if weights(tau).sum() > 1 else (low, tau)
  return weights(low)


def _first_largest(scores):
  return np.array([float(s == list(scores).index(max(scores))) for s in range(len(scores))])


_SCORED = {'scores': draw(S), 'mask': np.array([1, 1, 0, 1, 1, 1, 0], bool)}

ALIGNMENT_CASES = [
  Case('softmax', {**_SCORED, 'temperature': 0.4}, over_real(_softmax)),
  Case('sigmoid', _SCORED, over_real(lambda scores: np.array([1 / (1 + np.exp(-e)) for e in scores]))),
  Case('sparsemax', _SCORED, over_real(_nearest_on_simplex)),
  Case('entmax15', _SCORED, over_real(lambda scores: entropic(scores, 1.5))),
  Case('entmax', {**_SCORED, 'alpha': np.array(1.3)}, over_real(entropic)),
  Case('hardmax', _SCORED, over_real(_first_largest)),
]

SCORES_BY_NAME = {case.row: case for case in SCORE_CASES}
ALIGNMENTS_BY_NAME = {case.row: case for case in ALIGNMENT_CASES}
PAIRS = [(s.name, a.name) for s in SCORE_CASES for a in ALIGNMENT_CASES]
# Every row once, for the laws that need a compilation of their own: each score with the first alignment, and each
# other alignment with the last score, which is recurrent.
SPINE = [(s.name, ALIGNMENT_CASES[0].name) for s in SCORE_CASES] + [
  (SCORE_CASES[-1].name, a.name) for a in ALIGNMENT_CASES[1:]
]
