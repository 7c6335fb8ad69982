"""Neural Turing Machines against the equations of the paper in NumPy, and what a memory is asked to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.errors import UserError
from attention_jax.functional.addressing import sharpen, shift_weights, write_memory
from attention_jax.functional.scores import SCORES
from attention_jax.models.turing import INITIAL_MEMORY, build_recaller, is_self_contained
from tests.functional.alignment_cases import ALIGNMENTS_BY_NAME
from tests.modules.helpers import draw
from tests.sweeps import sample_cases

SLOTS, WIDTH, FEATURES, INPUTS, OUTPUTS = 5, 3, 4, 2, 2
CELL = f'turing(slots={SLOTS}, width={WIDTH}, features={FEATURES}, reads=2, writes=2, controller="CONTROLLER")'
X = draw(2, 6, INPUTS)


def built(controller='feedforward', **options):
  model = build_recaller({'cell': CELL.replace('CONTROLLER', controller)} | options, OUTPUTS)
  return model, model.init(jax.random.key(0), X)['params']


def test_writing_erases_then_adds():
  given = draw(SLOTS, WIDTH), jax.nn.softmax(draw(2, SLOTS)), jax.nn.sigmoid(draw(2, WIDTH, seed=1)), draw(2, WIDTH)
  memory, weights, erase, add = map(np.asarray, given)
  expected = memory.copy()
  for s in range(SLOTS):
    for d in range(WIDTH):
      for h in range(2):
        expected[s, d] *= 1 - weights[h, s] * erase[h, d]
      for h in range(2):
        expected[s, d] += weights[h, s] * add[h, d]
  np.testing.assert_allclose(write_memory(*given), expected, rtol=1e-5)


def test_weights_go_round_and_are_sharpened():
  mask, weights = jnp.array([0, 1, 1, 1, 0], bool), jnp.array([0, 0.2, 0.1, 0.7, 0])
  np.testing.assert_allclose(shift_weights(weights, mask, jnp.array([0.0, 0, 1])), [0, 0.7, 0.2, 0.1, 0], rtol=1e-6)
  np.testing.assert_allclose(shift_weights(weights, mask, jnp.array([1.0, 0, 0])), [0, 0.1, 0.7, 0.2, 0], rtol=1e-6)
  np.testing.assert_allclose(
    shift_weights(weights, mask, jnp.array([0.0, 0, 0, 0, 1])), [0, 0.1, 0.7, 0.2, 0], rtol=1e-6
  )
  hole = jnp.array([1, 1, 0, 1, 0], bool), jnp.array([0.0, 0, 1])
  np.testing.assert_allclose(shift_weights(jnp.array([0.3, 0.5, 0, 0.2, 0]), *hole), [0.2, 0.3, 0, 0, 0], rtol=1e-6)
  assert shift_weights(jnp.array([0.0, 1, 0, 0, 0]), *hole).tolist() == [0, 1, 0, 0, 0]  # where else?
  squares = weights**2
  sharp = lambda weights, power: sharpen(weights, jnp.array(power))
  np.testing.assert_allclose(sharp(weights, 2.0), squares / squares.sum(), rtol=1e-5)
  assert sharp(weights, 1e4).tolist() == [0, 0, 0, 1, 0] and not sharp(0 * weights, 2.0).any()


@pytest.mark.parametrize('weights', [[0.999, 1e-7, 0], [0.7, 0.3, 1e-4], [0.5, 0.5, 1e-8]])
def test_the_gradient_of_sharp_weights(weights):
  weights, power = np.array(weights), 1.2
  powers = weights**power
  slopes = power * np.where(weights > 0, weights, 1) ** (power - 1) * (weights > 0)
  exact = np.diag(slopes) / powers.sum() - np.outer(powers, slopes) / powers.sum() ** 2
  found = jax.jacobian(sharpen)(jnp.array(weights, jnp.float32), jnp.array(power))
  np.testing.assert_allclose(found[:, weights > 0], exact[:, weights > 0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize('score', sample_cases([(name,) for name, row in SCORES.items() if is_self_contained(row)], 4))
def test_heads_address_by_any_score(score):
  model, params = built('lstm', score=score)
  assert np.isfinite(jax.jit(model.apply)({'params': params}, X).logits).all()


def literal(params, inputs):
  """The whole machine for one sequence [T, I], step by step; the controller is tanh(W x + b)."""
  params, cell = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, params['cell']))
  layer = lambda x, p: x @ p['kernel'] + p['bias']
  sigmoid, case = lambda x: 1 / (1 + np.exp(-x)), ALIGNMENTS_BY_NAME['addressing']
  memory, read = np.full((SLOTS, WIDTH), INITIAL_MEMORY), np.zeros((2, WIDTH))
  previous = {heads: np.eye(SLOTS)[[0, 0]] for heads in ('writers', 'readers')}

  def look(heads, h):
    of = cell[heads]['heads']
    for i in range(2):
      key = h @ of['query'][i]
      cosine = np.array([key @ slot / np.linalg.norm(key) / np.linalg.norm(slot) for slot in memory])
      given = {name: x[i] for name, x in of['alignment'].items()}
      real = np.ones(SLOTS, bool)
      previous[heads][i] = case.reference(cosine, real, query=h, previous=previous[heads][i], **given)
    return previous[heads]

  logits = []
  for x in inputs:
    h = np.tanh(layer(np.concatenate([x, read.ravel()]), cell['control']['inputs']))
    weights = look('writers', h)
    erase, add = (layer(h, cell[name]).reshape(2, WIDTH) for name in ('erase', 'add'))
    kept = np.prod([1 - np.outer(w, sigmoid(e)) for w, e in zip(weights, erase, strict=True)], axis=0)
    memory = memory * kept + sum(np.outer(w, a) for w, a in zip(weights, add, strict=True))
    read = look('readers', h) @ memory
    logits.append(layer(np.concatenate([h, read.ravel()]), params['bits']))
  return np.array(logits), memory


def test_equals_the_equations_of_the_paper():
  model, params = built()
  found = model.apply({'params': params}, X)
  for row in range(2):
    np.testing.assert_allclose(found.logits[row], literal(params, np.asarray(X[row]))[0], rtol=2e-4, atol=2e-5)
  assert found.read.shape == found.write.shape == (2, 6, 2, SLOTS)
  np.testing.assert_allclose(found.read.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize('controller', ['lstm', 'gru'])
def test_what_comes_later_tells_nothing_of_before(controller):
  model, params = built(controller)
  run = lambda x: model.apply({'params': params}, x).logits
  later = X.at[:, 3:].set(7.0)
  np.testing.assert_allclose(run(later)[:, :3], run(X)[:, :3], rtol=1e-6)
  assert np.abs(run(later)[:, 3:] - run(X)[:, 3:]).max() > 1e-3
  grads = jax.grad(lambda p: (model.apply({'params': p}, X).logits ** 2).sum())(params)
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
  ('score', 'alignment'), [('dot', 'sparsemax'), ('additive', 'softmax'), ('cosine(beta=1.0)', 'forward')]
)
def test_any_score_and_alignment(score, alignment):
  model, params = built(score=score, alignment=alignment)
  found = model.apply({'params': params}, X)
  assert np.isfinite(found.logits).all() and (found.write >= 0).all()


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'cell': 'turin'}, "unknown cell 'turin' .*possible: recurrent, turing"),
    ({'cell': 'turing(slots=0)'}, "cell 'turing': slots is 0; possible: 1 or more"),
    ({'cell': 'turing(controller="rnn")'}, "unknown controller 'rnn'; possible: feedforward, gru, lstm, simple"),
    ({'alignment': 'hard'}, "alignment='hard' draws or sums over positions; possible: .*addressing"),
    ({'alignment': 'latent'}, "alignment='latent' draws"),
    ({'score': 'cosin'}, "unknown score 'cosin'"),
  ],
)
def test_mistakes_are_one_line(options, said):
  with pytest.raises(UserError, match=said):
    build_recaller(options, OUTPUTS).init(jax.random.key(0), X)
