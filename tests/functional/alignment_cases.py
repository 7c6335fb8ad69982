"""Reference implementations of every row of ALIGNMENTS and of every test-time counterpart, like those in cases.py."""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.functional.latent import ChainState
from attention_jax.functional.monotonic import LOG_ZERO, AgentState
from attention_jax.functional.sampling import Samples
from tests.functional.cases import FEATURES, QUERY, SCORE_CASES, Case, S, draw

# Arguments whose leading axis, if they have any, is S.
SIZED = ('scores', 'mask', 'state', 'previous', 'coverage', 'key', 'remembered')


def over_unmasked(formula):
  """Applies a formula to the unmasked scores; masked weights are 0."""

  def reference(scores, mask, **options):
    weights = np.zeros(len(scores))
    weights[mask] = formula(scores[mask], **options)
    return weights

  return reference


def entmax(scores, alpha):
  """α-entmax from its optimality condition: the threshold at which [(α - 1) e - τ]₊^(1/(α - 1)) sums to 1."""
  z = (alpha - 1) * scores

  def weights(tau):
    return np.maximum(z - tau, 0) ** (1 / (alpha - 1))

  low = z.max() - 1
  high = z.max()
  for _ in range(100):
    tau = (low + high) / 2
    if weights(tau).sum() > 1:
      low = tau
    else:
      high = tau
  return weights(low)


def sample_noise(sampler, rng, size):
  """Returns the noise that an alignment draws from `rng`; `sampler` is jax.random.gumbel or jax.random.normal."""
  return np.asarray(sampler(rng, (size,), jnp.float32), np.float64)


def resize_arguments(arguments, size: int):
  """Returns the arguments of a case for a memory of `size` positions."""

  def resize(x):
    return np.resize(x, (size, *np.shape(x)[1:])) if np.ndim(x) else x

  return {name: jax.tree.map(resize, value) if name in SIZED else value for name, value in arguments.items()}


def _softmax(scores, temperature=1.0):
  if not len(scores):
    return scores
  powers = [np.exp((e - max(scores)) / temperature) for e in scores]
  return np.array(powers) / sum(powers)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _sigmoid_by_length(scores):
  return np.array([1 / (1 + len(scores) * np.exp(-e)) for e in scores])


def _softpick(scores):
  terms = [np.exp(e) - 1 for e in scores]
  return np.array([max(term, 0) / sum(abs(term) for term in terms) for term in terms])


def _smoothed(scores):
  return np.array([_sigmoid(e) for e in scores]) / sum(_sigmoid(e) for e in scores)


def _sink_softmax(scores, sink):
  powers = [np.exp(e) for e in scores]
  return np.array(powers) / (np.exp(sink) + sum(powers))


def _scalable_softmax(scores, scale):
  powers = [len(scores) ** (scale * e) for e in scores]
  return np.array(powers) / sum(powers)


def _capped_softmax(scores, cap):
  return _softmax(np.array([cap * np.tanh(e / cap) for e in scores]))


def _combined_softmax(scores, temperature, length_scale, cap, sink):
  scaled = [length_scale * np.log(len(scores)) * e / temperature for e in scores]
  return _sink_softmax([cap * np.tanh(e / cap) for e in scaled], sink)


def _stick_breaking(scores):
  weights = np.zeros(len(scores))
  rest = 1.0
  for s in reversed(range(len(scores))):
    weights[s] = rest * _sigmoid(scores[s])
    rest -= weights[s]
  return weights


def _proportional(scores):
  positive = [max(e, 0) for e in scores]
  return np.array(positive) / sum(positive)


def _sparsemax(scores):
  """The point of the simplex that is nearest to the scores, found by trying every support."""
  best = None
  smallest = np.inf
  for bits in range(1, 2 ** len(scores)):
    support = np.array([bits >> s & 1 for s in range(len(scores))], bool)
    point = np.where(support, scores - (scores[support].sum() - 1) / support.sum(), 0.0)
    distance = ((point - scores) ** 2).sum()
    if point.min() >= 0 and distance < smallest:
      best = point
      smallest = distance
  return best


def _hardmax(scores):
  return np.array([float(s == list(scores).index(max(scores))) for s in range(len(scores))])


def _coverage_penalised(scores, mask, coverage, penalty=1.0):
  return over_unmasked(_softmax)(scores - penalty * coverage, mask)


def _in_window(formula, scores, mask, is_inside):
  """Applies a formula to the unmasked scores inside a window; other weights are 0."""
  weights = np.zeros(len(scores))
  window = [s for s in range(len(scores)) if mask[s] and is_inside(s)]
  if window:
    weights[window] = formula(scores[window])
  return weights


def _local_m(scores, mask, step, width=10):
  return _in_window(_softmax, scores, mask, lambda s: abs(s - step) <= width)


def _local_p(scores, mask, query, w, v, width=10):
  hidden = [np.tanh(sum(query[i] * w[i, f] for i in range(len(query)))) for f in range(len(v))]
  first = next((s for s in range(len(mask)) if mask[s]), 0)
  p = first + sum(mask) * _sigmoid(sum(v[f] * hidden[f] for f in range(len(v))))
  weights = _in_window(_softmax, scores, mask, lambda s: abs(s - p) <= width)
  return np.array([weights[s] * np.exp(-((s - p) ** 2) / (2 * (width / 2) ** 2)) for s in range(len(scores))])


def _windowed(scores, mask, previous, width=50, smooth=False):
  median = next(s for s in range(len(previous)) if sum(previous[: s + 1]) >= sum(previous) / 2)
  formula = _smoothed if smooth else _softmax
  return _in_window(formula, scores, mask, lambda s: median - width <= s < median + width)


def _hard(scores, mask, rng, state):
  weights = np.zeros(len(scores))
  if not any(mask):
    return weights, state
  noisy = scores + sample_noise(jax.random.gumbel, rng, len(scores))
  sample = max(np.flatnonzero(mask), key=lambda s: noisy[s])
  weights[sample] = 1
  return weights, state + np.log(over_unmasked(_softmax)(scores, mask)[sample])


def _samples(is_expectation):
  return Samples(np.array(-1.5), np.array(0.75), np.array(float(is_expectation)))


def _hard_once(scores, mask, rng, step, state, expectation_rate=0.5):
  if not any(mask):
    return np.zeros(len(scores)), state
  probabilities = over_unmasked(_softmax)(scores, mask)
  entropy = state.entropy - sum(p * np.log(p) for p in probabilities[mask])
  is_expectation = state.is_expectation
  if step == 0:
    is_expectation = float(jax.random.bernoulli(jax.random.fold_in(rng, 1), expectation_rate))
  if is_expectation:
    return probabilities, Samples(state.log_prob, entropy, is_expectation)
  sample, log_prob = _hard(scores, mask, rng, state.log_prob)
  return sample, Samples(log_prob, entropy, is_expectation)


def _gumbel(scores, mask, rng, temperature=1.0):
  noisy = scores + sample_noise(jax.random.gumbel, rng, len(scores))
  return over_unmasked(_hardmax)(noisy, mask) if any(mask) else np.zeros(len(scores))


def _latent_monotonic(scores, mask, state):
  previous = np.where(state.position > LOG_ZERO / 2, np.exp(state.position), 0.0)
  weights = np.zeros(len(scores))
  top = max(scores)
  ahead = np.cumsum(np.where(mask, np.exp(scores - top), 0.0)[::-1])[::-1]
  share = 0.0
  for s in range(len(scores)):
    share += previous[s] / ahead[s] if ahead[s] > 0 else 0.0
    weights[s] = np.exp(scores[s] - top) * share if mask[s] else 0.0
  logs = [np.log(w) if w > 0 else LOG_ZERO for w in weights]
  return weights, ChainState(np.array(logs), np.where(mask, scores, LOG_ZERO))


def _monotonic(scores, mask, state, rng, noise=1.0):
  p = np.where(mask, _sigmoid(scores + noise * sample_noise(jax.random.normal, rng, len(scores))), 0.0)
  weights = np.zeros(len(scores))
  q = 0.0
  for s in range(len(scores)):
    q = (1 - p[s - 1]) * q + state[s] if s else state[0]
    weights[s] = p[s] * q
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


def _chunk_weights(stops, mask, query, remembered, w, bias, v, width):
  scores = [v @ np.tanh(query @ w + remembered[s] + bias) for s in range(len(remembered))]
  weights = np.zeros(len(mask))
  for end in range(len(mask)):
    chunk = [s for s in range(max(0, end - width + 1), end + 1) if mask[s]]
    if chunk and stops[end]:
      weights[chunk] += stops[end] * _softmax(np.array([scores[s] for s in chunk]))
  return weights


def _mocha(scores, mask, query, remembered, w, bias, v, state, rng, width=3, noise=1.0):
  stops, _ = _monotonic(scores, mask, state, rng, noise)
  return _chunk_weights(stops, mask, query, remembered, w, bias, v, width), stops


def _hard_mocha(scores, mask, query, remembered, w, bias, v, state, width=3):
  stops, _ = _hard_monotonic(scores, mask, state)
  return _chunk_weights(stops, mask, query, remembered, w, bias, v, width), stops


def _forward(scores, mask, state):
  return _forward_walk(scores, mask, state, stay=1.0, move=1.0)


def _forward_agent(scores, mask, query, remembered, w, bias, v, offset, state):
  move = _sigmoid(state.move_logit)
  weights, log_weights = _forward_walk(scores, mask, state.log_weights, stay=1 - move, move=move)
  projected = sum(weights[s] * remembered[s] for s in range(len(weights)))
  hidden = [np.tanh(query @ w[:, j] + projected[j] + bias[j]) for j in range(len(v))]
  return weights, AgentState(log_weights, sum(v[j] * hidden[j] for j in range(len(v))) + offset)


def _forward_walk(scores, mask, state, stay, move):
  previous = np.where(state > LOG_ZERO / 2, np.exp(state), 0.0)
  for s in range(len(scores)):
    if not mask[s] and any(mask[s:]):  # mass at a masked position moves to the next unmasked one
      distance = next(i for i, is_unmasked in enumerate(mask[s:]) if is_unmasked)
      previous[s + distance] += previous[s]
  y = over_unmasked(_softmax)(scores, mask)
  weights = np.zeros(len(scores))
  unmasked = [s for s in range(len(scores)) if mask[s]]
  for predecessor, s in zip([None, *unmasked], unmasked, strict=False):
    moved = 0.0 if predecessor is None else move * previous[predecessor]
    weights[s] = (stay * previous[s] + moved) * y[s]
  weights = weights / sum(weights) if sum(weights) else weights
  return weights, np.array([np.log(x) if x > 0 else LOG_ZERO for x in weights])


def _addressing(scores, mask, query, previous, shift, shift_bias, **params):
  """Graves et al. 2014, equations 5 and 7 to 9, between the first and the last unmasked position."""
  weights = np.zeros(len(scores))
  unmasked = np.flatnonzero(mask)
  if not len(unmasked):
    return weights

  def softplus(x):
    return np.log(1 + np.exp(x))

  def linear(name):
    return sum(params[name] * query) + params[f'{name}_bias']

  gate = _sigmoid(linear('gate')) if any(previous[mask]) else 1.0
  content = over_unmasked(_softmax)(softplus(linear('strength')) * scores, mask)
  interpolated = gate * content + (1 - gate) * previous * mask
  shifts = _softmax(shift @ query + shift_bias)
  first = unmasked[0]
  size = unmasked[-1] - first + 1
  for i in range(size):
    for k in range(len(shifts)):
      weights[first + (i + k - len(shifts) // 2) % size] += interpolated[first + i] * shifts[k]
  powers = (weights * mask) ** (1 + softplus(linear('power')))
  return powers / sum(powers)


_SCORED = {'scores': draw(S), 'mask': np.array([1, 1, 0, 1, 1, 1, 0], bool)}
_PREVIOUS = np.array([0.3, 0.1, 0.2, 0.0, 0.1, 0.0, 0.0])
_LOG_PREVIOUS = np.log(np.maximum(_PREVIOUS, 1e-9))
_RNG = jax.random.key(5)
_QUERY = {'query': draw(QUERY)}
_UNIT = {
  **_QUERY,
  'remembered': draw(S, FEATURES) / 2,
  'w': draw(QUERY, FEATURES) / 3,
  'bias': draw(FEATURES) / 3,
  'v': draw(FEATURES, seed=1),
}

ALIGNMENT_CASES = [
  Case('softmax', {**_SCORED, 'temperature': 0.4}, over_unmasked(_softmax)),
  Case('sigmoid', _SCORED, over_unmasked(lambda scores: np.array([_sigmoid(e) for e in scores]))),
  Case('sigmoid_by_length', _SCORED, over_unmasked(_sigmoid_by_length)),
  Case('softpick', _SCORED, over_unmasked(_softpick)),
  Case('smoothed', _SCORED, over_unmasked(_smoothed)),
  Case('sink_softmax', {**_SCORED, 'sink': np.array(0.7)}, over_unmasked(_sink_softmax)),
  Case('scalable_softmax', {**_SCORED, 'scale': np.array(0.8)}, over_unmasked(_scalable_softmax)),
  Case('capped_softmax(cap=1.5)', {**_SCORED, 'cap': 1.5}, over_unmasked(_capped_softmax)),
  Case(
    'softmax(temperature=0.7, length_scale=0.8, cap=1.5, sink=True)',
    {**_SCORED, 'temperature': 0.7, 'length_scale': 0.8, 'cap': 1.5, 'sink': np.array(0.7)},
    over_unmasked(_combined_softmax),
  ),
  Case('stick_breaking', _SCORED, over_unmasked(_stick_breaking)),
  Case('proportional', _SCORED, over_unmasked(_proportional)),
  Case('sparsemax', _SCORED, over_unmasked(_sparsemax)),
  Case('entmax15', _SCORED, over_unmasked(lambda scores: entmax(scores, 1.5))),
  Case('entmax', {**_SCORED, 'alpha': np.array(1.3)}, over_unmasked(entmax)),
  Case('hardmax', _SCORED, over_unmasked(_hardmax)),
  Case('coverage_penalised', {**_SCORED, 'coverage': 2 * np.abs(draw(S)), 'penalty': 0.7}, _coverage_penalised),
  Case('local_m(width=2)', {**_SCORED, 'step': np.array(3, np.int32), 'width': 2}, _local_m),
  Case(
    'local_p(width=2)',
    {**_SCORED, **_QUERY, 'w': draw(QUERY, FEATURES) / 4, 'v': draw(FEATURES, seed=1) / 4, 'width': 2},
    _local_p,
  ),
  Case('windowed(width=2)', {**_SCORED, 'previous': _PREVIOUS, 'width': 2, 'smooth': True}, _windowed),
  Case('hard', {**_SCORED, 'rng': _RNG, 'state': np.array(-1.5)}, _hard),
  Case('hard_once', {**_SCORED, 'rng': _RNG, 'step': np.array(0, np.int32), 'state': _samples(False)}, _hard_once),
  Case('gumbel', {**_SCORED, 'rng': _RNG, 'temperature': 0.7}, _gumbel),
  Case('gumbel_annealed', {**_SCORED, 'rng': _RNG, 'temperature': np.array(0.7)}, _gumbel),
  Case('latent', _SCORED, over_unmasked(_softmax)),
  Case('latent_monotonic', {**_SCORED, 'state': ChainState(_LOG_PREVIOUS, draw(S, seed=3))}, _latent_monotonic),
  Case('monotonic', {**_SCORED, 'rng': _RNG, 'state': _PREVIOUS, 'noise': 0.5}, _monotonic),
  Case('mocha(width=2)', {**_SCORED, **_UNIT, 'rng': _RNG, 'state': _PREVIOUS, 'width': 2, 'noise': 0.5}, _mocha),
  Case('forward', {**_SCORED, 'state': _LOG_PREVIOUS}, _forward),
  Case(
    'forward_agent',
    {**_SCORED, **_UNIT, 'offset': np.array(0.3), 'state': AgentState(_LOG_PREVIOUS, np.array(0.7))},
    _forward_agent,
  ),
  Case(
    'addressing',
    {
      **_SCORED,
      **_QUERY,
      'previous': _PREVIOUS,
      'shift': draw(4, QUERY, seed=2),
      'shift_bias': draw(4),
      **{name: draw(QUERY, seed=3 + i) / 2 for i, name in enumerate(('strength', 'gate', 'power'))},
      **{name: np.array(0.2) for name in ('strength_bias', 'gate_bias', 'power_bias')},
    },
    _addressing,
  ),
]
TEST_TIME_CASES = [
  Case('hard_monotonic', {**_SCORED, 'state': np.eye(S)[1]}, _hard_monotonic),
  Case('hard_mocha', {**_SCORED, **_UNIT, 'state': np.eye(S)[1], 'width': 2}, _hard_mocha),
]

ALIGNMENTS_BY_NAME = {case.row: case for case in reversed(ALIGNMENT_CASES)}  # the first case of each row


def _function_at_test(case: Case):
  row = aj.ALIGNMENTS[case.row]
  return row.at_test or row.fn


# Several alignments are the same function at test time: only the first of them is paired with every score.
_DISTINCT_AT_TEST = {_function_at_test(case): case.name for case in reversed(ALIGNMENT_CASES)}.values()
PAIRS = [(s.name, a.name) for s in SCORE_CASES for a in ALIGNMENT_CASES if a.name in _DISTINCT_AT_TEST]
# Every row at least once, for tests that compile each pair again: every score with the first alignment, and every other
# alignment with the last score, which is recurrent.
CORE_PAIRS = [(s.name, ALIGNMENT_CASES[0].name) for s in SCORE_CASES] + [
  (SCORE_CASES[-1].name, a.name) for a in ALIGNMENT_CASES[1:]
]
