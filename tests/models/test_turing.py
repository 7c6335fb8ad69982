"""Neural Turing Machines and the operations of their memory, against the equations of the paper in NumPy."""

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


def make_model(controller='feedforward', **options):
  model = build_recaller({'cell': CELL.replace('CONTROLLER', controller)} | options, OUTPUTS)
  return model, model.init(jax.random.key(0), X)['params']


def test_writes_erase_before_they_add():
  args = draw(SLOTS, WIDTH), jax.nn.softmax(draw(2, SLOTS)), jax.nn.sigmoid(draw(2, WIDTH, seed=1)), draw(2, WIDTH)
  memory, weights, erase, add = map(np.asarray, args)
  expected = memory.copy()
  for s in range(SLOTS):
    for d in range(WIDTH):
      for h in range(2):
        expected[s, d] *= 1 - weights[h, s] * erase[h, d]
      for h in range(2):
        expected[s, d] += weights[h, s] * add[h, d]
  np.testing.assert_allclose(write_memory(*args), expected, rtol=1e-5)


WEIGHTS = jnp.array([0, 0.2, 0.1, 0.7, 0])


def test_shifts_are_circular_over_unmasked_slots():
  mask = jnp.array([0, 1, 1, 1, 0], bool)
  for shift, expected in (
    ([0.0, 0, 1], [0, 0.7, 0.2, 0.1, 0]),
    ([1.0, 0, 0], [0, 0.1, 0.7, 0.2, 0]),
    ([0.0, 0, 0, 0, 1], [0, 0.1, 0.7, 0.2, 0]),
  ):
    np.testing.assert_allclose(shift_weights(WEIGHTS, mask, jnp.array(shift)), expected, rtol=1e-6)
  mask_with_gap, forward = jnp.array([1, 1, 0, 1, 0], bool), jnp.array([0.0, 0, 1])
  shifted = shift_weights(jnp.array([0.3, 0.5, 0, 0.2, 0]), mask_with_gap, forward)
  np.testing.assert_allclose(shifted, [0.2, 0.3, 0, 0, 0], rtol=1e-6)
  # All weight would move to a masked slot.
  assert shift_weights(jnp.array([0.0, 1, 0, 0, 0]), mask_with_gap, forward).tolist() == [0, 1, 0, 0, 0]


def test_sharpening_normalises_powers_of_the_weights():
  squares = WEIGHTS**2
  np.testing.assert_allclose(sharpen(WEIGHTS, jnp.array(2.0)), squares / squares.sum(), rtol=1e-5)
  assert sharpen(WEIGHTS, jnp.array(1e4)).tolist() == [0, 0, 0, 1, 0]
  assert not sharpen(0 * WEIGHTS, jnp.array(2.0)).any()


@pytest.mark.parametrize('weights', [[0.999, 1e-7, 0], [0.7, 0.3, 1e-4], [0.5, 0.5, 1e-8]])
def test_the_gradient_of_sharpening(weights):
  weights, power = np.array(weights), 1.2
  powers = weights**power
  slopes = power * np.where(weights > 0, weights, 1) ** (power - 1) * (weights > 0)
  expected = np.diag(slopes) / powers.sum() - np.outer(powers, slopes) / powers.sum() ** 2
  jacobian = jax.jacobian(sharpen)(jnp.array(weights, jnp.float32), jnp.array(power))
  np.testing.assert_allclose(jacobian[:, weights > 0], expected[:, weights > 0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize('score', sample_cases([(name,) for name, row in SCORES.items() if is_self_contained(row)], 4))
def test_heads_support_every_self_contained_score(score):
  model, params = make_model('lstm', score=score)
  assert np.isfinite(jax.jit(model.apply)({'params': params}, X).logits).all()


def literal_logits(params, inputs):
  """Runs the whole machine over one sequence [T, I], step by step; the controller is tanh(W x + b)."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  cell = params['cell']
  dense = lambda x, p: x @ p['kernel'] + p['bias']
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  addressing = ALIGNMENTS_BY_NAME['addressing'].reference
  memory, contexts = np.full((SLOTS, WIDTH), INITIAL_MEMORY), np.zeros((2, WIDTH))
  previous = {heads: np.eye(SLOTS)[[0, 0]] for heads in ('writers', 'readers')}

  def attend(heads, h):
    p = cell[heads]['heads']
    for i in range(2):
      key = h @ p['query'][i]
      cosine = np.array([key @ slot / np.linalg.norm(key) / np.linalg.norm(slot) for slot in memory])
      head_params = {name: x[i] for name, x in p['alignment'].items()}
      mask = np.ones(SLOTS, bool)
      previous[heads][i] = addressing(cosine, mask, query=h, previous=previous[heads][i], **head_params)
    return previous[heads]

  logits = []
  for x in inputs:
    h = np.tanh(dense(np.concatenate([x, contexts.ravel()]), cell['control']['inputs']))
    weights = attend('writers', h)
    erase, add = (dense(h, cell[name]).reshape(2, WIDTH) for name in ('erase', 'add'))
    retained = np.prod([1 - np.outer(w, sigmoid(e)) for w, e in zip(weights, erase, strict=True)], axis=0)
    memory = memory * retained + sum(np.outer(w, a) for w, a in zip(weights, add, strict=True))
    contexts = attend('readers', h) @ memory
    logits.append(dense(np.concatenate([h, contexts.ravel()]), params['bits']))
  return np.array(logits)


def test_logits_equal_the_equations_of_the_paper():
  model, params = make_model()
  outputs = model.apply({'params': params}, X)
  for row in range(2):
    expected = literal_logits(params, np.asarray(X[row]))
    np.testing.assert_allclose(outputs.logits[row], expected, rtol=2e-4, atol=2e-5)
  assert outputs.read.shape == outputs.write.shape == (2, 6, 2, SLOTS)
  np.testing.assert_allclose(outputs.read.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize('controller', ['lstm', 'gru'])
def test_outputs_do_not_depend_on_later_inputs(controller):
  model, params = make_model(controller)
  run = lambda x: model.apply({'params': params}, x).logits
  changed = X.at[:, 3:].set(7.0)
  np.testing.assert_allclose(run(changed)[:, :3], run(X)[:, :3], rtol=1e-6)
  assert np.abs(run(changed)[:, 3:] - run(X)[:, 3:]).max() > 1e-3
  grads = jax.grad(lambda p: (model.apply({'params': p}, X).logits ** 2).sum())(params)
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
  ('score', 'alignment'), [('dot', 'sparsemax'), ('additive', 'softmax'), ('cosine(beta=1.0)', 'forward')]
)
def test_any_score_and_alignment(score, alignment):
  model, params = make_model(score=score, alignment=alignment)
  outputs = model.apply({'params': params}, X)
  assert np.isfinite(outputs.logits).all() and (outputs.write >= 0).all()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'cell': 'turin'}, "unknown cell 'turin' .*expected one of: recurrent, turing"),
    ({'cell': 'turing(slots=0)'}, "cell 'turing': option slots must be at least 1, got 0"),
    ({'cell': 'turing(controller="rnn")'}, "unknown controller 'rnn'; expected one of: feedforward, gru, lstm, simple"),
    ({'alignment': 'hard'}, "turing: the alignment must neither draw .* got 'hard'; expected one of: .*addressing"),
    ({'alignment': 'latent'}, "turing: the alignment must neither draw .* got 'latent'"),
    ({'score': 'cosin'}, "unknown score 'cosin'"),
  ],
)
def test_user_errors(options, message):
  with pytest.raises(UserError, match=message):
    build_recaller(options, OUTPUTS).init(jax.random.key(0), X)
