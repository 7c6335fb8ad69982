"""What every row of ALIGNMENTS, and every twin, must compute: literal NumPy loops in float64, as in cases.py."""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.functional.latent import ChainState
from attention_jax.functional.monotonic import LOG_ZERO
from tests.functional.cases import FEATURES, KEY, QUERY, SCORE_CASES, Case, S, draw

SIZED = ('scores', 'mask', 'state', 'previous', 'coverage', 'key')  # arguments whose first axis is S, if they have one


def over_real(formula):
  """Applies a formula to the unmasked scores alone; everything else is 0."""

  def paper(scores, mask, **rest):
    weights = np.zeros(len(scores))
    weights[mask] = formula(scores[mask], **rest)
    return weights

  return paper


def _softmax(scores, temperature=1.0):
  if not len(scores):
    return scores
  powers = [np.exp((e - max(scores)) / temperature) for e in scores]
  return np.array(powers) / sum(powers)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _smoothed(scores):
  return np.array([_sigmoid(e) for e in scores]) / sum(_sigmoid(e) for e in scores)


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


def _penalised(scores, mask, coverage, penalty=1.0):
  return over_real(_softmax)(scores - penalty * coverage, mask)


def _through_window(scores, mask, inside):
  weights, chosen = np.zeros(len(scores)), [s for s in range(len(scores)) if mask[s] and inside(s)]
  if chosen:
    weights[chosen] = _softmax(scores[chosen])
  return weights


def _local_m(scores, mask, step, width=10):
  return _through_window(scores, mask, lambda s: abs(s - step) <= width)


def _local_p(scores, mask, query, w, v, width=10):
  inner = [np.tanh(sum(query[i] * w[i, f] for i in range(len(query)))) for f in range(len(v))]
  first = next((s for s in range(len(mask)) if mask[s]), 0)
  p = first + sum(mask) * _sigmoid(sum(v[f] * inner[f] for f in range(len(v))))
  weights = _through_window(scores, mask, lambda s: abs(s - p) <= width)
  return np.array([weights[s] * np.exp(-((s - p) ** 2) / (2 * (width / 2) ** 2)) for s in range(len(scores))])


def _windowed(scores, mask, previous, width=50, smooth=False):
  median = next(s for s in range(len(previous)) if sum(previous[: s + 1]) >= sum(previous) / 2)
  weights = np.zeros(len(scores))
  chosen = [s for s in range(len(scores)) if mask[s] and median - width <= s < median + width]
  if chosen:
    weights[chosen] = (_smoothed if smooth else _softmax)(scores[chosen])
  return weights


def sample_noise(draw_noise, rng, size):
  return np.asarray(draw_noise(rng, (size,), jnp.float32), np.float64)


def _hard(scores, mask, rng, state):
  weights = np.zeros(len(scores))
  if not any(mask):
    return weights, state
  noisy = scores + sample_noise(jax.random.gumbel, rng, len(scores))
  chosen = max(np.flatnonzero(mask), key=lambda s: noisy[s])
  weights[chosen] = 1
  return weights, state + np.log(over_real(_softmax)(scores, mask)[chosen])


def _gumbel(scores, mask, rng, temperature=1.0):
  noisy = scores + sample_noise(jax.random.gumbel, rng, len(scores))
  return over_real(_first_largest)(noisy, mask) if any(mask) else np.zeros(len(scores))


def _latent_monotonic(scores, mask, state):
  before = np.where(state.position > LOG_ZERO / 2, np.exp(state.position), 0.0)
  weights, top = np.zeros(len(scores)), max(scores)
  ahead = np.cumsum(np.where(mask, np.exp(scores - top), 0.0)[::-1])[::-1]
  share = 0.0
  for s in range(len(scores)):
    share += before[s] / ahead[s] if ahead[s] > 0 else 0.0
    weights[s] = np.exp(scores[s] - top) * share if mask[s] else 0.0
  logs = [np.log(w) if w > 0 else LOG_ZERO for w in weights]
  return weights, ChainState(np.array(logs), np.where(mask, scores, LOG_ZERO))


def _monotonic(scores, mask, state, rng, noise=1.0):
  p = np.where(mask, _sigmoid(scores + noise * sample_noise(jax.random.normal, rng, len(scores))), 0.0)
  weights, arriving = np.zeros(len(scores)), 0.0
  for s in range(len(scores)):
    arriving = (1 - p[s - 1]) * arriving + state[s] if s else state[0]
    weights[s] = p[s] * arriving
  return weights, weights


def _hard_monotonic(scores, mask, state):
  weights = np.zeros(len(scores))
  if sum(state) > 0.5:
    start = next(s for s in range(len(state)) if sum(state[: s + 1]) > 0.5)
    for s in range(start, len(scores)):
      if mask[s] and scores[s] > 0:
        weights[s] = 1
        break
  return weights, weights


def _chunk(stops, mask, query, key, w, bias, v, width):
  u = [v @ np.tanh(query @ w + key[s] + bias) for s in range(len(key))]
  weights = np.zeros(len(mask))
  for end in range(len(mask)):
    chunk = [s for s in range(max(0, end - width + 1), end + 1) if mask[s]]
    if chunk and stops[end]:
      weights[chunk] += stops[end] * _softmax(np.array([u[s] for s in chunk]))
  return weights


def _mocha(scores, mask, query, key, w, bias, v, state, rng, width=3, noise=1.0):
  stops, _ = _monotonic(scores, mask, state, rng, noise)
  return _chunk(stops, mask, query, key, w, bias, v, width), stops


def _hard_mocha(scores, mask, query, key, w, bias, v, state, width=3):
  stops, _ = _hard_monotonic(scores, mask, state)
  return _chunk(stops, mask, query, key, w, bias, v, width), stops


def _forward(scores, mask, state, u=None):
  before = np.where(state > LOG_ZERO / 2, np.exp(state), 0.0)
  stays, moves = (1.0, 1.0) if u is None else (1 - u, u)
  y, weights = over_real(_softmax)(scores, mask), np.zeros(len(scores))
  for s in range(len(scores)):
    if not mask[s] and any(mask[s:]):  # whoever stands where nothing may be read goes on to where something may
      before[s + next(i for i, real in enumerate(mask[s:]) if real)] += before[s]
  real = [s for s in range(len(scores)) if mask[s]]
  for last, s in zip([None, *real], real, strict=False):
    weights[s] = (stays * before[s] + (0.0 if last is None else moves * before[last])) * y[s]
  weights = weights / sum(weights) if sum(weights) else weights
  return weights, np.array([np.log(x) if x > 0 else LOG_ZERO for x in weights])


def _forward_agent(scores, mask, query, w, bias, state):
  return _forward(scores, mask, state, _sigmoid(sum(query[i] * w[i] for i in range(len(query))) + bias))


def _addressing(scores, mask, query, previous, shift, shift_bias, **of):
  """Graves et al. 2014, equations 5 and 7 to 9, between the first and the last unmasked position."""
  weights, (inside,) = np.zeros(len(scores)), np.nonzero(mask)
  if not len(inside):
    return weights
  softplus = lambda x: np.log(1 + np.exp(x))
  said = {name: sum(of[name] * query) + of[f'{name}_bias'] for name in ('strength', 'gate', 'power')}
  gate = _sigmoid(said['gate']) if any(previous[mask]) else 1.0
  before = gate * over_real(_softmax)(softplus(said['strength']) * scores, mask) + (1 - gate) * previous * mask
  moves, first, size = _softmax(shift @ query + shift_bias), inside[0], inside[-1] - inside[0] + 1
  for i in range(size):
    for k in range(len(moves)):
      weights[first + (i + k - len(moves) // 2) % size] += before[first + i] * moves[k]
  sharp = (weights * mask) ** (1 + softplus(said['power']))
  return sharp / sum(sharp)


_SCORED = {'scores': draw(S), 'mask': np.array([1, 1, 0, 1, 1, 1, 0], bool)}
_BEFORE = np.array([0.3, 0.1, 0.2, 0.0, 0.1, 0.0, 0.0])
_LOGS = np.log(np.maximum(_BEFORE, 1e-9))
_RNG = jax.random.key(5)
_QUERY = {'query': draw(QUERY)}
_CHUNK = {
  **_QUERY,
  'key': draw(S, KEY),
  'w': draw(QUERY, KEY) / 3,
  'bias': draw(KEY) / 3,
  'v': draw(KEY, seed=1),
}

ALIGNMENT_CASES = [
  Case('softmax', {**_SCORED, 'temperature': 0.4}, over_real(_softmax)),
  Case('sigmoid', _SCORED, over_real(lambda scores: np.array([_sigmoid(e) for e in scores]))),
  Case('smoothed', _SCORED, over_real(_smoothed)),
  Case('sparsemax', _SCORED, over_real(_nearest_on_simplex)),
  Case('entmax15', _SCORED, over_real(lambda scores: entropic(scores, 1.5))),
  Case('entmax', {**_SCORED, 'alpha': np.array(1.3)}, over_real(entropic)),
  Case('hardmax', _SCORED, over_real(_first_largest)),
  Case('coverage_penalised', {**_SCORED, 'coverage': 2 * np.abs(draw(S)), 'penalty': 0.7}, _penalised),
  Case('local_m(width=2)', {**_SCORED, 'step': np.array(3, np.int32), 'width': 2}, _local_m),
  Case(
    'local_p(width=2)',
    {**_SCORED, **_QUERY, 'w': draw(QUERY, FEATURES) / 4, 'v': draw(FEATURES, seed=1) / 4, 'width': 2},
    _local_p,
  ),
  Case('windowed(width=2)', {**_SCORED, 'previous': _BEFORE, 'width': 2, 'smooth': True}, _windowed),
  Case('hard', {**_SCORED, 'rng': _RNG, 'state': np.array(-1.5)}, _hard),
  Case('gumbel', {**_SCORED, 'rng': _RNG, 'temperature': 0.7}, _gumbel),
  Case('gumbel_annealed', {**_SCORED, 'rng': _RNG, 'temperature': np.array(0.7)}, _gumbel),
  Case('latent', _SCORED, over_real(_softmax)),
  Case('latent_monotonic', {**_SCORED, 'state': ChainState(_LOGS, draw(S, seed=3))}, _latent_monotonic),
  Case('monotonic', {**_SCORED, 'rng': _RNG, 'state': _BEFORE, 'noise': 0.5}, _monotonic),
  Case('mocha(width=2)', {**_SCORED, **_CHUNK, 'rng': _RNG, 'state': _BEFORE, 'width': 2, 'noise': 0.5}, _mocha),
  Case('forward', {**_SCORED, 'state': _LOGS}, _forward),
  Case(
    'forward_agent',
    {**_SCORED, **_QUERY, 'w': draw(QUERY, seed=2), 'bias': np.array(0.3), 'state': _LOGS},
    _forward_agent,
  ),
  Case(
    'addressing',
    {
      **_SCORED,
      **_QUERY,
      'previous': _BEFORE,
      'shift': draw(4, QUERY, seed=2),
      'shift_bias': draw(4),
      **{name: draw(QUERY, seed=3 + i) / 2 for i, name in enumerate(('strength', 'gate', 'power'))},
      **{name: np.array(0.2) for name in ('strength_bias', 'gate_bias', 'power_bias')},
    },
    _addressing,
  ),
]
TWIN_CASES = [
  Case('hard_monotonic', {**_SCORED, 'state': np.eye(S)[1]}, _hard_monotonic),
  Case('hard_mocha', {**_SCORED, **_CHUNK, 'state': np.eye(S)[1], 'width': 2}, _hard_mocha),
]

ALIGNMENTS_BY_NAME = {case.row: case for case in ALIGNMENT_CASES}
# At test several alignments are the same function, and one of them is enough.
_AT_TEST = {(aj.ALIGNMENTS[a.row].at_test or aj.ALIGNMENTS[a.row].fn): a.name for a in reversed(ALIGNMENT_CASES)}
PAIRS = [(s.name, a.name) for s in SCORE_CASES for a in ALIGNMENT_CASES if a.name in _AT_TEST.values()]
# Every row once, for the laws that need a compilation of their own: each score with the first alignment, and each
# other alignment with the last score, which is recurrent.
CORE_PAIRS = [(s.name, ALIGNMENT_CASES[0].name) for s in SCORE_CASES] + [
  (SCORE_CASES[-1].name, a.name) for a in ALIGNMENT_CASES[1:]
]


def resize_arguments(given, size: int):
  """The arguments of a case for a memory of `size` positions."""
  fit = lambda x: np.resize(x, (size, *np.shape(x)[1:])) if np.ndim(x) else x
  return {k: jax.tree.map(fit, v) if k in SIZED else v for k, v in given.items()}
